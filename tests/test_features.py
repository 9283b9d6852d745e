"""What calls may ask for besides full and causal attention, on every backend of ours, against fp64: in Triton's interpreter, or on a GPU.

Errors are held to twice those of standard attention in the same precision. Legend: B batch, T queries, S keys, H heads of queries, K of
keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_tests import pass_in_the_interpreter, poison_new_tensors
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionRule, AttentionSpec
from errors import UserError

triton = pytest.importorskip("triton")

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("o", "dq", "dk", "dv")
BACKENDS = ("flash", "flash_reference", "standard_triton", "standard")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)


@dataclass(frozen=True)
class Case:
    """Shapes, and what is hidden."""

    B: int = 1
    T: int = 40
    S: int = 40
    H: int = 2
    K: int = 2
    D: int = 16
    causal: bool = True

    def tensors(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
        """q, k, v and dO, [B, T or S, heads, D]."""
        generator = torch.Generator().manual_seed(0)
        shapes = [
            (self.B, self.T, self.H),
            (self.B, self.S, self.K),
            (self.B, self.S, self.K),
            (self.B, self.T, self.H),
        ]
        return tuple(torch.randn(*shape, self.D, generator=generator).to(device, dtype) for shape in shapes)

    def visible(self, device: torch.device) -> Tensor:
        """Which keys a query sees, [B, T, S]."""
        t, s = torch.arange(self.T, device=device)[:, None], torch.arange(self.S, device=device)
        seen = s <= t if self.causal else torch.ones(self.T, self.S, dtype=torch.bool, device=device)
        return seen.expand(self.B, -1, -1)


def formula(case: Case, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV by standard attention in ``dtype``: matrices, and autograd."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors[:3]]
    q, k, v = (x.transpose(1, 2).repeat_interleave(case.H // x.shape[2], dim=1) for x in leaves)
    hidden = ~case.visible(q.device)[:, None]
    s = (q @ k.mT * case.D**-0.5).masked_fill(hidden, -torch.inf)
    empty = hidden.all(dim=-1, keepdim=True)
    o = (torch.softmax(s.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0) @ v).transpose(1, 2)
    return o.detach(), *torch.autograd.grad(o, leaves, tensors[3].to(dtype))


def computed(case: Case, tensors: tuple[Tensor, ...], spec: AttentionSpec, seed: int = 3) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV by a backend."""
    plan = AttentionConfig(default=spec).resolve(1, case.H)[0]
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    o = attention.run(*leaves, plan, rounding_seed=torch.tensor(seed, device=leaves[0].device), causal=case.causal)
    return o.detach(), *torch.autograd.grad(o, leaves, tensors[3].to(o.dtype))


def spec_of(backend: str, preset: str = "flash", sites: tuple[str, ...] = ()) -> AttentionSpec:
    return AttentionSpec(preset="standard" if "standard" in backend else preset, sites=sites, backend=backend)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]


def assert_exact(case: Case, backend: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    tensors = case.tensors(device, dtype)
    exact = formula(case, tensors, torch.float64)
    limits = errors(formula(case, tensors, dtype), exact)
    for name, error, limit in zip(NAMES, errors(computed(case, tensors, spec_of(backend)), exact), limits, strict=True):
        assert error <= 2 * limit, f"{name}: {error:.2e}, standard attention {limit:.2e}"


def assert_agree(case: Case, preset: str, sites: tuple[str, ...], device: torch.device) -> None:
    """The kernels with the reference of the same roundings, to a quarter of its own error."""
    tensors = case.tensors(device)
    expected, found = (
        computed(case, tensors, spec_of(backend, preset, sites)) for backend in ("flash_reference", "flash")
    )
    own = errors(expected, formula(case, tensors, torch.float64))
    apart = errors(found, tuple(x.double() for x in expected))
    for name, distance, error in zip(NAMES, apart, own, strict=True):
        assert distance <= error / 4, f"{name}: {distance:.2e} apart, own error {error:.2e}"


@pytest.mark.skipif(INTERPRETED, reason="this is the pytest it starts")
@pytest.mark.timeout(600)
def test_the_kernels_in_tritons_interpreter() -> None:
    pass_in_the_interpreter(__file__)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [Case(B=2, H=4), Case(H=3, K=1, causal=False), Case(T=20, S=33, H=4, D=32)], ids=str)
def test_heads_share_keys(case: Case, backend: str, device: torch.device) -> None:
    assert_exact(case, backend, device)


@pytest.mark.parametrize("preset", ["flash_stochastic_p_o", "flash_corrected_rows", "flash_centered_keys"])
@pytest.mark.parametrize("sites", [(), ("tile_q=16", "tile_k=16", "gradient_accumulator=m5")], ids=str)
def test_heads_that_share_keys_are_summed_in_the_references_order(
    preset: str, sites: tuple[str, ...], device: torch.device
) -> None:
    """One after another, and rounded between tiles."""
    assert_agree(Case(H=4), preset, sites, device)


def test_heads_that_share_keys_give_the_bits_that_copies_of_keys_give(device: torch.device) -> None:
    case, spec = Case(H=4, D=32), spec_of("flash")
    q, k, v, do = case.tensors(device)
    grouped = computed(case, (q, k, v, do), spec)
    copied = computed(case, (q, *(x.repeat_interleave(2, dim=2) for x in (k, v)), do), spec)
    assert torch.equal(grouped[0], copied[0])
    assert torch.equal(grouped[1], copied[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [24, 80, 96, 112, 160, 192, 256])
def test_head_dims(head_dim: int, backend: str, device: torch.device) -> None:
    assert_exact(Case(T=20, S=20, H=2, K=1, D=head_dim), backend, device)


@pytest.mark.parametrize(
    "preset", ["flash_stochastic_p_o", "flash_compensated_delta", "flash_centered_keys", "flash_corrected_rows"]
)
def test_what_reads_rows_again_reads_no_column_beyond_the_head_dim(preset: str, device: torch.device) -> None:
    """Random bits, residuals and sums of rows; what lies beyond is the next head's."""
    assert_agree(Case(T=20, S=20, H=4, K=2, D=24), preset, (), device)


@pytest.mark.parametrize("case", [Case(H=4, K=2, D=24)], ids=str)
@pytest.mark.parametrize("backend", ["flash", "standard_triton"])
def test_repeats_are_equal_to_the_bit(case: Case, backend: str, device: torch.device) -> None:
    tensors, spec = case.tensors(device), spec_of(backend)
    first = computed(case, tensors, spec)
    for _ in range(1 if INTERPRETED else 20):
        assert all(torch.equal(a, b) for a, b in zip(first, computed(case, tensors, spec), strict=True))


@pytest.mark.parametrize(
    ("heads", "keys", "rules", "reason"),
    [
        (4, 3, (), "k has shape (1, 40, 3, 16)"),
        (2, 4, (), "k has shape (1, 40, 4, 16)"),
        (4, 2, (AttentionRule(heads=(1,), attention=spec_of("standard")),), "expected whole groups of 2 heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    heads: int, keys: int, rules: tuple[AttentionRule, ...], reason: str
) -> None:
    q, k, v, _ = Case(H=heads, K=keys).tensors(torch.device("cpu"))
    plan = AttentionConfig(default=spec_of("standard"), rules=rules).resolve(1, heads)[0]
    if rules:
        plan = AttentionConfig(default=spec_of("flash_reference"), rules=rules).resolve(1, heads)[0]
    with pytest.raises(UserError, match=".*" + reason.replace("(", r"\(").replace(")", r"\)")):
        attention.run(q, k, v, plan, rounding_seed=torch.tensor(0))


def test_rules_for_heads_hold_where_heads_share_keys() -> None:
    case = Case(H=4)
    tensors = case.tensors(torch.device("cpu"))
    standard, flash = (spec_of(backend) for backend in ("standard", "flash_reference"))
    rules = (AttentionRule(heads=(2, 3), attention=standard),)
    plan = AttentionConfig(default=flash, rules=rules).resolve(1, 4)[0]
    o = attention.run(*tensors[:3], plan, rounding_seed=torch.tensor(3))
    for heads, spec in ((slice(0, 2), flash), (slice(2, 4), standard)):
        assert torch.equal(o[:, :, heads], computed(case, tensors, spec)[0][:, :, heads])


def test_a_backend_without_a_feature_says_so() -> None:
    plans = AttentionConfig(default=AttentionSpec(preset="sdpa_efficient")).resolve(1, 2)
    with pytest.raises(UserError, match="share a head of keys"):
        attention.check(plans, device="cuda", dtype=torch.bfloat16, head_dim=64, features=("grouped",))
