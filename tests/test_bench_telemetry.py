"""scripts/bench_telemetry.py runs on a CPU, and would notice a probe that changes the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prose import prose

from scripts import bench_telemetry

TINY = ["--tiny", "--repeats", "2", "--pairs", "2", "--warm-up", "1", "--run.device", "cpu"]


@pytest.fixture(autouse=True)
def _switches_as_they_were() -> Any:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.deterministic = before[1]


def test_it_reports_times_and_equal_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_telemetry.main([*TINY, "--json", str(tmp_path / "bench.json"), "--telemetry.every", "25"])
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["bits"]["equal"] is True
    assert result["overhead_at_every"] == pytest.approx(result["probe"]["wall_s"] / (25 * result["step"]["wall_s"]))
    assert result["probe_bits"] == {"steps": 10, "equal": True, "different": []}
    assert len(result["added_to_training"]["each_s"]) == 2
    assert capsys.readouterr().out.count("the same bits") == 2


def test_a_probe_that_changes_a_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = bench_telemetry.Bench.probe

    def clumsy(self: bench_telemetry.Bench) -> dict[str, Any]:
        with torch.no_grad():
            next(self.raw_model.parameters())[0, 0] += 2.0**-10
        return original(self)

    monkeypatch.setattr(bench_telemetry.Bench, "probe", clumsy)
    with pytest.raises(SystemExit) as stopped:
        bench_telemetry.main(TINY)
    assert stopped.value.code == 1


def test_a_probe_that_says_something_else_than_op_by_op_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(bench_telemetry.Probe):
        """Measures the weights as they were at the last call."""

        def __call__(self) -> Any:
            fresh = super().__call__()
            last, self._last = getattr(self, "_last", fresh), fresh
            return last

    original = bench_telemetry.Bench.new_probe

    def new_probe(self: bench_telemetry.Bench, *, graph: bool) -> bench_telemetry.Probe:
        probe = original(self, graph=graph)
        if graph:
            probe.__class__ = Late
        return probe

    monkeypatch.setattr(bench_telemetry.Bench, "new_probe", new_probe)
    with pytest.raises(SystemExit) as stopped:
        bench_telemetry.main([*TINY, "--json", str(tmp_path / "bench.json")])
    assert stopped.value.code == 1
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["bits"]["equal"], result["probe_bits"]["equal"]) == (True, False)


def test_the_document_has_the_published_numbers() -> None:
    root = Path(__file__).resolve().parent.parent
    measured = json.loads((root / "results/telemetry/h200.json").read_text())
    document = (root / "docs/diagnosis.md").read_text()
    ms = {name: 1e3 * part["wall_s"] for name, part in measured.items() if isinstance(part, dict) and "wall_s" in part}
    share = f"{measured['overhead_at_every']:.2%}".replace("%", " %")
    rows = {
        "a training step": f"{ms['step']:.1f} | |",
        "a probe as a run makes it": f"{ms['probe']:.1f} | {share}",
        "the same, operation by operation (`--telemetry.no-cuda-graph`)": f"{ms['eager_probe']:.1f} |",
        "a probe that starts the power iteration afresh (the first, and one after every checkpoint)": f"{ms['first_probe']:.0f} |",
        "the probe that captures the graph (the third of a run)": f"{ms['capturing_probe']:.1f} |",
    }
    for name, numbers in rows.items():
        assert f"| {name} | {numbers}" in document
    added, kept = measured["added_to_training"], f"{measured['graph_bytes'] / 2**30:.1f} GiB"
    median, least, most = (
        f"{1e3 * second:.1f}" for second in (added["median_s"], *sorted(added["each_s"])[:: added["pairs"] - 1])
    )
    said, readme = prose(root / "docs/diagnosis.md"), prose(root / "results/telemetry/README.md")
    assert (
        f"took {median} ms a probe longer than without (median of {added['pairs']} pairs, from {least} to {most})"
        in said
    )
    assert f"{added['pairs']} pairs: a median of {median} ms, from {least} to {most}" in readme
    assert f"The graph keeps its memory, {kept} for one sequence" in said
    assert f"memory that the graph keeps: {kept}" in readme
    assert measured["bits"]["equal"]
    assert measured["probe_bits"]["equal"]
