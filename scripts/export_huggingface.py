"""Turn a checkpoint into a GPT-2 folder that Hugging Face's transformers opens.

python scripts/export_huggingface.py runs/NAME/checkpoints/step_00001000 exported/NAME
python scripts/export_huggingface.py runs/NAME exported/NAME                             # its newest checkpoint
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _root  # noqa: F401

from errors import OneLineParser, check_place, exit_on_user_error, trainer_packages

with trainer_packages():
    import config as configuration
    from attention import AttentionConfig, AttentionSpec
    from model import GPT, ModelConfig
    from training.gpt2_weights import export_gpt2
    from training.weights import load_weights, read_checkpoint


def load_model(folder: Path) -> GPT:
    """The model of a checkpoint, or of a run's newest, on the CPU. Attention does not matter here, since only weights are exported.

    Raises ``UserError`` for what is no checkpoint, is damaged, or has a config that this version does not know.
    """
    checkpoint = read_checkpoint(folder)
    config = configuration.from_json(ModelConfig, checkpoint.config_json.get("model"), "model")
    plans = AttentionConfig(default=AttentionSpec(preset="standard")).resolve(config.n_layer, config.n_head)
    model = GPT(config, plans)
    load_weights(model, checkpoint)
    return model


@exit_on_user_error
def main() -> None:
    """Command line: CHECKPOINT OUTPUT."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint, or folder of a run (its newest one)")
    parser.add_argument("output", type=Path, help="folder to write; must not exist or be empty")
    chosen = parser.parse_args()
    check_place(chosen.output / "config.json", "output")
    export_gpt2(load_model(chosen.checkpoint), chosen.output)
    print(f"wrote {chosen.output}: GPT2LMHeadModel.from_pretrained opens it")


if __name__ == "__main__":
    main()
