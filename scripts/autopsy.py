"""Is this checkpoint dying of biased rounding in attention, and in which layer and head?

    python scripts/autopsy.py runs/NAME/checkpoints/step_00001000 --data data/tokens/stdlib --out autopsies/NAME
    python scripts/autopsy.py --hf FOLDER --data text.txt --attention flash --numerics paper

Prints a summary; with --out it is written as autopsy.txt, together with autopsy.html, one page with the plots inside it. The exit
code is 0 whatever the verdict, 2 for what cannot be examined.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as configuration
import files
from analysis import hf_causal
from analysis.autopsy import Subject, examine
from analysis.autopsy_changes import try_changes
from analysis.autopsy_report import Report, page, text
from analysis.capture import LayerCapture, capture
from attention import AttentionSpec, LayerPlan, registry
from config import TrainConfig
from data.token_files import TokenFile
from errors import OneLineParser, UserError, exit_on_user_error, invalid
from model import GPT
from scripts.checkpoint_inputs import load_weights, read_checkpoint
from training.checkpoint import Loaded
from training.intervention import Switch, plans_at
from training.precision import PrecisionConfig

DTYPES = ("bfloat16", "float16", "float32")
ASSUMED = {"attention": "flash", "numerics": "hardware", "dtype": "bfloat16"}
"""What a Hugging Face folder does not say, unless the command line does. A checkpoint says it."""
FP16_LOSS_SCALE = 2.0**16
"""GradScaler's first: dO of a mean loss underflows in FP16 without one."""
HOST_THREADS = 4
"""Threads beside a GPU. What is left for the host are small arrays: as many threads as a server has cores wait for each other."""


def build(loaded: Loaded, device: torch.device) -> tuple[GPT, TrainConfig, list[str]]:
    """The model with the attention it was last trained with, its config, and the backends that cannot run here."""
    config = configuration.from_json(TrainConfig, loaded.config_json)
    base = config.attention.resolve(config.model.n_layer, config.model.n_head)
    plans = plans_at(base, switches_of(loaded), loaded.step)
    served = [serve(plan, config, device) for plan in plans]
    model = GPT(config.model, tuple(served))
    load_weights(model, loaded)
    for name, value in loaded.model_state.items():
        if not bool(value.isfinite().all()):
            raise UserError(f"checkpoint {loaded.path}: {name} is not finite: examine an earlier checkpoint")
    replaced = {g.backend for plan, now in zip(plans, served, strict=True) if plan != now for g in plan.groups}
    return model.to(device).train(), config, sorted(replaced)


def switches_of(loaded: Loaded) -> list[Switch]:
    """The switches of attention that the run made up to its checkpoint."""
    made = [Switch(**entry) for entry in loaded.extra.get("switches", ())]
    return [switch for switch in made if switch.step <= loaded.step]


def serve(plan: LayerPlan, config: TrainConfig, device: torch.device) -> LayerPlan:
    """The plan; where its backend cannot run here, with ``flash_reference`` at the same numerics. The page says so."""
    model, dtype = config.model, config.precision.torch_dtype
    try:
        registry.check([plan], device=device, dtype=dtype, head_dim=model.head_width, softcap=model.attention_softcap)
    except UserError:
        groups = tuple(dataclasses.replace(group, backend="flash_reference") for group in plan.groups)
        return dataclasses.replace(plan, groups=groups)
    return plan


def spread(tokens_N: Tensor, batches: int, sequences: int, length: int, where: str) -> list[tuple[Tensor, Tensor]]:
    """Sequences spread evenly over the data, dealt out so that every batch has some of everywhere: (tokens, targets)."""
    wanted = batches * sequences
    if len(tokens_N) < wanted * (length + 1):
        raise invalid("--data", where, f"at least {wanted * (length + 1)} tokens for {wanted} sequences of {length}")
    starts = torch.linspace(0, len(tokens_N) - length - 1, wanted, dtype=torch.float64).long()
    rows = tokens_N[starts[:, None] + torch.arange(length + 1)]
    return [(rows[batch::batches, :-1], rows[batch::batches, 1:]) for batch in range(batches)]


def read_tokens(path: Path, vocabulary_size: int, split: str = "val") -> Tensor:
    """Tokens [N] int64 of a data set that this vocabulary covers."""
    if path == Path():  # of a run whose recording carried its tokens
        raise invalid("--data", "", "the folder of a data set: the run's own config names none")
    data = TokenFile.open(path, split)
    if data.header.vocabulary_size > vocabulary_size:
        raise invalid("--data", str(path), f"tokens of at most the model's vocabulary, {vocabulary_size}")
    return torch.from_numpy(data.tokens.astype("int64"))


def checkpoint_subject(arguments: argparse.Namespace, device: torch.device) -> Subject:
    """A checkpoint of this repository on its own validation data."""
    loaded = read_checkpoint(arguments.checkpoint)
    model, config, replaced = build(loaded, device)
    length = min(arguments.length, config.data.sequence_length)
    path = arguments.data or Path(config.data.dataset)
    tokens = read_tokens(path, config.model.vocab_size)
    batches = spread(tokens, arguments.batches, arguments.sequences, length, str(path))
    scale = FP16_LOSS_SCALE if config.precision.dtype == "float16" else 1.0

    def look(batch: int, layers: Sequence[int] | None) -> list[LayerCapture]:
        tokens_BT, targets_BT = (x.to(device) for x in batches[batch])
        context = config.precision.autocast(device)
        return capture(model, tokens_BT, targets_BT, layers, autocast=context, loss_scale=scale)

    facts = {
        "step": str(loaded.step),
        "attention": config.attention.label(),
        "dtype": config.precision.dtype,
        **facts_of(arguments, path, length, device),
    }
    if switched := switches_of(loaded):
        facts["switched"] = ", ".join(switch.option() for switch in switched) + " (step:layer:preset)"
    if replaced:
        facts["computed by"] = f"flash_reference in place of {', '.join(replaced)}, which cannot run here"
    return Subject(
        name=str(loaded.path),
        n_layer=config.model.n_layer,
        n_head=config.model.n_head,
        batches=arguments.batches,
        capture=look,
        w_q=lambda layer: model.w_q(layer).detach(),
        facts=facts,
    )


def folder_subject(arguments: argparse.Namespace, device: torch.device) -> Subject:
    """A Hugging Face folder, with the attention that the command line names."""
    spec = AttentionSpec(preset=arguments.attention, numerics=arguments.numerics)
    dtype = PrecisionConfig(dtype=arguments.dtype).torch_dtype
    model = hf_causal.load(arguments.hf, spec, dtype, device)
    head_dim = model.w_q(0).shape[0] // model.n_head
    registry.check(model.plans, device=device, dtype=dtype, head_dim=head_dim)
    if arguments.data is None:
        raise UserError("--hf needs --data: a text file, or a data set of the model's tokens")
    path = arguments.data
    tokens = hf_causal.tokenise(arguments.hf, path) if path.is_file() else read_tokens(path, model.vocabulary_size)
    length = min(arguments.length, model.positions)
    batches = spread(tokens, arguments.batches, arguments.sequences, length, str(path))
    return Subject(
        name=str(arguments.hf),
        n_layer=model.n_layer,
        n_head=model.n_head,
        batches=arguments.batches,
        capture=lambda batch, layers: model.capture(*batches[batch], layers),
        w_q=model.w_q,
        facts={
            "family": model.model.config.model_type,
            "attention": f"{spec.label()} (assumed: the folder does not say)",
            "dtype": arguments.dtype,
            **facts_of(arguments, path, length, device),
        },
    )


def facts_of(arguments: argparse.Namespace, path: Path, length: int, device: torch.device) -> dict[str, str]:
    wanted = arguments.batches * arguments.sequences
    return {"data": f"{path}, {wanted} sequences of {length} tokens", "device": device.type}


def add_sampling(parser: argparse.ArgumentParser, batches: int) -> None:
    """Options for how much data a checkpoint is examined on, and where; see ``check_sampling`` and ``open_device``."""
    parser.add_argument(
        "--batches", type=int, default=batches, help="forward and backward passes (default %(default)s)"
    )
    parser.add_argument("--sequences", type=int, default=4, help="sequences of a batch (default %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence at most (default %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def check_sampling(chosen: argparse.Namespace) -> None:
    """Raise ``UserError`` for numbers that cannot be, and for a device that is not there."""
    for name, least in (("batches", 1), ("sequences", 1), ("length", 2)):
        if getattr(chosen, name) < least:
            raise invalid(f"--{name}", getattr(chosen, name), f"at least {least}")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise invalid("--device", "cuda", "cpu or auto: torch sees no CUDA device here")


def open_device(choice: str) -> torch.device:
    """The device of ``--device``; beside a GPU the host gets few threads."""
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.set_num_threads(min(HOST_THREADS, torch.get_num_threads()))
    return torch.device("cuda")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="checkpoint, or folder of a run (its newest one)")
    parser.add_argument("--hf", type=Path, help="local Hugging Face folder, in place of a checkpoint")
    parser.add_argument("--data", type=Path, help="data set as prepare_data.py writes it, or with --hf a text file")
    add_sampling(parser, batches=4)
    parser.add_argument("--accused", type=int, default=4, help="heads to try changes on (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for autopsy.html and autopsy.txt")
    parser.add_argument("--attention", help=f"with --hf: the preset assumed (default {ASSUMED['attention']})")
    parser.add_argument("--numerics", help=f"with --hf: its base (default {ASSUMED['numerics']})")
    parser.add_argument("--dtype", choices=DTYPES, help=f"with --hf: autocast (default {ASSUMED['dtype']})")
    chosen = parser.parse_args(arguments)
    if (chosen.checkpoint is None) == (chosen.hf is None):
        raise UserError("name one thing to examine: a checkpoint, or --hf with a folder")
    for name, assumed in ASSUMED.items():
        value = getattr(chosen, name)
        if chosen.hf is None and value is not None:
            raise UserError(f"--{name} {value}: it is for --hf; a checkpoint is examined as it was trained")
        setattr(chosen, name, assumed if value is None else value)
    check_sampling(chosen)
    if chosen.accused < 0:
        raise invalid("--accused", chosen.accused, "at least 0")
    return chosen


def make_folder(folder: Path) -> None:
    """Raises ``UserError`` where there can be no such folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be made ({error.strerror})") from None


@exit_on_user_error
def main() -> None:
    arguments = parse(sys.argv[1:])
    device = open_device(arguments.device)
    subject = (checkpoint_subject if arguments.hf is None else folder_subject)(arguments, device)
    if arguments.out is not None:  # before the work, so that none is lost
        make_folder(arguments.out)
    began = time.perf_counter()
    findings = examine(subject)
    accused = [(head.layer, head.head) for head in findings.biased[: arguments.accused]]
    changes = try_changes(subject, accused)
    report = Report(subject=subject, findings=findings, changes=changes, seconds=time.perf_counter() - began)
    print(text(report, every_head=False), end="")
    if arguments.out is not None:
        from analysis.autopsy_plots import pictures

        files.write_text(arguments.out / "autopsy.txt", text(report))
        files.write_text(arguments.out / "autopsy.html", page(report, pictures(findings, changes)))
        print(f"wrote {arguments.out / 'autopsy.html'} and autopsy.txt")


if __name__ == "__main__":
    main()
