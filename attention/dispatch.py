"""One call for all attention: groups of heads go to their backends, and come back in their places.

Legend: B batch, H heads, T sequence, D head dim.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .backends import BACKENDS, Call, lacking, numerics_of, obstacle
from .functional import checked_numbers, constant_result, refuse_flag, refuse_tangent
from .mask import seen_by_causal
from .plan import HeadGroup, LayerPlan
from .rounding import FORMAT_OF
from .user_error import UserError


def run(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    plan: LayerPlan,
    *,
    rounding_seed: Tensor,
    softcap: float = 0.0,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention of one layer, O [B, T, H, D]. Masks and sinks are arguments of ``scaled_dot_product_attention``.

    Args:
        q_BTHD, k_BTHD, v_BTHD: one dtype of float32, bfloat16 and float16; any strides (views of a fused projection need no copy). Keys may
            be more or fewer than queries; with ``causal`` query t sees keys up to t. Heads of k and v may be fewer, HK: head h of q then
            reads head h // (H // HK).
        plan: which heads use what; ``attention.check_plans`` says before whether this machine can run it.
        rounding_seed: int64 tensor of shape [] on q's device; stochastic rounding is a pure function of it, of layer and position, so
            give a new one at every step.
        softcap: c > 0 replaces S by c tanh(S / c); 0 leaves S alone.
        scale: of Q K^T; default 1 / sqrt(D).

    Returns the dtype of q, or float32 where a group leaves O unrounded. Raises ``UserError`` unless q, k and v fit each other and
    have the plan's heads (tensors laid out [B, H, T, D] mostly do not), for other dtypes, for a wrong ``rounding_seed``, and for what a
    backend of the plan cannot serve (in compiled code: grouped heads, a width of v and a soft-cap alone; see ``check_plans``);
    ``ValueError`` for a scale, a soft-cap or ``causal`` that is none, and for forward-mode differentiation.
    """
    if not isinstance(plan, LayerPlan):
        raise UserError(f"plan is a {type(plan).__name__}: expected a LayerPlan")
    n_key = k_BTHD.shape[2] if k_BTHD.ndim == 4 else 0
    group = plan.n_head // n_key if n_key and plan.n_head % n_key == 0 else 0
    ends = q_BTHD.shape[:1], q_BTHD.shape[3:]
    tensors = {
        "q": (q_BTHD, q_BTHD.ndim == 4 and q_BTHD.shape[2] == plan.n_head, f"the {plan.n_head} heads of the plan"),
        "k": (k_BTHD, group and (k_BTHD.shape[:1], k_BTHD.shape[3:]) == ends, f"q's ends and a divisor of {plan.n_head} heads"),
        "v": (v_BTHD, v_BTHD.shape[:3] == k_BTHD.shape[:3] and v_BTHD.ndim == 4, "k's shape but for the width"),
    }  # fmt: skip
    for name, (x, fits, expected) in tensors.items():  # kernels trust them
        refuse_tangent(name, x)
        what = f"attention of layer {plan.layer}: {name}"
        if not fits or 0 in x.shape:
            shapes = f"{tuple(x.shape)}: expected [batch, time, head, width] with {expected}, none of them 0"
            raise UserError(f"{what} has shape {shapes}")
        if x.dtype not in FORMAT_OF:
            raise UserError(f"{what} is {x.dtype}: expected float32, bfloat16 or float16")
        if (x.dtype, x.device) != (q_BTHD.dtype, q_BTHD.device):
            raise UserError(f"{what} is {x.dtype} on {x.device}: expected {q_BTHD.dtype} on {q_BTHD.device}, as q")
    if not isinstance(rounding_seed, Tensor) or rounding_seed.dtype != torch.int64 or rounding_seed.ndim:
        raise UserError(f"rounding_seed = {rounding_seed!r}: expected an int64 tensor of shape [], on q's device")
    refuse_flag("causal", causal)
    scale, softcap = checked_numbers(scale, softcap)
    scale = 1 / math.sqrt(q_BTHD.shape[-1]) if scale is None else scale
    other = v_BTHD.shape[3] != k_BTHD.shape[3]
    features = (("grouped",) if group > 1 else ()) + (("value_dim",) if other else ())
    features += ("softcap",) if softcap else ()
    compiling = torch.compiler.is_compiling()
    # What asks for no feature is left to ``check_plans`` then: no call for the compiler to see.
    for chosen in plan.groups if features or not compiling else ():
        if compiling:
            reason = _lacking(chosen.backend, features)
        else:
            asked = chosen.backend, chosen.numerics, q_BTHD.device.type, FORMAT_OF[q_BTHD.dtype]
            reason = _refused(*asked, features, q_BTHD.shape[3], v_BTHD.shape[3])
        if reason is not None:
            raise UserError(f"attention of layer {plan.layer} = {chosen.spec.label()!r}: {reason}")

    def call(group: HeadGroup, *qkv: Tensor) -> Tensor:
        seed, backend = rounding_seed ^ group.seed_offset, BACKENDS[group.backend]
        return backend.run(*qkv, group.numerics, seed=seed, scale=scale, causal=causal, softcap=softcap)

    if causal:
        k_BTHD, v_BTHD = seen_by_causal(k_BTHD, v_BTHD, q_BTHD.shape[1])
    if len(plan.groups) == 1:
        return call(plan.groups[0], q_BTHD, k_BTHD, v_BTHD)
    parts = []
    for g in plan.groups:
        shared = tuple(head // group for head in g.heads[::group])
        if [head // group for head in g.heads] != [key for key in shared for _ in range(group)]:
            expected = f"expected whole groups of {group} heads, which share keys"
            raise UserError(f"attention of layer {plan.layer}: heads {g.heads} have rules of their own: {expected}")
        parts.append(call(g, _chosen(q_BTHD, g.heads), *(_chosen(x, shared) for x in (k_BTHD, v_BTHD))))
    order = [head for group in plan.groups for head in group.heads]
    back = tuple(order.index(head) for head in range(plan.n_head))
    dtype = torch.float32 if any(part.dtype == torch.float32 for part in parts) else q_BTHD.dtype
    return _chosen(torch.cat([part.to(dtype) for part in parts], dim=2), back)


@constant_result
def _lacking(backend: str, features: tuple[str, ...]) -> str | None:
    return lacking(backend, features)


@functools.lru_cache(maxsize=256)  # every call asks
def _refused(backend: str, key: str, kind: str, fmt: str, features: Any, D: int, DV: int) -> str | None:
    return obstacle(backend, Call(kind, fmt, D, numerics_of(backend, key), features, DV))


def _chosen(x_BTHD: Tensor, heads: tuple[int, ...]) -> Tensor:
    # A compiler makes a constant of the list; elsewhere every call would copy it to the device, and wait.
    return x_BTHD[:, :, list(heads) if torch.compiler.is_compiling() else head_index(heads, x_BTHD.device)]


@functools.cache  # without a bound: a CUDA graph goes on reading an index at the address that it was captured with
def head_index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """``heads`` as an int64 index on ``device``, made once: a list is copied from the host each time, and no CUDA graph can hold that."""
    with torch.inference_mode(False):  # what is made in inference mode, autograd could not keep later
        return torch.tensor(heads, dtype=torch.int64, device=device)
