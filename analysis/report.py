"""The facts of a run that the documents state, the rows of its logs that carry them, and counts over its error of delta.

Records are dictionaries with ``step`` and any of the other columns of ``training.metrics`` (a row a step) or, for ``HeadRow``, of
``training.telemetry`` (a row a probe and head of one layer). Layers and heads count from 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis import curves
from analysis.curves import Record
from analysis.recipe import Changes, changes
from errors import invalid

MARGIN, PATIENCE = 0.5, 200
"""What an explosion is: ``curves.explosion_step``."""
DEPARTURE, DEPARTURE_FROM = 20.0, 200
"""A run departs at the first step, from the latter on, whose gradient norm exceeds the former."""
LAYER = 1
"""The layer whose W_Q and logits are told: the paper's layer 2."""
SPAN = 50
"""Steps that the loss at the end is a mean of."""
UNREST = 2.0
"""A run that was cut is leaving, not quiet, when the median of its last ``SPAN`` gradient norms is so many times that of the steps
from 1,000 to 500 before its end."""
NEAR = 60
"""Steps on either side of an event that are all kept."""
SPACING = 10
"""Every so many steps of a thinned log count in medians over a stretch: near events it has all of them, which would weigh more."""

OLD_SUFFIX = "_lr2e-3"
"""What the first runs of configs/fast_failure.py have behind their names: the recipe's own learning rate."""

SAME = (
    *("config.model.block_size", "config.model.vocab_size", "batches.data_sha256", "batches.data_tokens"),
    *("batches.validation_sha256", "batches.validation_sequences", "batches.sequence_length"),
    *("batches.seed", "batches.vocabulary"),
)
"""What all runs of one folder of evidence have in common: the data, and a model that takes them. Its size belongs to the recipe."""
BATCH = "batches.global_batch"
"""Belongs to the recipe, too; runs of one size saw the same batches."""
RECORDING = ("batches.recording", "batches.recording_start")
"""In common to those of one size that recorded or replayed."""

HeadRow = Mapping[str, float]


def canonical(name: str) -> str:
    """The name of a run as configs/reproduction.txt has it."""
    return name.removesuffix(OLD_SUFFIX)


def by_step(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a step, steps increasing; where a run went back, what it had logged from there on is replaced."""
    rows: list[dict[str, Any]] = []
    for record in records:
        while rows and rows[-1]["step"] > record["step"]:
            rows.pop()
        if rows and rows[-1]["step"] == record["step"]:
            rows[-1] |= record
        else:
            rows.append(dict(record))
    return rows


def grad_norms(records: Sequence[Record], first: int = 0, last: float = math.inf) -> list[float]:
    """Gradient norms of every ``SPACING``-th step from ``first`` on, less ``last``."""
    pairs = zip(*curves.column(records, "grad_norm"), strict=True)
    return [norm for step, norm in pairs if first <= step < last and step % SPACING == 0]


def _losses(records: Sequence[Record]) -> tuple[list[int], list[float]]:
    return curves.column(records, "train_loss")


def departure_step(records: Sequence[Record]) -> int | None:
    """First step from ``DEPARTURE_FROM`` on with a gradient norm above ``DEPARTURE``, or one that is not finite."""
    for step, norm in zip(*curves.column(records, "grad_norm"), strict=True):
        if step >= DEPARTURE_FROM and not norm <= DEPARTURE:
            return step
    return None


def excursion_rows(steps: Sequence[int], losses: Sequence[float]) -> set[int]:
    """The steps that decide what ``curves.explosion_step`` and ``open_excursion`` say of the losses.

    Of every excursion above the margin the best loss before it and the first step behind it, which ends it whatever else is kept; of the
    one that is long enough, or that the end cuts short, its first step and the one that makes it so. Without the other steps both say the
    same: the best is the same wherever it is compared with.
    """
    keep: set[int] = set()
    best_step, lowest, start, before = -1, math.inf, -1, -1
    for step, loss in zip(steps, losses, strict=True):
        if math.isfinite(loss) and loss <= lowest + MARGIN:
            if start >= 0:
                keep.add(step)
            start = -1
            if loss < lowest:
                best_step, lowest = step, loss
        else:
            if start < 0:
                start = step
                keep |= {best_step} - {-1}
            if step - start + 1 >= PATIENCE or not math.isfinite(loss):
                # An explosion: nothing behind it changes the verdict.
                return keep | {start, step}
        before = step
    return keep | ({best_step, before, start} - {-1})


def kept_steps(records: Sequence[Record], every: int) -> set[int]:
    """Steps of ``by_step`` records that a thinned log keeps.

    Every ``every``-th step, each with a probe or a validation loss, all steps near the departure and the explosion, the last
    ``SPAN``, both sides of a change of source, and what decides the verdict (``excursion_rows``).
    """
    steps, losses = _losses(records)
    keep = {record["step"] for record in records if record["step"] % every == 0}
    keep |= {record["step"] for record in records if "w_q_norm_max" in record or "val_loss" in record}
    keep |= excursion_rows(steps, losses) | set(steps[-SPAN:])
    for earlier, later in itertools.pairwise(records):
        if earlier.get("source") != later.get("source"):
            keep |= {earlier["step"], later["step"]}
    exploded = curves.explosion_step(losses, MARGIN, PATIENCE, steps=steps)
    for event in (departure_step(records), exploded):
        if event is not None:
            keep |= {step for step in steps if abs(step - event) <= NEAR}
    return keep


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A run as ``results/`` has it: its config.json, thinned records, the heads of ``LAYER`` and z of all heads (``report_files``)."""

    name: str
    config: Mapping[str, Any]
    records: Sequence[Record]
    heads: Sequence[HeadRow] = field(default=())
    z_scores: Sequence[float] = field(default=())
    """Mean over standard error of the delta error, of all layers, heads and probes that have an error."""

    def setting(self, path: str) -> Any:
        """A value of the run's configuration by its dotted name; None where it has none."""
        found: Any = self.config["config"]
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The attentions that the heads of ``LAYER`` had when the run began, a group of heads each."""
        mine = str(LAYER)
        return [group for group in self.config["attention"] if mine in group.get("heads_of_layer", {mine: ()})]

    @property
    def group(self) -> Mapping[str, Any] | None:
        """The attention of ``LAYER``; None where its heads do not share one, or were given another on the way."""
        return self.groups[0] if len(self.groups) == 1 and not self.is_switched else None

    @property
    def is_switched(self) -> bool:
        """Whether the attention of a layer was switched during the run by its options; what an alarm switches is not in them."""
        return bool(self.setting("alarm.switches"))

    @property
    def is_uniform(self) -> bool:
        """Whether all layers and heads have one attention from beginning to end."""
        return len(self.config["attention"]) == 1 and not self.is_switched

    @property
    def attention(self) -> str:
        """Name of the attention, as the run recorded it."""
        return str(self.config["attention_name"])

    @property
    def recipe(self) -> Changes:
        """In what the run differs from the base experiment, attention, seed and data apart."""
        return changes(self.setting)

    @property
    def has_base_recipe(self) -> bool:
        """Whether the run has model, optimiser and batch of the base experiment: what the documents count are such runs."""
        return not self.recipe

    @property
    def variant(self) -> tuple[Any, ...]:
        """What runs on other seeds have in common."""
        return self.attention, self.recipe, str(self.setting("alarm.switches") or [])

    @property
    def seeds(self) -> tuple[int, int]:
        """Of the weights, and of the order of the data."""
        return int(self.setting("run.seed")), int(self.config["batches"]["seed"])


def check_same(run: Evidence, folder: object, others: Sequence[Evidence]) -> None:
    """Raise ``UserError`` where a run to collect differs from those of the evidence in ``SAME``, or from those with as many sequences a
    step in ``RECORDING`` or its batches."""
    alike = [other for other in others if _at(other.config, BATCH) == _at(run.config, BATCH)]
    for known, paths in ((others[:1], SAME), (alike[:1], RECORDING)):
        for one, path in itertools.product(known, paths):
            value, expected = _at(run.config, path), _at(one.config, path)
            if value != expected and (path in SAME or (value and expected)):
                raise invalid(f"{folder}: {path}", value, f"{expected!r}, as in the run {one.name}")
    for other in alike[:1]:
        _check_digests(run, folder, other)


def _check_digests(run: Evidence, folder: object, other: Evidence) -> None:
    """Raise ``UserError`` where the last step that both have a digest of has not one digest."""
    digests, expected_digests = (
        {r["step"]: r["data_digest"] for r in one.records if "data_digest" in r} for one in (run, other)
    )
    if common := digests.keys() & expected_digests.keys():
        step = max(common)
        if digests[step] != expected_digests[step]:
            expected = f"{expected_digests[step]!r}, as in the run {other.name}"
            raise invalid(f"{folder}: data_digest of step {step}", digests[step], expected)


def _at(content: Any, path: str) -> Any:
    for part in path.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is told of a run. Losses in nats a token; the norms and logits are those of ``LAYER``, by step of the probe."""

    last_step: int
    exploded_at: int | None
    above_since: int | None
    departed_at: int | None
    unstable_since: int | None
    """``departed_at``, where the median gradient norm from there on, 500 steps at least, is above ``UNREST`` times the earlier one."""
    is_finished: bool
    unrest: float
    """Median of the last ``SPAN`` gradient norms over that of the steps from 1,000 to 500 before the end; NaN for a short run."""
    loss_at_end: float
    validation: dict[int, float]
    w_q: dict[int, float]
    logit: dict[int, float]
    largest_w_q_in_layer: tuple[int, int]
    """Probes from the end of warm-up + 500 on, and in how many ``LAYER`` had the largest W_Q of all layers."""
    tokens_per_second: float
    minutes: tuple[int, float]
    """The last step with a time, and the wall time to it, compilation and probes included."""
    printed_from: int | None
    """First step that is known from the run's printed lines only, to four digits."""
    is_not_finite: bool = False
    """Whether the loss at ``exploded_at`` is no number, without an excursion above the margin before."""

    @property
    def verdict(self) -> str:
        """How the run ended, in words."""
        if self.is_not_finite:
            return f"not finite at {self.exploded_at:,}"
        if self.exploded_at is not None:
            return f"exploded at {self.exploded_at:,}, logs to {self.last_step:,}"
        end = f"{'finished' if self.is_finished else 'cut'} at {self.last_step:,}"
        if self.unstable_since is not None:
            return f"{end}, unstable since {self.unstable_since:,}: gradient norm above {DEPARTURE:g} again and again, no explosion"
        if self.above_since is not None:
            return f"above the margin since {self.above_since:,}, cut at {self.last_step:,}: too soon to tell"
        if self.unrest > UNREST:
            return f"{end}, leaving: gradient norm {self.unrest:.1f} times that of 500 - 1,000 steps before"
        return f"{end}, quiet"


def facts(run: Evidence) -> Facts:
    """The facts of a run; ``records`` may be thinned by ``kept_steps``."""
    steps, losses = _losses(run.records)
    exploded_at = curves.explosion_step(losses, MARGIN, PATIENCE, steps=steps)
    begin = int(run.setting("optim.warmup_steps")) + 500
    leaders = [_leading_layer(record) for record in run.records if record["step"] >= begin and "w_q_norm_0" in record]
    logit: dict[int, float] = {}
    for row in run.heads:
        step = int(row["step"])
        logit[step] = max(logit.get(step, -math.inf), row["max_logit"])
    printed = [record["step"] for record in run.records if record.get("source") == "printed"]
    timed, seconds = curves.column(run.records, "seconds")
    return Facts(
        last_step=steps[-1],
        exploded_at=exploded_at,
        is_not_finite=exploded_at is not None and not math.isfinite(losses[steps.index(exploded_at)]),
        above_since=curves.open_excursion(losses, MARGIN, PATIENCE, steps=steps),
        departed_at=departure_step(run.records),
        unstable_since=unstable_since(run.records),
        is_finished=steps[-1] + 1 >= int(run.setting("run.steps")),
        unrest=unrest(run.records),
        loss_at_end=curves.final(losses, SPAN),
        validation=dict(zip(*curves.column(run.records, "val_loss"), strict=True)),
        w_q=dict(zip(*curves.column(run.records, f"w_q_norm_{LAYER}"), strict=True)),
        logit=logit,
        largest_w_q_in_layer=(len(leaders), leaders.count(LAYER)),
        tokens_per_second=statistics.median(
            speed
            for step, speed in zip(*curves.column(run.records, "tokens_per_second"), strict=True)
            if step % SPACING == 0
        ),
        minutes=(timed[-1], seconds[-1] / 60),
        printed_from=min(printed, default=None),
    )


def unstable_since(records: Sequence[Record]) -> int | None:
    """``Facts.unstable_since``; earlier: from 1,000 to 500 steps before. One high gradient norm among ordinary ones is no instability."""
    departed = departure_step(records)
    if departed is None:
        return None
    pairs = list(zip(*curves.column(records, "grad_norm"), strict=True))
    # Thinned logs have more steps near the departure than elsewhere.
    since = [norm for step, norm in pairs if step > departed + NEAR]
    before = [norm for step, norm in pairs if 500 <= departed - step <= 1000]
    if not since or not before or pairs[-1][0] - departed < 500:
        return None
    return departed if not statistics.median(since) <= UNREST * statistics.median(before) else None


def unrest(records: Sequence[Record]) -> float:
    """How much larger the gradient norm is at the end than it was: ``Facts.unrest``."""
    steps, norms = curves.column(records, "grad_norm")
    if not steps:
        return math.nan
    before = [norm for step, norm in zip(steps, norms, strict=True) if 500 <= steps[-1] - step <= 1000]
    return statistics.median(norms[-SPAN:]) / statistics.median(before) if before else math.nan


def _leading_layer(record: Record) -> int:
    norms = {int(name.rsplit("_", 1)[1]): value for name, value in record.items() if _is_layer_norm(name)}
    return max(norms, key=norms.__getitem__)


def _is_layer_norm(name: str) -> bool:
    return name.startswith("w_q_norm_") and name.rsplit("_", 1)[1].isdecimal()
