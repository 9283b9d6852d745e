"""Train a Hugging Face language model with low-precision attention: a minute on a CPU, or on a GPU.

pip install . transformers
python examples/huggingface_finetune.py                       a small random Llama learns the bytes of Python's own argparse.py
python examples/huggingface_finetune.py --model FOLDER_OR_NAME --text notes.txt --numerics flash_delta_from_p
"""

import argparse
from pathlib import Path

import torch
import transformers
from low_precision_attention import PRESETS, RECOMMENDED, huggingface, scaled_dot_product_attention


def load(name: str, text: str, attention: str) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """The model, and the text as tokens [N]; without a name a small random Llama, whose tokens are bytes."""
    if name:
        config = transformers.AutoConfig.from_pretrained(name)
        for dropout in {"attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"} & config.to_dict().keys():
            setattr(config, dropout, 0.0)  # ours has none; GPT-2's is 0.1
        model = transformers.AutoModelForCausalLM.from_pretrained(name, config=config, attn_implementation=attention)
        return model, torch.tensor(transformers.AutoTokenizer.from_pretrained(name)(text)["input_ids"])
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model, torch.tensor(list(text.encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder or name of a causal model (default: a small random Llama)")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="UTF-8 file to learn")
    presets = [name for name in (*PRESETS, "robust") if "stochastic" not in name]  # no seed would reach it
    parser.add_argument("--numerics", default=RECOMMENDED, choices=presets, metavar="PRESET")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    if min(options.steps, options.batch) < 1 or not 0 < options.learning_rate < 1:
        given = f"--steps {options.steps} --batch {options.batch} --learning-rate {options.learning_rate}"
        parser.error(f"{given}: expected 1 or more, 1 or more, and a number between 0 and 1")

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {options.text}: expected a UTF-8 file ({error})")
    try:
        scaled_dot_product_attention(*torch.zeros(3, 1, 1, 8, 64, device=device).bfloat16(), numerics=options.numerics)
        model, tokens = load(options.model, text, huggingface.register(options.numerics))
    except (OSError, ValueError) as error:  # numerics that cannot run here, or no such model
        parser.error(f"--model {options.model!r} --numerics {options.numerics}: {' '.join(str(error).split())}")
    if text and not len(tokens):
        parser.error(f"--model {options.model}: its tokenizer makes no tokens; expected its files beside the weights")
    if not 1 < options.length < len(tokens):
        parser.error(f"--length {options.length}: expected 2 or more, and less than the text's {len(tokens)} tokens")
    longest = getattr(model.config, "max_position_embeddings", options.length)
    if options.length > longest:
        parser.error(f"--length {options.length}: expected at most {longest}, the model's max_position_embeddings")
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    for step in range(options.steps):
        starts = torch.randint(len(tokens) - options.length, (options.batch,))
        batch = torch.stack([tokens[start : start + options.length] for start in starts]).to(device)
        try:
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        except ValueError as error:  # what the model asks of attention, and ours refuses
            parser.error(f"--model {options.model!r}: {' '.join(str(error).split())}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
