"""Which keys a query sees, besides plain causal or full attention: ``Mask``, and the key ranges that backends read in its place.

Apart from padding inside a range, a mask shows each query one range of keys, and later queries no earlier range. Two numbers a query
say it all, and two a key say which queries see it. ``split`` finds these in a mask of a bool for each query and key.

Legend: B batch, T queries, S keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Mask(NamedTuple):
    """Which keys are hidden besides those that ``causal`` hides; its fields are names of ``numerics.FEATURES``.

    Windows, packing, prefixes, and queries that are the last of their keys, are ``ranges``. A query that sees no key has O = 0 and passes
    no gradient. Keys that ``keys`` hides, and queries whose range is empty, are never read. Other keys that no query sees, and queries
    whose range is all padding, must be finite: they are multiplied by 0.
    """

    keys: Tensor | None = None
    """Padding mask: bool [B, S], False where a key is hidden from all queries."""
    ranges: Tensor | None = None
    """Integers [B, 2, T]: the first key that each query sees, and the one after the last; neither decreases along the queries."""
    padded: Tensor | None = None
    """bool [] on the CPU, False where ``ranges`` say all that ``keys`` do: kernels, faster without, then do not read it."""

    def features(self) -> tuple[str, ...]:
        """The fields that ask for something."""
        return tuple(name for name in ("keys", "ranges") if getattr(self, name) is not None)

    def key_ranges(self, B: int, T: int, S: int, causal: bool, device: torch.device) -> "KeyRanges | None":
        """What backends read; None where ``causal`` says it all. Nothing waits for the device."""
        if not self.features():
            return None
        s = torch.arange(S, device=device)
        # [B or 1, T or 1]: where the keys that a query may see begin and end, whatever its place.
        begin, end = torch.zeros_like(s[:1, None]), torch.full_like(s[:1, None], S)
        keys = self.keys if self.padded is None or bool(self.padded) else None
        if keys is not None:
            end = torch.where(keys, s + 1, 0).amax(dim=1, keepdim=True)
            begin = torch.where(keys, s, S).amin(dim=1, keepdim=True).minimum(end)
        if self.ranges is not None:
            begin, end = begin.maximum(self.ranges[:, 0]), end.minimum(self.ranges[:, 1])
        last = torch.arange(1, T + 1, device=device) if causal else end.new_full((T,), S)
        last = last.maximum(begin).minimum(end).expand(B, T).contiguous()
        first = begin.minimum(last).contiguous()
        s = s.expand(B, S).contiguous()
        of_keys = [torch.searchsorted(ends, s, right=True, out_int32=True) for ends in (last, first)]
        padding = None if keys is None else keys.contiguous()
        return KeyRanges(torch.stack((first, last), dim=1).int(), torch.stack(of_keys, dim=1), padding)


NO_MASK = Mask()


class KeyRanges(NamedTuple):
    """Ranges [first, last) of a ``Mask``; neither end decreases along a batch entry."""

    keys_of_queries: Tensor
    """[B, 2, T] int32: first and last of the keys that a query sees."""
    queries_of_keys: Tensor
    """[B, 2, S] int32: the same of the queries that see a key."""
    padding: Tensor | None
    """bool [B, S], False where a key inside of a range is hidden; None where none is."""

    def empty(self) -> Tensor:
        """Queries that see no key, bool [B, T]; padding does not count."""
        return self.keys_of_queries[:, 0] >= self.keys_of_queries[:, 1]

    def hidden_keys(self) -> Tensor:
        """Keys that no query sees, bool [B, S]."""
        hidden = self.queries_of_keys[:, 0] >= self.queries_of_keys[:, 1]
        return hidden if self.padding is None else hidden | ~self.padding


def seen_by_causal(k_BSHD: Tensor, v_BSHD: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """K and V without the keys that none of T causal queries sees: they may be anything, and have no part in scales and means."""
    if torch.compiler.is_compiling():  # a branch would ask which is larger, and part a graph of free sizes in two
        # Dynamo takes min for sym_min; of torch 2.11 it does not take sym_min of two numbers.
        n = (min if torch.compiler.is_dynamo_compiling() else torch.sym_min)(T, k_BSHD.shape[1])
        return k_BSHD.narrow(1, 0, n), v_BSHD.narrow(1, 0, n)
    return (k_BSHD[:, :T], v_BSHD[:, :T]) if k_BSHD.shape[1] > T else (k_BSHD, v_BSHD)


def split(visible: Tensor) -> tuple[Tensor, Tensor, bool]:
    """A mask, bool [B, T, S], True where a query sees a key, as ``ranges`` (int32, equal ends where a query sees no key), ``keys`` and
    ``padded`` of ``Mask``, which give it back exactly. ``ValueError`` if there are none.

    There are some if any ranges and any padding give the mask: hiding the keys that nobody sees anyway, and cutting each range to the keys
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
    gap = count != before.gather(1, last) - before.gather(1, first)
    back = (end != last) & ~empty
    back[:, 1:] |= begin[:, 1:] < begin[:, :-1]
    inside = count != last - first
    has_gap, goes_back, padded = torch.stack((gap.any(), back.any(), inside.any())).tolist()
    if has_gap or goes_back:
        raise ValueError(_why_not(visible, gap if has_gap else back, has_gap))
    return torch.stack((begin, end), dim=1).int(), keys, padded


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
