"""Who takes part in ``bench_train.py``, and the attempts at building and running each: what fails or never ends takes no result along."""

from __future__ import annotations

import faulthandler
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from files import without_folders, write_json
from training.run import Run


@dataclass
class Contender:
    """One that takes part: ``run(n)`` trains n steps. ``times`` has seconds a step, one entry a round."""

    name: str
    tokens_per_step: int
    run: Callable[[int], None]
    enter: Callable[[], None]
    settings: dict[str, Any]
    built: Run | None = None
    build_seconds: float = math.nan
    own_bytes: int = 0
    peak_bytes: int = 0
    times: list[float] = field(default_factory=list)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


@dataclass
class Trial:
    """The attempts so far: who takes part, why others do not, and what guards against one that never ends."""

    seconds: float
    json: Path | None
    contenders: list[Contender] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def attempt(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns. One that raises is reported, and the others go on; one that does not end ends the process."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)
        try:
            return function(*args)
        except Exception as error:
            self.failed[name] = first_line(error)
            print(f"{name} failed: {self.failed[name]}", file=sys.stderr)
            return None
        finally:
            faulthandler.cancel_dump_traceback_later()

    def build(self, name: str, function: Callable[..., Contender], *args: Any) -> None:
        """Build one that takes part, what is known of the others being on disk first."""
        self.note()
        print(f"{name}: building", file=sys.stderr, flush=True)
        began = time.perf_counter()
        made = self.attempt(name, function, *args)
        if made is not None:
            made.build_seconds = time.perf_counter() - began
            self.contenders.append(made)
            print(f"{name}: ready after {made.build_seconds:.1f} s", file=sys.stderr, flush=True)
        gc.collect()

    def sound(self) -> list[Contender]:
        return [contender for contender in self.contenders if contender.name not in self.failed]

    def note(self) -> None:
        """Write what is known by now, without what is measured at the end only."""
        rows: list[dict[str, Any]] = [
            {
                "name": c.name,
                "settings": c.settings,
                "build_seconds": c.build_seconds,
                "ms_all_rounds": [1000 * t for t in c.times],
            }
            for c in self.sound()
        ]
        write_results(self.json, rows + self.failures(), complete=False)

    def failures(self) -> list[dict[str, Any]]:
        return [{"name": name, "failed": why} for name, why in self.failed.items()]


def write_results(path: Path | None, rows: list[dict[str, Any]], **facts: Any) -> None:
    """The JSON, if it is asked for."""
    if path is None:
        return
    machine = {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    machine |= {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    write_json(
        path, {"command": [without_folders(word) for word in sys.argv], "machine": machine, **facts, "rows": rows}
    )
