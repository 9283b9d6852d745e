"""Attention as a run had it: q, k, v and dO of chosen layers, and a small file of them that the crash test reads.

    with capture(model, layers=(1, 6)) as calls:
        loss(model(batch)).backward()
    calls[1].part(heads=(7,), length=512).save("layer_1.zip")

The file is a zip of ``about.json`` and the bits of each tensor, little-endian, one plane a byte (all first bytes, all second ones, ...),
which compresses better. Nothing in it is executed.

Legend: B batch, H query heads, G key heads, T length, D head dim, DV that of v, o and dO; captured ones have one D.
"""

import contextlib
import json
import math
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..user_error import UserError, invalid
from ..watching.passes import QKV, Pass, plain_mask

NAMES = ("q", "k", "v", "do")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


class Mask(NamedTuple):
    """``visible``: bool [B, 1, T, T], what causal attention hides included; ``window``: keys that a query sees, itself among them, or 0;
    ``dtype``: that in which a kernel gets it.
    """

    visible: Tensor
    window: int = 0
    dtype: torch.dtype = torch.bool

    def given(self) -> Tensor:
        """As torch's ``attn_mask``: bool, or in a floating dtype 0 where a key is seen and -inf elsewhere."""
        if self.dtype == torch.bool:
            return self.visible
        return torch.zeros_like(self.visible, dtype=self.dtype).masked_fill(~self.visible, -math.inf)

    def unread(self) -> Tensor:
        """Queries behind a sequence's end, bool [B, 1, T, 1]: a mask hides their own keys, and nobody reads their O."""
        return ~self.visible.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)


@dataclass(frozen=True)
class Inputs:
    """q [B, H, T, D], k [B, G, T, D], v [B, G, T, DV] and dO [B, H, T, DV] of one call, in one dtype; scale of the logits.

    ``about``: where captured ones are from, as JSON values. Where there is a mask, which captured ones never have, ``causal`` is False.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    scale: float
    causal: bool = True
    mask: Mask | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def visible(self) -> Tensor:
        """Which keys a query sees, bool [1 or B, 1, T, T]."""
        if self.mask is not None:
            return self.mask.visible
        T = self.q.shape[2]
        whole = torch.ones(1, 1, T, T, dtype=torch.bool, device=self.q.device)
        return whole.tril() if self.causal else whole

    def part(
        self, *, heads: Sequence[int] | None = None, sequences: int | None = None, length: int | None = None
    ) -> "Inputs":
        """Query heads by number, each with the keys it reads; the first sequences; the first queries and, where causal, keys.

        A mask that is wrong in a partial last tile shows only in a ``length`` that leaves one.
        """
        self._without_mask()
        B, H, T = self.q.shape[:3]
        chosen = tuple(range(H) if heads is None else heads)
        if not chosen or not set(chosen) <= set(range(H)):
            raise invalid("heads", list(chosen), f"numbers from 0 to {H - 1}")
        if sequences is not None and not 1 <= sequences <= B:
            raise invalid("sequences", sequences, f"1 to {B}")
        if length is not None and not (1 <= length <= T and (self.causal or length == T)):
            raise invalid("length", length, f"1 to {T}" if self.causal else f"{T}, as the attention is not causal")
        q, k, v, do = (
            x[:sequences, [h * x.shape[1] // H for h in chosen], :length] for x in (self.q, self.k, self.v, self.do)
        )
        numbers = self.about.get("heads")
        if not isinstance(numbers, list) or len(numbers) != H:  # what a user says of the whole
            numbers = range(H)
        about = {**self.about, "heads": [numbers[h] for h in chosen], "sequences": len(q), "length": q.shape[2]}
        return replace(self, q=q, k=k, v=v, do=do, about=about)

    def require_numbers(self, name: str) -> None:
        """Raises ``UserError`` where the crash test would learn nothing of these inputs, called ``name``."""
        for what in NAMES:
            x = getattr(self, what)
            if not x.any() or not x.isfinite().all():
                seen = "not finite" if x.any() else "0"
                raise UserError(f"{name}: {what} is {seen}: expected finite numbers that are not all 0")

    def save(self, path: str | Path) -> None:
        """Raises ``UserError`` where the file cannot be written, there is a mask, or tensors are not of one dtype of ``DTYPES``."""
        self._without_mask()
        dtypes = sorted({str(getattr(self, name).dtype).removeprefix("torch.") for name in NAMES})
        if len(dtypes) > 1 or dtypes[0] not in DTYPES:
            raise invalid("dtype of q, k, v, do", ", ".join(dtypes), f"one for all four, of {', '.join(DTYPES)}")
        shapes = {name: list(getattr(self, name).shape) for name in NAMES}
        about = {"dtype": str(self.q.dtype).removeprefix("torch."), "scale": self.scale, "causal": self.causal}
        about |= {"shapes": shapes, "about": dict(self.about)}
        contents = {"about.json": json.dumps(about, indent=1).encode()}
        for name in NAMES:
            x = getattr(self, name).cpu().contiguous()
            contents[name] = x.view(torch.uint8).view(-1, x.element_size()).T.contiguous().numpy().tobytes()
        try:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
                for name, content in contents.items():
                    # A date of its own would give each copy other bytes.
                    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from None

    def _without_mask(self) -> None:
        if self.mask is not None:
            raise invalid("mask", "a mask", "none, as captured inputs have")


def load(file: str | Path | IO[bytes]) -> Inputs:
    """A file that ``Inputs.save`` wrote. Raises ``UserError`` for any other."""
    try:
        with zipfile.ZipFile(file) as archive:
            about = json.loads(archive.read("about.json"))
            dtype, shapes = DTYPES[about["dtype"]], {name: tuple(map(int, about["shapes"][name])) for name in NAMES}
            (B, H, T, D), G = shapes["q"], shapes["k"][1]
            if (shapes["do"], shapes["k"], shapes["v"]) != (shapes["q"], (B, G, T, D), (B, G, T, D)) or H % G:
                raise ValueError(f"shapes {shapes}")
            q, k, v, do = (_tensor(archive.read(name), dtype, shapes[name]) for name in NAMES)
        return Inputs(q, k, v, do, float(about["scale"]), bool(about["causal"]), about=dict(about["about"]))
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can raise anything
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: no file of captured attention ({why})") from None


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    planes = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype.itemsize, math.prod(shape))
    return planes.T.contiguous().view(dtype).view(shape)


@contextlib.contextmanager
def capture(
    model: nn.Module, layers: Sequence[int], about: Mapping[str, Any] | None = None
) -> Iterator[dict[int, Inputs]]:
    """Around one forward and backward pass: what attention of these layers read, and dO, by layer, once the block is over.

    Args:
        model: whose calls of torch's or this package's ``scaled_dot_product_attention``, or of an attention function of Hugging Face, are
            seen, as ``watch`` sees them; they are numbered from 0.
        about: JSON values to keep with them, as step, loss, commit, GPU.

    The pass computes what it computes without this; a compiled model runs uncompiled. A call that is not plain attention (a mask that is
    not causal, a bias, dropout, a soft-cap, sinks, values of another head dim), or whose output takes no gradient, is left out with a
    warning. At the end of the block it raises ``ValueError`` if that leaves no layer, and for a layer that made no call or got no gradient.
    """
    calls: dict[int, Inputs] = {}
    complete: dict[int, Inputs] = {}
    left_out: dict[int, str] = {}

    def attend(seeing: Pass, number: int, run: Any, named: dict[str, Any]) -> Tensor:
        o: Tensor = run(*(named[name] for name in QKV))
        if number not in layers:
            return o
        dtype = o.dtype  # of the hook below, which must not hold o: a graph that its own hooks keep is never freed
        with _disable_current_modes():  # selective checkpointing tells operations apart by their order
            try:
                causal = _is_causal(named)
            except ValueError as error:
                left_out[number] = str(error)
                return o
            q, k, v = (named[name].detach().to("cpu", dtype, copy=True) for name in QKV)
            q, k, v = (x.expand(1, *x.shape) if x.ndim < 3 else x for x in (q, k, v))
            # As torch broadcasts them: q to the heads of o, all to its batch, and of k and v one to the heads of the other.
            q, G = q.expand(*o.shape[:-1], -1), max(k.shape[-3], v.shape[-3])
            k, v = (x.expand(len(o), *x.shape[-3:]).repeat_interleave(G // x.shape[-3], 1) for x in (k, v))
            scale = q.shape[-1] ** -0.5 if named["scale"] is None else named["scale"]
        more = {**(about or {}), "layer": number}
        call = calls[number] = Inputs(q, k, v, torch.empty(0), scale, causal, about=more)

        def output_gradient(do: Tensor) -> None:
            complete[number] = replace(call, do=do.detach().to("cpu", dtype, copy=True))

        if o.requires_grad:
            o.register_hook(output_gradient)
        else:
            left_out[number] = "its output takes no gradient: activation checkpointing needs use_reentrant=False"
        return o

    seeing = Pass(None, attend)
    seeing.open(model, names=False)
    try:
        yield complete
    finally:
        seeing.close()
    for layer, why in left_out.items():
        if not complete:
            raise ValueError(f"capture: layer {layer}: {why}")
        warnings.warn(f"capture: layer {layer}: {why}; it is left out", stacklevel=3)
    for layer in layers:
        if layer in left_out:
            continue
        if not seeing.seen:
            raise ValueError(
                "capture: no call of attention was seen, as in watch(): expected F.scaled_dot_product_attention, nn.MultiheadAttention "
                "with need_weights=False, or an attention function of Hugging Face; where a model calls a kernel of its own, put "
                "F.scaled_dot_product_attention in its place for the capture"
            )
        if layer not in calls:
            raise ValueError(
                f"capture: layer {layer}: expected one of the {seeing.seen} calls of attention that were seen, from 0"
            )
        if layer not in complete:
            raise ValueError(f"capture: layer {layer}: no gradient came: expected the backward pass in the block")


def _is_causal(named: dict[str, Any]) -> bool:
    """Raises ``ValueError`` for what is not plain attention, causal or full."""
    q, k, v = (named[name] for name in ("query", "key", "value"))
    T, S = q.shape[-2], k.shape[-2]
    mask = plain_mask(named, q.device)
    if q.shape[-1] != v.shape[-1]:
        raise invalid("head dim of v", v.shape[-1], f"{q.shape[-1]}, that of q")
    plain = q.ndim == 4 and T == S
    plain = plain and not named["dropout_p"] and not named.get("softcap") and named.get("sinks") is None
    if mask is not None and plain:
        is_bool = mask.dtype == torch.bool
        low = -math.inf if is_bool else max(torch.finfo(mask.dtype).min, -1e9)  # no logit makes up for it
        visible, hidden = (mask, ~mask) if is_bool else (mask == 0, mask <= low)
        causal = torch.ones(T, S, dtype=torch.bool, device=mask.device).tril()
        plain = bool(((visible == causal) & (hidden != causal)).all())
    if not plain:
        raise ValueError("expected as many keys as queries, no mask but the causal one, no dropout, no soft-cap")
    return mask is not None or bool(named["is_causal"])
