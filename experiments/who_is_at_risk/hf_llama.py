"""A Hugging Face Llama on the trainer's batches: does what holds of our ``llama`` hold of a model that is not ours?

    PYTHONPATH=. python experiments/who_is_at_risk/hf_llama.py configs/fast_failure.py --data.replay replay_batches/ansible \\
        --run.seed 22 --run.steps 6000 --optim.lr 1e-3 --attention.default.preset flash_consistent --run.name hf_consistent_22

``LlamaForCausalLM`` of the recipe's size with the initial weights of our ``llama``. Batches, optimizer, schedule and validation are the
trainer's. Attention is the preset, by ``attention.huggingface``, or transformers' own: ``--transformers eager`` (the control) or ``sdpa``
(torch's FlashAttention-2). Writes a run's config.json, metrics.jsonl, and telemetry.jsonl of ``watch`` (first training sequence).
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

import config as configuration
import files
from attention import huggingface, watch
from data.batches import Batches
from errors import OneLineParser, exit_on_user_error, invalid
from model import GPT, initialize
from training import distributed, metrics, optim, record, telemetry
from training.evaluate import evaluate

RUN = ("run.name", "run.steps", "run.seed", "data.dataset", "data.replay", "data.micro-batch", "optim.lr")
READ = (*RUN, "attention.default.preset", "precision.compile", "precision.no-compile")
NAMES = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "transformer.h": "model.layers"}
NAMES |= {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj"}
NAMES |= {"mlp.c_gate": "mlp.gate_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}


class Llama(nn.Module):
    """With the weights of ours, and called as it is."""

    def __init__(self, ours: GPT):
        super().__init__()
        shape, tensors = ours.config, dict[str, Tensor]()
        for name, tensor in ours.state_dict().items():
            for old, new in NAMES.items():
                name = name.replace(old, new)
            heights = [shape.head_width * heads for heads in (shape.n_head, shape.kv_heads, shape.kv_heads)]
            parts = zip("qkv", tensor.split(heights), strict=True) if "c_attn" in name else [("", tensor)]
            tensors |= {name.replace("attn.c_attn", f"self_attn.{x}_proj"): part for x, part in parts}
        size: dict[str, Any] = {"num_hidden_layers": shape.n_layer, "max_position_embeddings": shape.block_size}
        size |= {"num_attention_heads": shape.n_head, "num_key_value_heads": shape.kv_heads}
        size |= {"hidden_size": shape.n_embd, "intermediate_size": len(tensors["model.layers.0.mlp.up_proj.weight"])}
        size |= {"vocab_size": shape.padded_vocab_size, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
        self.llama = LlamaForCausalLM(LlamaConfig(**size))
        self.llama.load_state_dict(tensors)  # all of them, or an error

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, _seed: Tensor | None = None) -> tuple[None, Tensor]:
        logits_BTV = self.llama(input_ids=tokens_BT, use_cache=False).logits
        return None, nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


@exit_on_user_error
def main() -> None:
    parser = OneLineParser(allow_abbrev=False)
    parser.add_argument("--transformers", choices=("eager", "sdpa"), default="")
    own, typed = parser.parse_known_args()
    if unread := [one for one in typed if one.startswith("--") and one[2:].partition("=")[0] not in READ]:
        raise invalid("option", unread[0], ("--transformers", *(f"--{name}" for name in READ)))
    config = configuration.load(typed)
    if config.attention.rules or config.model.attention_softcap or config.model.qk_clip_tau:
        raise invalid("recipe", typed[0], "one without attention rules, soft-cap and QK-clip, which this model has not")
    llama: dict[str, Any] = {"position": "rotary", "norm": "rms", "activation": "swiglu"}
    shape = dataclasses.replace(config.model, **llama, n_kv_head=config.model.n_head // 4)
    config, attention = dataclasses.replace(config, model=shape), config.attention.default
    distributed.set_deterministic(True)
    distributed.set_tf32(False)
    device = distributed.start(config.run.device).device
    batches, folder = Batches(config.data), Path(config.run.folder, config.run.name)
    ours = GPT(shape, config.attention.resolve(shape.n_layer, shape.n_head))
    initialize(ours, config.run.seed)
    raw = Llama(ours).to(device)
    optimizer, autocast = optim.build_optimizer(raw, config.optim, device), config.precision.autocast
    model: Any = torch.compile(raw) if config.precision.compile else raw
    _lock = record.make_folder(folder)  # held to the end
    content = {"config": configuration.to_json(config), **record.environment(device, 1), "batches": batches.identity}
    content["versions"]["transformers"] = record.version("transformers")
    content["attention_name"] = f"transformers, {own.transformers or attention.label()}"
    if own.transformers:
        del content["config"]["attention"]
    files.write_json(folder / "config.json", content)

    AttentionInterface.register("plain", eager_attention_forward)  # ``watch`` sees no "eager"
    AttentionMaskInterface.register("plain", eager_mask)
    name = {"eager": "plain", "sdpa": "sdpa", "": huggingface.register(attention)}[own.transformers]
    raw.llama.set_attn_implementation(name)
    rows, looks = (metrics.JsonLines(folder / log) for log in (metrics.METRICS_FILE, telemetry.TELEMETRY_FILE))
    every, last = config.telemetry.every, config.run.steps
    watched = watch(model, every=every, optimizer=optimizer, warm_up=config.optim.warmup_steps)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), watched:
        for step in range(last + 1):
            row: dict[str, Any] = {"step": step}
            if step % every == 0 or step == last:
                row["val_loss"] = evaluate(model, batches, device, autocast(device))
            if step == last:
                rows.append(row)
                break
            optim.set_learning_rate(optimizer, optim.learning_rate(step, config.optim))
            optimizer.zero_grad(set_to_none=True)
            micro_batches, total = batches.next(), torch.zeros((), device=device)
            for inputs_BT, targets_BT in micro_batches:
                with autocast(device):
                    loss = model(inputs_BT.to(device), targets_BT.to(device))[1] / len(micro_batches)
                loss.backward()
                total += loss.detach()
            norm = optim.clip_gradients(raw, config.optim.grad_clip)
            row |= {"train_loss": total.item(), "grad_norm": norm.item(), "data_digest": batches.digest()}
            rows.append(row)
            if step % every == 0:
                w_q = [layer.self_attn.q_proj.weight for layer in raw.llama.model.layers]
                norms = [torch.linalg.matrix_norm(weight.detach(), 2).item() for weight in w_q]
                looks.append({**watched.record, "w_q_norm": norms})
                print(row, max(map(max, watched.record["max_logit"])), flush=True)
            if not (math.isfinite(row["train_loss"]) and math.isfinite(row["grad_norm"])):
                raise SystemExit(1)
            optimizer.step()


if __name__ == "__main__":
    main()
