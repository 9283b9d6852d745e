"""Which keys a query sees, beside plain causal or full attention: ``Mask``, and the runs of keys that backends read in its place.

Every mask here, but for holes in ``keys``, shows a query one run of keys, and later queries no earlier run. Two numbers a query say it
all, and two a key which queries see it. ``split`` finds these in a mask of a bool for each query and key.

Legend: B batch, T queries, S keys.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .user_error import UserError, invalid


class Mask(NamedTuple):
    """What of a call's keys is hidden, beside what ``causal`` hides; its fields are names of ``numerics.FEATURES``.

    A query that sees no key has O = 0 and passes no gradient. Never read are keys that ``keys`` of [B] or [B, S] hides from all queries,
    and queries whose run of keys is empty. Other keys that no query sees, and queries that see holes alone, must be finite: 0 is their
    factor.
    """

    bottom_right: bool = False
    """Query t stands at key t + S - T, as in decoding with a cache; else at key t. Counts with ``causal`` and ``window``."""
    window: int = 0
    """W > 0: a query at key t sees keys above t - W (W of them, its own among them, as ``sliding_window`` of Hugging Face), and those
    below t + W."""
    keys: Tensor | None = None
    """Which keys are there: bool [B, S], or, as integers [B], how many come first."""
    cu_seqlens: Tensor | None = None
    """Integers [N + 1], of a batch of one: where sequences packed one after another begin, 0 first, and where the last one ends.
    Queries see their own sequence."""
    ranges: Tensor | None = None
    """Integers [B, 2, T]: first of the keys that each query sees, and the one after the last; neither decreases along the queries."""

    def features(self) -> tuple[str, ...]:
        """The fields that ask for something."""
        return tuple(name for name, value in self._asdict().items() if isinstance(value, Tensor) or value)

    def check(self, B: int, T: int, S: int, device: torch.device) -> None:
        """Raise ``UserError`` where the mask does not fit B, T, S and the device; what its tensors hold is not looked at."""
        if self.window < 0:
            raise invalid("mask.window", self.window, "a number of keys, or 0 for all")
        none: dict[tuple[int, ...], bool] = {}
        for name, x, kinds, shapes in (
            ("keys", self.keys, "bool [B, S] or integers [B]", none | {(B, S): True, (B,): False}),
            ("ranges", self.ranges, "integers [B, 2, T]", none | {(B, 2, T): False}),
            ("cu_seqlens", self.cu_seqlens, "integers [N + 1], N >= 1", none),
        ):
            if x is None:
                continue
            is_bool = x.dtype == torch.bool
            right = (
                not is_bool and x.ndim == 1 and len(x) > 1
                if name == "cu_seqlens"
                else shapes.get(tuple(x.shape)) == is_bool
            )
            if not right or x.is_floating_point() or x.is_complex():
                raise UserError(
                    f"mask.{name} is {x.dtype} of shape {tuple(x.shape)}: expected {kinds} with B = {B}, T = {T}, S = {S}"
                )
            if x.device != device:
                raise UserError(f"mask.{name} is on {x.device}: expected {device}, as q")
        if self.cu_seqlens is not None and (B != 1 or T != S or self.keys is not None):
            raise UserError(
                f"mask.cu_seqlens with B = {B}, T = {T}, S = {S}, keys = {self.keys is not None}: "
                "expected a batch of one, T = S and no mask.keys"
            )

    def hides(self) -> bool:
        """Whether there may be tokens that nobody sees, which may hold anything."""
        return self.keys is not None or self.cu_seqlens is not None or self.ranges is not None

    def runs(self, B: int, T: int, S: int, causal: bool, device: torch.device) -> Runs | None:
        """What backends read; None where ``causal`` says it all. Nothing waits for the device."""
        shifts = self.bottom_right and T != S and (causal or self.window > 0)
        if not self.hides():
            if not shifts and not 0 < self.window < max(T, S):
                return None
            if not (
                device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            ):  # a graph keeps memory of its own
                return _runs_of_lengths(B, T, S, causal, self.bottom_right, self.window, device)
        return _runs(self, B, T, S, causal, device)


NO_MASK = Mask()


class Runs(NamedTuple):
    """Runs [first, last) of a ``Mask``; neither end decreases along a batch entry."""

    keys_of_queries: Tensor
    """[B, 2, T] int32: first and last of the keys that a query sees."""
    queries_of_keys: Tensor
    """[B, 2, S] int32: the same of the queries that see a key."""
    holes: Tensor | None
    """bool [B, S], False where a key inside of runs is hidden; None: there are none."""

    def empty(self) -> Tensor:
        """Queries that see no key, bool [B, T]; holes do not count."""
        return self.keys_of_queries[:, 0] >= self.keys_of_queries[:, 1]

    def unseen(self) -> Tensor:
        """Keys that no query sees, bool [B, S]."""
        unseen = self.queries_of_keys[:, 0] >= self.queries_of_keys[:, 1]
        return unseen if self.holes is None else unseen | ~self.holes


@functools.lru_cache(maxsize=64)
def _runs_of_lengths(
    B: int, T: int, S: int, causal: bool, bottom_right: bool, window: int, device: torch.device
) -> Runs:
    with torch.inference_mode(False):
        return _runs(Mask(bottom_right, window), B, T, S, causal, device)


def _runs(mask: Mask, B: int, T: int, S: int, causal: bool, device: torch.device) -> Runs:
    t, s = torch.arange(T, device=device), torch.arange(S, device=device)
    # [B or 1, T or 1]: where the keys that a query may see begin and end, whatever its place.
    begin, end = torch.zeros_like(s[:1, None]), torch.full_like(s[:1, None], S)
    holes = None
    if mask.keys is not None and mask.keys.dtype == torch.bool:
        holes = mask.keys.contiguous()
        end = torch.where(holes, s + 1, 0).amax(dim=1, keepdim=True)
        begin = torch.where(holes, s, S).amin(dim=1, keepdim=True).minimum(end)
    elif mask.keys is not None:
        end = mask.keys[:, None].clamp(0, S)
    elif mask.cu_seqlens is not None:
        bounds = torch.cat((mask.cu_seqlens, mask.cu_seqlens[-1:]))
        sequence = torch.searchsorted(mask.cu_seqlens[1:].contiguous(), t, right=True)
        begin, end = bounds[sequence][None], bounds[sequence + 1][None]
    if mask.ranges is not None:
        begin, end = begin.maximum(mask.ranges[:, 0]), end.minimum(mask.ranges[:, 1])
    place = (t + (S - T if mask.bottom_right else 0))[None]
    last = place + 1 if causal else place + mask.window if mask.window else torch.full_like(place, S)
    first = place + 1 - mask.window if mask.window else torch.zeros_like(place)
    last = last.maximum(begin).minimum(end).expand(B, T).contiguous()
    first = first.maximum(begin).minimum(last).contiguous()
    s = s.expand(B, S).contiguous()
    of_keys = [torch.searchsorted(ends, s, right=True, out_int32=True) for ends in (last, first)]
    return Runs(torch.stack((first, last), dim=1).int(), torch.stack(of_keys, dim=1), holes)


class Split(NamedTuple):
    """A mask as key ranges and padding: query t sees key s if ranges[:, 0, t] <= s < ranges[:, 1, t] and keys[:, s]."""

    ranges: Tensor
    """[B, 2, T] int32, as ``Mask.ranges``; the two are equal for a query that sees no key."""
    keys: Tensor
    """bool [B, S]: keys that some query sees."""
    has_holes: bool
    """Whether ``keys`` hides any key inside of a range; else ``ranges`` say all."""


def split(visible: Tensor) -> Split:
    """The ``Split`` that gives a mask back exactly: bool [B, T, S], True where a query sees a key. ``ValueError`` if there is none.

    There is one if any ranges and any padding give the mask: hiding the keys that nobody sees anyway, and cutting each range to the keys
    that are seen, changes nothing. The host waits once.
    """
    S = visible.shape[2]
    keys = visible.any(dim=1)
    count, bits = visible.sum(dim=2), visible.view(torch.uint8)
    empty = count == 0
    first, last = bits.argmax(dim=2), (S - bits.flip(2).argmax(dim=2)).masked_fill(empty, 0)
    end = last.cummax(dim=1).values
    begin = torch.where(empty, end, first)
    before = functional.pad(keys.cumsum(dim=1), (1, 0))
    gap = count != before.gather(1, last) - before.gather(1, first.masked_fill(empty, 0))
    back = (end != last) & ~empty
    back[:, 1:] |= begin[:, 1:] < begin[:, :-1]
    holes = count != (last - first).masked_fill(empty, 0)
    has_gap, goes_back, has_holes = torch.stack((gap.any(), back.any(), holes.any())).tolist()
    if has_gap or goes_back:
        raise ValueError(_why_not(visible, gap if has_gap else back, has_gap))
    return Split(torch.stack((begin, end), dim=1).int(), keys, has_holes)


def _why_not(visible: Tensor, wrong: Tensor, has_gap: bool) -> str:
    """The first query that the ranges cannot serve, in words."""
    entry, query = wrong.nonzero()[0].tolist()
    rows = visible[entry]
    sees = rows[query].nonzero()[:, 0].tolist()
    if has_gap:
        missed = rows.any(dim=0) & ~rows[query]
        missed[: sees[0]] = missed[sees[-1] :] = False
        key = int(missed.nonzero()[0])
        other = int(rows[:, key].nonzero()[0])
        fault = f"query {query} sees keys {sees[0]} and {sees[-1]}, not {key}, which query {other} sees"
    else:
        earlier = int(rows[:query].any(dim=1).nonzero()[-1])
        seen = rows[earlier].nonzero()[:, 0].tolist()
        fault = f"query {earlier} sees keys {seen[0]} to {seen[-1]}, query {query} keys {sees[0]} to {sees[-1]}"
        if sees[0] >= seen[0] and sees[-1] >= seen[-1]:
            fault += f", and query {query - 1} between them none"
    return f"batch entry {entry}: {fault}"
