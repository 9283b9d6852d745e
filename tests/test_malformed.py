"""Malformed inputs, made by a seeded generator: each is one line on stderr and exit code 2; nothing hangs, is written or is lost.

Each is read by a fork of this process, which has imported everything and trained once. ``-m slow`` reads 1,000 of them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import Place, new_place, tree

import train
from attention import AttentionSpec
from config import TrainConfig
from model import GPT, initialize
from probes import hf_causal
from training.huggingface import export_gpt2

SECONDS, MEMORY, LONGEST_LINE = 20, 8 * 2**30, 2000
NEW_RUN = ["--run.name", "new"]
RECIPES = ("config file", "ablation file")


@dataclass(frozen=True)
class World:
    """What is right, for the generator to spoil: a run with its recording, a GPT-2 folder, recipes."""

    place: Place
    recipe: Path
    init_recipe: Path
    names: tuple[str, ...] = ("run", "recording", "data", "hf")

    def copy(self, name: str, to: Path) -> Path:
        source = {"run": self.place.runs / "run", "recording": Path(self.place.recording("run"))}
        return Path(shutil.copytree(source.get(name, self.place.folder / name), to / name))


@dataclass(frozen=True)
class Input:
    """What is wrong, and the command line that reads it."""

    what: str
    script: str
    arguments: Sequence[object]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with new_place(tmp_path_factory) as place:
        place.train("run", {"data.record": place.recording("run")})
        config = place.config("init", {"model.bias": True})
        model = GPT(config.model, config.attention.resolve(config.model.n_layer, config.model.n_head))
        initialize(model, 0)
        export_gpt2(model, place.folder / "hf")
        # Imports are for once, before the forks.
        for script in ("autopsy", "figures", "compare_runs", "export_huggingface", "branch_run"):
            importlib.import_module(f"scripts.{script}")
        importlib.import_module("figures.courses")
        hf_causal.load(place.folder / "hf", AttentionSpec(), torch.float32, torch.device("cpu"))
        yield World(place, place.preset_file(place.config("recipe")), place.preset_file(config))


# ---- how content is spoilt


def deep(choice: random.Random) -> bytes:
    depth = choice.choice((1_000, 100_000))
    return b"[" * depth + b"]" * depth if choice.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth


def not_a_file(path: Path, choice: random.Random) -> str:
    """Something else stands where a file should."""
    kind = choice.choice(("missing", "fifo", "folder", "loop", "dangling link"))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.symlink_to(path if kind == "loop" else path.with_name("nowhere"))
    return f"{path.name}: {kind}"


def broken_bytes(path: Path, choice: random.Random) -> str:
    """No JSON, no safetensors, no text."""
    content = path.read_bytes()
    kinds = {
        "empty": b"",
        "cut short": content[: choice.randrange(1, len(content) - 1)],
        "noise": choice.randbytes(choice.randrange(1, 4096)),
        "zeros": bytes(len(content)),
        "not UTF-8": b"\xff\xfe" + content,
        "deep": deep(choice),
        "digits": b"9" * 10_000,
        "a line": b"hello\n",
    }
    kind = choice.choice(list(kinds))
    path.write_bytes(kinds[kind])
    return f"{path.name}: {kind}"


WRONG: tuple[Any, ...] = (
    None,
    [],
    {},
    "",
    "text",
    "x" * 100_000,
    -1,
    2**31,
    2**63,
    10**30,
    -(2**70),
    float("nan"),
    float("inf"),
    1.5,
    [[1], "a"],
    {"a": 1},
    True,
)


def of_another_type(value: Any, choice: random.Random) -> Any:
    def kind(one: Any) -> type:
        return type(one)

    return choice.choice([wrong for wrong in WRONG if kind(wrong) is not kind(value)])


def wrong_json(path: Path, names: Sequence[str], choice: random.Random) -> str:
    """A field (dotted) is missing, or of another type, or the document is no object."""
    content = json.loads(path.read_bytes())
    *above, name = choice.choice(names).split(".")
    inner = content
    for part in above:
        inner = inner[part]
    before = inner.pop(name)
    kind = choice.random()
    if kind < 0.8:
        inner[name] = of_another_type(before, choice)
    elif kind > 0.9:
        content = choice.choice((None, [], [content], 3, "text"))
    path.write_text(json.dumps(content))
    return f"{path.name}: {name} = {inner.get(name, 'missing')!r:.40}" if kind <= 0.9 else f"{path.name}: no object"


def spoil(path: Path, names: Sequence[str], choice: random.Random) -> str:
    kind = choice.random()
    if kind < 0.2:
        return not_a_file(path, choice)
    return broken_bytes(path, choice) if kind < 0.5 or not names else wrong_json(path, names, choice)


def wrong_tensors(path: Path, choice: random.Random) -> str:
    """A weight is missing, of another shape or dtype, not finite, or too many."""
    tensors = load_file(path)
    name = choice.choice(sorted(tensors))
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "nan": lambda t: t.index_fill(0, torch.tensor([0]), float("nan")),
        "inf": lambda t: t.index_fill(0, torch.tensor([0]), float("-inf")),
        "flat": lambda t: t.flatten()[:-1].clone(),
        "scalar": lambda t: t.flatten()[0].clone(),
        "empty": lambda t: t[:0].clone(),
        "integers": lambda t: t.long(),
        "complex": lambda t: t.to(torch.complex64),
        "extra": lambda t: t,
    }
    kind = choice.choice(["missing", *changes])
    tensor = tensors.pop(name)
    if kind != "missing":
        tensors[f"{name}x" if kind == "extra" else name] = changes[kind](tensor)
    save_file(tensors, path, metadata={"format": "pt"})
    return f"{path.name}: {name} {kind}"


def sign(checkpoint: Path) -> None:
    names = [line.split("  ")[1] for line in (checkpoint / "SHA256SUMS").read_text().splitlines()]
    sums = [f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (checkpoint / "SHA256SUMS").write_text("".join(sums))


# ---- the inputs, by kind


def recording(world: World, choice: random.Random, folder: Path) -> Input:
    there = world.copy("recording", folder)
    path = there / choice.choice(["header.json", "offsets.npy"])
    if path.suffix == ".json":
        what = spoil(path, list(json.loads(path.read_bytes())), choice)
    elif choice.random() < 0.5:
        what = spoil(path, [], choice)
    else:
        content = bytearray(path.read_bytes())
        content[place := choice.randrange(len(content))] ^= 1 << choice.randrange(8)
        path.write_bytes(content)
        what = f"{path.name}: a bit of byte {place}"
    return Input(what, "train", [world.recipe, *NEW_RUN, "--data.replay", there])


def checkpoint(world: World, choice: random.Random, folder: Path) -> Input:
    """All of a run's: one damaged one is passed over. Signed or not."""
    run = world.copy("run", folder)
    signed = choice.random() < 0.7
    seed, what = choice.random(), ""
    for one in (run / "checkpoints").iterdir():
        again = random.Random(seed)
        path = one / again.choice(["state.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"])
        if path.name == "state.json":
            names = ["format_version", "step", "position", "processes", "tied", "optimizer", "scaler", "config"]
            names += ["extra", "optimizer.param_groups", "optimizer.values", "config.model", "config.data.seed"]
            names += ["config.model.n_layer", "config.model.n_embd", "config.model.vocab_size", "config.attention"]
            what = spoil(path, names, again)
        elif path.name == "model.safetensors" and again.random() < 0.6:
            what = wrong_tensors(path, again)
        else:
            what = spoil(path, [], again)
        if not path.is_file():
            signed = False
        if signed:
            sign(one)
    what += " (signed)" if signed else ""
    resume = [world.recipe, "--run.folder", folder, "--run.name", "run", "--run.resume", choice.choice(("yes", "auto"))]
    resume += ["--data.record", world.place.recording("run"), "--run.steps", "40"]
    readers: dict[str, list[object]] = {
        "train": resume,
        "autopsy": [run, "--batches", 1, "--sequences", 1, "--length", 8],
        "figures": ["3", "--checkpoint", run, "--out", folder / "out"],
        "export_huggingface": [run, folder / "out"],
        "branch_run": [run, folder / "branch"],
    }
    able = list(readers)
    if (
        signed
    ):  # What the others do not read of a checkpoint may be wrong in it, and a run that diverged may be gone on with.
        able = ["train"] if not what.startswith("model") else ["autopsy", "figures"]
    script = choice.choice(able)
    return Input(what, script, readers[script])


def data_set(world: World, choice: random.Random, folder: Path) -> Input:
    data = world.copy("data", folder)
    split = choice.choice(("train", "val"))
    if choice.random() < 0.2:
        tokens = np.fromfile(data / f"{split}.bin", np.uint8).astype("<u2")
        tokens[choice.randrange(len(tokens))] = choice.choice((256, 300, 65_535))
        tokens.tofile(data / f"{split}.bin")
        header = json.loads((data / f"{split}.json").read_bytes())
        header |= {"dtype": "uint16", "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}
        (data / f"{split}.json").write_text(json.dumps(header))
        what = f"{split}.bin: a token beyond the vocabulary (signed)"
    elif choice.random() < 0.3:
        what = spoil(data / f"{split}.bin", [], choice)
    else:
        path = data / f"{split}.json"
        what = spoil(path, list(json.loads(path.read_bytes())), choice)
    if split == "val" and choice.random() < 0.3:
        run = world.place.runs / "run"
        return Input(what, "autopsy", [run, "--data", data, "--batches", 1, "--sequences", 1, "--length", 8])
    return Input(what, "train", [world.recipe, *NEW_RUN, "--data.dataset", data])


def hugging_face(world: World, choice: random.Random, folder: Path) -> Input:
    hf = world.copy("hf", folder)
    reader = choice.choice(("train", "autopsy"))
    names = ["model_type", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size"]
    kind = choice.random()
    if kind < 0.5:
        what = spoil(hf / "config.json", names, choice)
    elif kind < 0.6:
        content = json.loads((hf / "config.json").read_bytes())
        name = choice.choice(names[1:6])
        content[name] = choice.choice((0, -1, 2**31, 2**63, 10**30))
        (hf / "config.json").write_text(json.dumps(content))
        what = f"config.json: {name} = {content[name]}"
    elif kind < 0.85:
        what = wrong_tensors(hf / "model.safetensors", choice)
        if what.endswith(("integers", "complex")):  # transformers reads these as floats
            reader = "train"
    else:
        what = spoil(hf / "model.safetensors", [], choice)
    if reader == "train":
        return Input(what, "train", [world.init_recipe, *NEW_RUN, "--run.init-from", hf])
    data = ["--data", world.place.data, "--batches", 1, "--sequences", 1, "--length", 8]
    return Input(what, "autopsy", ["--hf", hf, *data])


def recipe(world: World, choice: random.Random, folder: Path) -> Input:
    path = folder / "recipe.py"
    ablation = choice.random() < 0.5
    name = "attention" if ablation else "config"
    contents = {
        "raises": f"raise {choice.choice(('OSError', 'KeyError', 'RecursionError', 'MemoryError', 'StopIteration'))}('a\\nb')",
        "exits": f"import sys\nsys.exit({choice.choice(('', '0', '1', repr('no')))})",
        "quits": "raise SystemExit(3)",
        "base exception": "class Odd(BaseException): pass\nraise Odd('x')",
        "recurses": "def f(): f()\nf()",
        "syntax": "config = (",
        "deep": "config = " + "(" * 500 + ")" * 500,
        "null bytes": "config = 1\0",
        "other type": f"{name} = {choice.choice(('None', '{}', '3', 'object()', 'type'))}",
        "empty": "",
        "imports": "import no_such_module",
        "long": "raise ValueError('x' * 100_000)",
        "field": "from config import TrainConfig, RunConfig\nconfig = attention = TrainConfig(run=RunConfig(steps='9'))",
        "section": "from config import TrainConfig\nconfig = attention = TrainConfig(run=3, model=None)",
    }
    what = choice.choice([*contents, "not UTF-8", "file"])
    path.write_text(contents.get(what, "x = 1"))
    if what == "not UTF-8":
        path.write_bytes(b"\xff\xfe" * 100)
    elif what == "file":
        what = not_a_file(path, choice)
    script = choice.choice(("train", "train", "make_recording"))
    arguments: list[object] = [world.recipe, path] if ablation else [path]
    if script == "make_recording":
        return Input(what, script, [path, "--steps", 3, "--out", folder / "out"])
    return Input(f"{name}: {what}", script, [*arguments, *NEW_RUN])


ABSURD = {
    "train": "model.n-layer model.n-head model.n-embd model.block-size model.vocab-size model.vocab-multiple data.sequence-length "
    "data.global-batch data.validation-sequences data.micro-batch run.steps telemetry.sequences checkpoint.every evaluation.every",
    "autopsy": "batches sequences length accused",
    "figures": "sequences layer head",
}


def sizes(world: World, choice: random.Random, folder: Path) -> Input:
    """Numbers that no machine has room for."""
    script = choice.choice(list(ABSURD))
    name = choice.choice(ABSURD[script].split())
    value = choice.choice((10**9 + 8, 2**31, 2**40, 2**63, 10**30, 10**5000))
    if name.endswith(("steps", "every")):  # what is only never reached is fine
        value = max(value, 2**63)
    text = "9" * 5000 if value > 10**100 else str(value)
    run = world.place.runs / "run"
    if script == "train":
        arguments: list[object] = [world.recipe, *NEW_RUN, f"--{name}", text]
        if name == "data.sequence-length":
            arguments += ["--model.block-size", text]
        elif name == "data.micro-batch":
            arguments += ["--data.global-batch", text]
        elif name == "model.n-head":
            arguments += ["--model.n-embd", text]
        return Input(f"{name} = {text[:30]}", script, arguments)
    if script == "figures":
        arguments = ["5", "--checkpoint", run, "--out", folder / "out", f"--{name}", text]
    else:
        arguments = [run, f"--{name}", text]
        if name in ("length", "accused"):  # more than there is of these is all of them
            arguments[-1] = choice.choice(("0", "-1", "1e9", "9" * 5000) if name == "length" else ("-1", "x", "1.5"))
    return Input(f"{script} {' '.join(map(str, arguments[-2:]))[:60]}", script, arguments)


def fields(config: Any = TrainConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(config).items():
        if dataclasses.is_dataclass(hint):
            yield from fields(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def values(world: World, choice: random.Random, folder: Path) -> Input:
    """A value of another type, for any field of the config."""
    typed = [(name, hint) for name, hint in fields() if hint is not str and get_origin(hint) is not tuple]
    name, hint = choice.choice(typed)
    long = "x" * 100_000
    wrong: dict[Any, tuple[str, ...]] = {
        int: ("", "x", "1.5", "1e3", "nan", "0x10", long, "１２a", "1 2", "None"),
        float: ("", "x", "nan", "1,5", "--", long, "1e", "None", "1 2"),
        bool: ("maybe", "2", "nan", long),
    }
    value = choice.choice(wrong.get(hint, ("", "none of them", long, "\U0001f600", "fp8\n")))
    assert hint in wrong or get_args(hint), name
    return Input(f"--{name} {value[:20]!r}", "train", [world.recipe, *NEW_RUN, f"--{name}", value])


def run_folder(world: World, choice: random.Random, folder: Path) -> Input:
    run = world.copy("run", folder)
    file = choice.choice(("metrics.jsonl", "telemetry.jsonl", "config.json"))
    path, kind = run / file, choice.random()
    out = folder / "out"
    if file == "config.json":
        names = ["config", "config.run", "config.run.steps", "config.run.seed", "attention_name"]
        what = spoil(path, names, choice)
    elif kind < 0.15:
        path.unlink()
        os.mkfifo(path) if choice.random() < 0.5 else path.mkdir()
        what = f"{file}: no file"
    elif kind < 0.35:
        content = choice.choice(
            (b"", b"\n\n", deep(choice) + b"\n", choice.randbytes(99) + b"\n", b"\xff\xfe\n", b"3\n")
        )
        path.write_bytes(content)
        what = f"{file}: {content[:10]!r}"
    else:
        lines = path.read_text().splitlines()
        at = choice.randrange(len(lines) - 1)
        record = json.loads(lines[at])
        numbers = ["step", "train_loss"] if file.startswith("m") else ["step", "w_q_norm", "max_logit", "ties_1e3"]
        name = choice.choice([name for name in numbers if name in record])
        record[name] = choice.choice([w for w in (*WRONG, "NaN", "1,5") if not isinstance(w, int | float | type(None))])
        if name == "step":
            record[name] = choice.choice((None, "3", 1.5, [], True, 2**63, -1))
        lines[at] = json.dumps(record)
        path.write_text("\n".join(lines) + "\n")
        what = f"{file}: line {at + 1}: {name} = {record[name]!r:.30}"
    compare = Input(what, "compare_runs", [world.place.runs / "run", folder, "--out", folder / "compare.png"])
    draw = Input(what, "figures", [choice.choice(("11", "13")), "--runs", run, "--out", out])
    return choice.choice((compare, draw) if file != "config.json" else (compare,))


KINDS = (recording, checkpoint, data_set, hugging_face, recipe, sizes, values, run_folder)


# ---- reading one


def read(script: str, arguments: Sequence[object], to: Path) -> int | None:
    """Run the script's ``main`` in a fork; its exit code (None: it was stopped for time), stderr in ``to``."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code: Any = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            for handler in logging.getLogger("transformers").handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(sys.stderr)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            main = train.main if script == "train" else importlib.import_module(f"scripts.{script}").main
            sys.argv = [f"{script}.py", *map(str, arguments)]
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else None


def complaint(world: World, kind: Callable[..., Input], seed: int, folder: Path) -> str | None:
    """What is wrong with how an input was refused; None where nothing is."""
    folder.mkdir()
    given = kind(world, random.Random(f"{kind.__name__} {seed}"), folder)
    before = tree(folder), tree(world.place.folder)
    told = folder.with_suffix(".stderr")
    code = read(given.script, given.arguments, told)
    said = told.read_text(errors="replace")
    wrong = []
    if code != 2:
        wrong.append(f"exit code {code}")
    if not (said.startswith("error: ") and said.count("\n") == 1 and said.endswith("\n") and len(said) <= LONGEST_LINE):
        wrong.append(f"{len(said)} characters on stderr: ...{said[-300:]}")
    if (tree(folder), tree(world.place.folder)) != before:
        wrong.append("files were changed")
    shutil.rmtree(folder)
    return f"{kind.__name__} {seed}: {given.script}: {given.what}: {'; '.join(wrong)}" if wrong else None


def refuse_all(world: World, each: int, folder: Path, first: int = 0) -> None:
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for seed in range(first, first + each):
        for kind in KINDS:
            counts[kind.__name__] += 1
            if (found := complaint(world, kind, seed, folder / f"{kind.__name__}_{seed}")) is not None:
                wrong.append(found)
    print(f"{counts.total()} malformed inputs, {len(wrong)} not refused as they should be: {dict(counts)}")
    assert not wrong, "\n".join(wrong)


def test_a_few_dozen_malformed_inputs_are_refused_in_one_line(world: World, tmp_path: Path) -> None:
    refuse_all(world, 5, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_malformed_inputs_are_refused_in_one_line(world: World, tmp_path: Path) -> None:
    refuse_all(world, 125, tmp_path, first=1000)
