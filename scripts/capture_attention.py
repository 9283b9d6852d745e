"""Write q, k, v and dO of layers of a checkpoint to files that the crash test reads: RUN_step_S_layer_N.zip.

    python scripts/capture_attention.py runs/flash/checkpoints/step_00002000 --layers 1 6 --out captured
    python -m low_precision_attention.check torch:flash --inputs captured/flash_step_2000_layer_1.zip

They are of validation sequences; dO is of the mean loss of each. Layers and heads count from 0. Another model than this trainer's:
low_precision_attention.check.capture.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _root  # noqa: F401

from errors import OneLineParser, UserError, check_size, exit_on_user_error, on_disk, reading, trainer_packages

with trainer_packages():
    import torch

    import files
    from attention.check.captured import Inputs
    from figures.inputs import captured, open_checkpoint
    from training.record import environment

CONFIG = ("model", "attention", "data", "optim", "precision")
"""Sections of the run's config that are kept."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="as runs/NAME/checkpoints/step_00005000, or a run (its newest)")
    parser.add_argument("--layers", type=int, nargs="+", required=True, metavar="N")
    parser.add_argument("--heads", type=int, nargs="+", metavar="N", help="all unless given")
    parser.add_argument("--sequences", type=int, default=1, help="spread over the validation tokens (1)")
    parser.add_argument("--length", type=int, help="first positions that are kept (all)")
    parser.add_argument("--data", type=Path, help="data set (that of the checkpoint's run)")
    parser.add_argument("--out", type=Path, default=Path("captured"), help="folder to write to (captured)")
    options = parser.parse_args(argv)
    check_size("--sequences", options.sequences, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened = open_checkpoint(options.checkpoint, device)
    config, loaded = opened.config, opened.loaded
    if config.model.attention_softcap:
        raise UserError("model.attention_softcap: expected 0, as the crash test has no soft-cap")
    recorded = loaded.config_json
    about: dict[str, Any] = {"step": loaded.step, "seed": recorded["run"]["seed"]}
    about |= {"config": {name: recorded[name] for name in CONFIG}, "captured": environment(device, 1)}
    if loaded.path.parent.name == "checkpoints" and (record := loaded.path.parent.parent / "config.json").exists():
        with reading(record):
            about["trained"] = files.read_json(record)["sessions"]
    if opened.replaced:
        about["computed_by"] = "flash_reference"
    with on_disk(f"--out {options.out}", "be made"):
        options.out.mkdir(parents=True, exist_ok=True)
    paths = {n: options.out / f"{config.run.name}_step_{loaded.step}_layer_{n}.zip" for n in options.layers}
    if there := [str(path) for path in paths.values() if path.exists()]:
        raise UserError(f"--out {options.out}: {there[0]} exists: expected another folder, or remove it")
    layers, about["loss_scale"] = captured(opened, options.sequences, options.data, options.layers)
    for layer in layers:
        q, k, v, do = (x.transpose(1, 2).cpu() for x in (layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.do_BTHD))
        whole = Inputs(q, k, v, do, layer.scale, about={**about, "layer": layer.layer})
        part = whole.part(heads=options.heads, length=options.length)
        part.require_numbers(f"layer {layer.layer}")
        part.save(paths[layer.layer])
        print(paths[layer.layer])


if __name__ == "__main__":
    main()
