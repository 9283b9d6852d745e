"""Classes of inputs on which attention kernels differ, each with its reason.

In every class the last feature of K is 1 and that of Q is 0. Logits do not change, and the last column of dQ is scale * rowsum(dS), which
measures it from outside. dO has four significant bits, so that its multiples by 9 to 15 are exact in BF16. In captured inputs the
ones replace the feature that does least to the logits.

Legend: B batch, H query heads, G key heads, T length, D head dim, DV that of v, o and dO.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..user_error import invalid
from .captured import Inputs, Mask, load


@dataclass(frozen=True)
class Shape:
    """``DV``: head dim of v, o and dO; None: D."""

    B: int = 2
    H: int = 4
    G: int = 4
    T: int = 256
    D: int = 64
    DV: int | None = None

    def __post_init__(self) -> None:
        if self.DV == self.D:  # one form, which is equal to itself, and in which DV follows another D
            object.__setattr__(self, "DV", None)

    @property
    def dims(self) -> tuple[int, int]:
        """D and DV."""
        return self.D, self.D if self.DV is None else self.DV

    def sizes(self) -> dict[str, int]:
        """By name; DV where it is not D."""
        return {name: n for name, n in asdict(self).items() if n is not None}

    def __str__(self) -> str:
        return " ".join(f"{name} {n}" for name, n in self.sizes().items())


def require_shape(shape: object) -> None:
    """Raises ``UserError`` for what is no ``Shape``, or one in which a class of inputs cannot be made."""
    if (
        not isinstance(shape, Shape)
        or min(shape.B, shape.G) < 1
        or shape.H % shape.G
        or min(shape.dims) < 8
        or shape.T < 32
    ):
        sizes = "B 1 or more, G 1 or more, H a multiple of G, D and DV 8 or more, T 32 or more"
        raise invalid("shape", shape, f"a Shape of {sizes}")


@dataclass(frozen=True)
class InputClass:
    """``make`` changes normal q, k, v, dO in FP32, given a generator; ``shape`` changes the shape that is asked for."""

    reason: str
    make: Callable[[list[Tensor], torch.Generator], list[Tensor]] = lambda x, _: x
    shape: Callable[[Shape], Shape] = lambda x: x
    causal: bool = True
    scale: float = 1.0
    """Scale of the logits, in units of 1 / sqrt(D)."""
    mask: Callable[[Shape], Mask] | None = None
    make_fp16: Callable[[list[Tensor], torch.Generator], list[Tensor]] | None = None
    """Instead of ``make`` where the inputs are of FP16."""
    make_causal: Callable[[list[Tensor], torch.Generator], list[Tensor]] | None = None
    """Instead of ``make`` for a kernel of causal attention alone."""
    packaged: bool = False
    """Captured ones, inputs/NAME.zip beside this module, in their own shape; a larger head dim is filled with zeros."""


PACKAGED_DIM = 64
"""Head dim of the packaged ones."""


def _odd(s: Shape) -> Shape:
    return replace(s, T=s.T + 13)


def _odd_below(s: Shape) -> Shape:
    """Of a last tile of 64 more than half is there, of 16 less than half, where ``_odd`` has it the other way round."""
    return replace(s, T=s.T - 9)


def _half_tile(s: Shape) -> Shape:
    """Of the last tile of 128 a half is there; where T is less than 64, T."""
    return replace(s, T=max(s.T - (s.T - 64) % 128, min(s.T, 64)))


def _grouped(s: Shape) -> Shape:
    """Three key heads, or one for a kernel that is asked for one."""
    G, n = 3 if s.G > 1 else 1, s.H // s.G
    return replace(s, H=G * (n if n > 1 else 3), G=G)


def even(name: str, shape: Shape) -> Shape:
    """``shape`` for a kernel that is not for ``odd_length``: what gives the other classes of that length T itself."""
    change = CLASSES[name].shape if name in CLASSES else None
    return replace(shape, T=2 * shape.T - change(shape).T) if change in (_odd, _odd_below) else shape


_normal = functools.partial(torch.randn, dtype=torch.float32, device="cpu")
"""A kernel's module may have set another dtype or device as torch's default."""


def _common(x: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    return [t + 2 * _normal(t.shape[-1], generator=generator) if i < 3 else t for i, t in enumerate(x)]


def _shared_direction(x: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    q, k, v, do = x
    direction = torch.nn.functional.normalize(_normal(q.shape[-1], generator=generator), dim=0)
    push = 3 * q.shape[-1] ** 0.25 * direction
    v = 0.3 * v + _normal(v.shape[-1], generator=generator)
    do = 0.2 * do + _normal(v.shape[-1], generator=generator)
    return [0.5 * q + push, 0.5 * k + push, v, do]


def _peaked(logit: float) -> Callable[[list[Tensor], torch.Generator], list[Tensor]]:
    """q and k are scaled so that the largest logit is about this."""

    def make(x: list[Tensor], _: torch.Generator) -> list[Tensor]:
        q, k, v, do = x
        k_H = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        largest = (q[..., :-1] @ k_H[..., :-1].mT).amax().item() / math.sqrt(q.shape[-1])
        factor = math.sqrt(logit / largest)
        return [q * factor, k * factor, v, do]

    return make


def _ties(x: list[Tensor], _: torch.Generator) -> list[Tensor]:
    q, k, v, do = x
    T = k.shape[2]
    n = max(1, T // 32)
    return [q, k[:, :, :n].repeat(1, 1, math.ceil(T / n), 1)[:, :, :T], v, do]


def _cancelling(x: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    q, k, v, do = x
    T, D, DV = *k.shape[2:], v.shape[3]
    direction, shared = _normal(2, max(D, DV), generator=generator)
    slope = torch.linspace(-1, 1, T, dtype=torch.float32, device="cpu")[:, None] * direction[:DV]
    return [0.1 * q, 0.3 * k + 2 * shared[:D], 0.1 * v + slope, 0.2 * do + direction[:DV]]


def _cancelling_queries(x: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    q, k, v, do = x
    k, q, do, _ = _cancelling([k, q, do, v], generator)
    return [q, k, v, do]


def _cancelling_late_queries(x: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Of causal attention. Sums over queries cancel in keys that all of them see: the first half, as dO is 0 in the first half of queries.
    The other keys, whose sums do not cancel, have little weight: their logits are 2 lower.
    """
    q, k, v, do = x
    T, D, DV = *k.shape[2:], v.shape[3]
    direction, shared = _normal(2, max(D, DV), generator=generator)
    late = (torch.arange(T, device="cpu") >= T // 2)[:, None]
    slope = torch.linspace(-1, 1, int(late.sum()), dtype=torch.float32, device="cpu")[:, None] * direction[:DV]
    do = 0.1 * do * late
    do[:, :, T // 2 :] += slope
    return [0.3 * q + 2 * shared[:D], 0.1 * k - late * shared[:D] / math.sqrt(D), v, do]


def _apart(x: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Logits are -3 on average: a key of zeros, with its logit of 0, would have six to ten times the mean weight."""
    q, k, v, do = x
    D = q.shape[-1]
    push = math.sqrt(3 * math.sqrt(D)) * torch.nn.functional.normalize(_normal(D, generator=generator), dim=0)
    return [q + push, k - push, v, do]


def _low(x: list[Tensor], generator: torch.Generator, largest: float = math.inf) -> list[Tensor]:
    """q . k is ``largest`` in size at most."""
    q, k, v, do = x
    D = q.shape[-1]
    product = min(2e4 * math.sqrt(D), largest)
    push = math.sqrt(product) * torch.nn.functional.normalize(_normal(D, generator=generator), dim=0)
    return [0.01 * q + push, 0.01 * k - push, v, do]


_low_fp16 = functools.partial(_low, largest=6e4)
"""A right eager kernel rounds q . k to FP16, which ends at 65,504."""


def _padding(s: Shape) -> Mask:
    # The last one of several is whole.
    ends = [s.T - s.T // 3 - 1 - b for b in range(max(1, s.B - 1))] + [s.T] * (s.B > 1)
    lengths = torch.tensor(ends, device="cpu")
    there = torch.arange(s.T, device="cpu") < lengths[:, None, None, None]
    return Mask(there & torch.ones(s.T, s.T, dtype=torch.bool, device="cpu").tril())


def _window(s: Shape) -> Mask:
    width = s.T // 4 + 1
    near = torch.ones(s.T, s.T, dtype=torch.bool, device="cpu").tril().triu(1 - width)
    # In the strides of padding: a compiled kernel is then the same.
    return Mask(near.repeat(s.B, 1, 1, 1), width)


def _garbage(
    keys: Callable[[Tensor], Tensor], values: float
) -> Callable[[list[Tensor], torch.Generator], list[Tensor]]:
    def make(x: list[Tensor], _: torch.Generator) -> list[Tensor]:
        q, k, v, do = x
        B, _G, T, _D = k.shape
        there = _padding(Shape(B=B, T=T)).visible[:, :, -1, :, None]
        return [q, torch.where(there, k, keys(k)), torch.where(there, v, values * v), do]

    return make


CLASSES: dict[str, InputClass] = {
    "gaussian": InputClass("what tests of kernels use, FlashAttention's too; delta's error is small and has no direction here"),
    "common_part": InputClass(
        "keys, queries and values share a part, as behind biases and positions: it multiplies errors of delta (docs/results.md)", _common
    ),
    "shared_direction": InputClass(
        "queries and keys along one direction, dO alike in all rows: as in the layer that fails (arXiv 2510.04212)",
        _shared_direction,
    ),
    "values_of_one_sign": InputClass(
        "the bias of O's rounding adds up (arXiv 2510.04212)", lambda x, _: [x[0], x[1], -x[2].abs() - 1, x[3]]
    ),
    "peaked_100": InputClass("largest logit 100: where stable runs end (experiments/matched_pairs); and the default scale", _peaked(100)),
    "peaked_1000": InputClass("largest logit 1,000: growth has begun (docs/results.md)", _peaked(1000)),
    "ties": InputClass("each key returns 32 times or more: row maxima repeat, P_bar is 1 more than once (arXiv 2510.04212)", _ties),
    "equal_keys": InputClass(
        "all keys alike: O is a mean of values, as before training", lambda x, _: [x[0], x[1][:, :, :1].expand_as(x[1]), *x[2:]]
    ),
    "cancelling_tiles": InputClass(
        "dS changes its sign midway along keys with a shared part: sums of dQ grow large before they cancel", _cancelling, causal=False
    ),
    "tiny": InputClass("values and dO of 1e-4, as dO of a mean loss: FP16 may lose it", lambda x, _: [*x[:2], x[2] * 1e-4, x[3] * 1e-4]),
    "huge": InputClass("values and dO of 1e3: FP16 may overflow", lambda x, _: [x[0], x[1], x[2] * 1e3, x[3] * 1e3]),
    "odd_length": InputClass("a length that no tile divides: its last tile is partly empty, and nothing passes the mask there", shape=_odd),
    "grouped": InputClass(
        "grouped queries: three, or as many as are asked for, to each of three key heads, whose dK and dV add up (arXiv 2305.13245)",
        shape=_grouped,
    ),
    "full": InputClass("no causal mask, which would hide what the last tile of that length lacks", _apart, _odd, causal=False),
    "padding": InputClass(
        "keys behind a sequence's end, with large numbers, in that length: nobody may see them; O of queries there is not judged",
        # Logits pass 1e5, and an additive mask of -1e4 does not hide them. In FP16 they overflow where a right eager kernel rounds S,
        # and values of 1000 where it rounds dP.
        _garbage(lambda k: 6e4 * k.sign(), 1000), _odd, mask=_padding, make_fp16=_garbage(lambda k: 30 * k, 30),
    ),
    "window": InputClass(
        "a query sees the last quarter of keys only, in that length: the mask has two edges (arXiv 2004.05150)", shape=_odd, mask=_window
    ),
    "scale": InputClass(
        "a scale other than 1 / sqrt(head dim), no power of two, and logits of 120: is the argument followed, and q times it not rounded?",
        _peaked(200), scale=0.6,
    ),
    "captured_early": InputClass("layer 1 of a run that explodes at 3,828 (experiments/one_wheel), at 1,000: no growth yet", packaged=True),
    "captured_growing": InputClass("the same layer at 3,700: its logits grow", packaged=True),
    "captured_late": InputClass("the same layer at 3,800: logits of 50,000, seven steps before the gradient norm jumps", packaged=True),
    "captured_healthy": InputClass("layer 6 of that run at 3,800: small logits", packaged=True),
    "low": InputClass(
        "all logits about -20,000 (in FP16 -60,000 before their scale), in another odd length: a mask that writes -10,000 would win",
        _low, _odd_below, make_fp16=_low_fp16,
    ),
    "low_masked": InputClass(
        "the same with a mask, half of the last tile of 128 empty: torch 2.11's cuDNN makes NaNs in dQ (pytorch 196678)",
        _low, _half_tile, mask=_padding, make_fp16=_low_fp16,
    ),
    "cancelling_queries": InputClass(
        "dO changes its sign midway along queries with a shared part: sums of dK and dV grow large before they cancel",
        _cancelling_queries, causal=False, make_causal=_cancelling_late_queries,
    ),
}  # fmt: skip
"""Those that are compared with FP64; ``measures.py`` has further ones that are compared with themselves."""


def make(name: str, shape: Shape, dtype: torch.dtype, device: torch.device | str, causal: bool | None = None) -> Inputs:
    """The inputs of a class, or of a file of captured ones (a path that ends in .zip): the same numbers on every device.

    ``causal``: True for a kernel of causal attention alone; False for one without a causal mask, and padding hides keys from all queries.
    Captured inputs and other masks stay as they are.
    """
    if _is_captured(name):
        return _with_ones(_padded(_last_feature_least(captured(name)), shape_of(name, shape)), dtype, device)
    chosen = CLASSES[name]
    shape = chosen.shape(shape)
    generator = torch.Generator().manual_seed(list(CLASSES).index(name))
    D, DV = shape.dims
    ends = ((shape.H, D), (shape.G, D), (shape.G, DV), (shape.H, DV))
    normal = [_normal(shape.B, n, shape.T, dim, generator=generator) for n, dim in ends]
    change = chosen.make_fp16 if chosen.make_fp16 and dtype == torch.float16 else chosen.make
    if causal and chosen.make_causal:
        change = chosen.make_causal
    q, k, v, do = change(normal, generator)
    mask = chosen.mask(shape) if chosen.mask else None
    if mask is not None and causal is False and chosen.mask is _padding:
        mask = Mask(mask.visible[:, :, -1:].repeat(1, 1, shape.T, 1))
    if mask is not None:
        do = do.masked_fill(mask.unread(), 0)
        mask = mask._replace(visible=mask.visible.to(device))
    scale = chosen.scale / math.sqrt(D)
    is_causal = mask is None and (chosen.causal if causal is None else causal)
    return _with_ones(Inputs(q, k, v, do, scale, is_causal, mask), dtype, device)


def shape_of(name: str, shape: Shape) -> Shape:
    if not _is_captured(name):
        return CLASSES[name].shape(shape)
    x = captured(name)
    dims = (max(PACKAGED_DIM, dim) if name in CLASSES else x.q.shape[3] for dim in shape.dims)
    return Shape(x.q.shape[0], x.q.shape[1], x.k.shape[1], x.q.shape[2], *dims)


def _is_captured(name: str) -> bool:
    return name not in CLASSES or CLASSES[name].packaged


def captured(name: str) -> Inputs:
    """The inputs of a packaged class, or those in a file. Raises ``UserError`` if it is no capture, or of nothing to judge."""
    found = load(Path(__file__).with_name("inputs") / f"{name}.zip" if name in CLASSES else name)
    found.require_numbers(name)
    return found


def _padded(x: Inputs, shape: Shape) -> Inputs:
    """Zeros before the features, up to the head dims of ``shape``. The scale stays, and so do logits, O and gradients."""
    D, DV = shape.dims
    pairs = ((x.q, D), (x.k, D), (x.v, DV), (x.do, DV))
    q, k, v, do = (torch.nn.functional.pad(t, (dim - t.shape[-1], 0)) for t, dim in pairs)
    return replace(x, q=q, k=k, v=v, do=do)


def _last_feature_least(x: Inputs) -> Inputs:
    """The feature that does least to the logits becomes the last, and dO of a usual size; in FP32."""
    q, k, v, do = (t.float() for t in (x.q, x.k, x.v, x.do))
    n, D = q.shape[1] // k.shape[1], q.shape[-1]
    size = q.square().mean((0, 2)).unflatten(0, (-1, n)).mean(1) * k.square().mean((0, 2))
    order_GD = torch.arange(D, device="cpu").repeat(len(size), 1)
    least = size.argmin(-1, keepdim=True)
    order_GD.scatter_(1, least, D - 1)
    order_GD[:, -1:] = least
    q = q.gather(-1, order_GD.repeat_interleave(n, 0)[None, :, None].expand_as(q))
    k = k.gather(-1, order_GD[None, :, None].expand_as(k))
    # dO of a mean loss is tiny; a power of two changes no rounding of BF16, and FP16 does not lose it.
    do = do * 2.0 ** -math.floor(math.log2(do.abs().amax().clamp(min=2.0**-100).item()))
    return replace(x, q=q, k=k, v=v, do=do)


def _with_ones(x: Inputs, dtype: torch.dtype, device: torch.device | str) -> Inputs:
    q, k = x.q.clone(), x.k.clone()
    mantissa, exponent = torch.frexp(x.do)
    do = torch.ldexp((mantissa * 16).round() / 16, exponent)  # four bits
    q[..., -1], k[..., -1] = 0.0, 1.0
    q, k, v, do = (t.to(device, dtype) for t in (q, k, x.v, do))
    return replace(x, q=q, k=k, v=v, do=do)


def one_hot(logit: float, like: Inputs) -> Inputs:
    """As ``like``, but the last D - 1 rows, or all where T is less, give all weight to their own keys by a margin of ``logit``: O = V there
    in exact arithmetic. Queries and keys before them are 0.
    """
    T, D = like.q.shape[2:]
    n = min(T, D - 1)
    own = (..., range(T - n, T), range(n))
    generator = torch.Generator().manual_seed(99)
    size = math.sqrt(logit * math.sqrt(D))
    q, k = (torch.zeros(x.shape, dtype=torch.float32, device="cpu") for x in (like.q, like.k))
    q[own] = size * (1 + 0.1 * torch.rand(n, generator=generator, dtype=torch.float32, device="cpu"))
    k[own] = size
    v = _normal(like.v.shape, generator=generator).bfloat16()
    do = _normal(like.do.shape, generator=generator)
    q, k, v, do = (t.to(like.q.device, like.q.dtype) for t in (q, k, v, do))
    return replace(like, q=q, k=k, v=v, do=do)
