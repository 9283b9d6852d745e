"""What calls may ask for besides full and causal attention (masks, shared keys, head dims, sinks), on every backend, against fp64.

Errors are held to twice those of standard attention in the same precision. Legend: B batch, T queries, S keys, H heads of queries, K of
keys, D head dim.
"""

from dataclasses import dataclass, fields, replace

import kernel_tests
import pytest
import torch
from attention_cases import Problem, assert_agree, assert_as_exact, in_small_tiles, oracle, results, same
from kernel_tests import pass_in_the_interpreter
from torch import Tensor

import attention
from attention import AttentionConfig, AttentionRule, AttentionSpec
from attention.backends import BACKENDS
from attention.mask import Mask, split
from errors import UserError

pytest.importorskip("triton")

device = kernel_tests.device
slow = pytest.mark.slow
NAMED = ("flash", "flash_reference", "standard")


@dataclass(frozen=True)
class Case:
    """Shapes, and what is hidden."""

    B: int = 1
    T: int = 40
    S: int = 40
    H: int = 2
    K: int = 2
    D: int = 16
    DV: int = 0
    """Head dim of V; 0: D."""
    causal: bool = True
    bottom_right: bool = False
    window: int = 0
    """W > 0: a query at place t sees keys above t - W, and those below t + W."""
    padding: tuple[str, ...] = ()
    """Of a batch entry: a digit a key, 0 where it is hidden."""
    packed: tuple[int, ...] = ()
    """Lengths of sequences one after another; what is left of T belongs to none."""
    sinks: bool = False
    """One more logit a head in the denominator, from far below the scores to far above."""
    softcap: float = 0.0

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)

    def mask(self, device: torch.device) -> Mask:
        keys = self.keys(device) if self.padding else None
        ranges = None
        if self.window or self.packed or self.bottom_right:  # without the padding, so that backends join the two
            bare = replace(self, padding=(), causal=self.causal and self.bottom_right).visible(device)
            ranges, *_ = split(bare)
        return Mask(keys, ranges)

    def keys(self, device: torch.device) -> Tensor:
        return torch.tensor([[digit == "1" for digit in text] for text in self.padding], device=device)

    def tensors(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
        """q, k, v and dO, [B, T or S, heads, D]; and sinks [H], if any."""
        generator = torch.Generator().manual_seed(0)
        queries, keys, of_v = (self.B, self.T, self.H), (self.B, self.S, self.K), self.DV or self.D
        shapes = (*queries, self.D), (*keys, self.D), (*keys, of_v), (*queries, of_v)
        drawn = tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        return (*drawn, torch.linspace(-9, 7, self.H).to(device)) if self.sinks else drawn

    def visible(self, device: torch.device) -> Tensor:
        """Which keys a query sees, [B, T, S]."""
        t, s = torch.arange(self.T, device=device)[:, None], torch.arange(self.S, device=device)
        place = t + (self.S - self.T if self.bottom_right else 0)
        seen = s <= place if self.causal else torch.ones(self.T, self.S, dtype=torch.bool, device=device)
        if self.window:
            seen = seen & ((s - place).abs() < self.window)
        seen = seen.expand(self.B, -1, -1)
        if self.padding:
            seen = seen & self.keys(device)[:, None]
        if self.packed:
            tokens = [number for number, length in enumerate(self.packed) for _ in range(length)]
            sequence = torch.tensor(tokens + [-1] * (self.T - len(tokens)), device=device)
            seen = seen & (sequence == sequence[:, None]) & (sequence >= 0)
        return seen


def formula(case: Case, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV, and the sinks' gradient, by standard attention in ``dtype``."""
    sinks = tensors[4] if case.sinks else None
    hidden = ~case.visible(tensors[0].device)
    return oracle(Problem(*tensors[:4]), case.softcap, dtype=dtype, hidden=hidden, sinks=sinks)


def computed(case: Case, tensors: tuple[Tensor, ...], spec: AttentionSpec) -> tuple[Tensor, ...]:
    """The same by a backend."""
    (group,) = AttentionConfig(default=spec).resolve(1, case.H)[0].groups
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors[:3], *tensors[4:])]
    device = leaves[0].device
    o = BACKENDS[group.backend].run(
        *leaves[:3],
        group.numerics,
        seed=torch.tensor(3, device=device),
        scale=case.D**-0.5,
        causal=case.causal and not case.bottom_right,
        softcap=case.softcap,
        sinks=leaves[3] if case.sinks else None,
        mask=case.mask(device),
    )
    return o.detach(), *torch.autograd.grad(o, leaves, tensors[3].to(o.dtype))


def spec_of(backend: str, preset: str = "flash", sites: tuple[str, ...] = ()) -> AttentionSpec:
    return AttentionSpec(preset="standard" if "standard" in backend else preset, sites=sites, backend=backend)


def assert_exact(case: Case, device: torch.device, spec: AttentionSpec) -> None:
    tensors = case.tensors(device)
    baseline, exact = (formula(case, tensors, dtype) for dtype in (torch.bfloat16, torch.float64))
    found = computed(case, tensors, spec)
    assert_as_exact(found[:4], baseline[:4], exact[:4])
    if case.sinks:
        error, allowed = ((x[4].double() - exact[4]).norm() for x in (found, baseline))
        assert error <= 2 * allowed


def kernels_agree(
    case: Case, preset: str, sites: tuple[str, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> None:
    """The kernels with the reference of the same roundings."""
    tensors, backends = case.tensors(device, dtype), ("flash", "flash_reference")
    found, expected = (computed(case, tensors, spec_of(backend, preset, sites)) for backend in backends)
    assert_agree(found, expected, formula(case, tensors, torch.float64))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=slow)])
def test_the_kernels_in_tritons_interpreter(cases: str) -> None:
    pass_in_the_interpreter(__file__, "-m", cases)


HEADS = [
    Case(B=2, H=4),
    Case(H=3, K=1, causal=False),
    Case(T=20, S=33, H=4, D=32),
    *(Case(T=20, S=20, H=2, K=1, D=d) for d in (80, 256)),
    *(pytest.param(Case(T=20, S=20, H=2, K=1, D=d), marks=slow) for d in (96, 112, 160, 192)),
]
OTHER_VALUES = [
    Case(T=20, S=33, D=24, DV=16, H=4),
    Case(T=20, S=20, D=16, DV=40, causal=False),
    Case(B=2, D=96, DV=64, window=9, K=1),
    pytest.param(Case(T=20, S=20, D=192, DV=128), marks=slow),
]
CAPPED = Case(T=20, S=20, softcap=3.0)
SINKS = Case(H=8, K=4, sinks=True)
BOTTOM_RIGHT = [Case(T=T, S=S, bottom_right=True) for T, S in ((20, 40), (40, 20), (1, 33))]
WINDOWS = [
    Case(window=7),
    Case(T=70, S=70, window=20, causal=False),
    Case(T=20, S=70, window=17, bottom_right=True, H=4),
    Case(window=100),
]
KEYS = [
    Case(B=2, padding=("1" * 5 + "0" * 35, "1" * 33 + "0" * 7), causal=False, H=4),
    Case(B=3, padding=("0" * 19 + "1" * 21, "1" * 40, "0" * 40)),
    Case(B=2, padding=("01" * 20, "1" * 30 + "0" * 10), causal=False),
    Case(B=2, padding=("1" * 25 + "0" * 15, "1" * 40), window=9),
    Case(window=3, padding=("1" * 12 + "0" * 9 + "1" * 19,)),  # rows whose window holds holes alone
]
PACKED = [
    Case(packed=(7, 20, 13)),
    Case(packed=(16, 1, 8, 5), causal=False, H=4),
    Case(T=70, S=70, packed=(35, 35), window=8),
    Case(packed=(7, 20, 13), padding=("1" * 4 + "0" * 9 + "1" * 27,)),
]


@pytest.mark.parametrize("backend", NAMED)
@pytest.mark.parametrize(
    "case", [*HEADS, *OTHER_VALUES, CAPPED, SINKS, *BOTTOM_RIGHT, *WINDOWS, *KEYS, *PACKED], ids=str
)
def test_as_exact_as_standard_attention(case: Case, backend: str, device: torch.device) -> None:
    assert_exact(case, device, spec_of(backend))


SHARED, WINDOW = Case(T=20, S=20, H=4, K=2, D=24, DV=40), Case(T=40, S=48, window=9)
PRESETS = ("delta_from_p", "stochastic_p_o", "fp32_o", "centered_keys", "corrected_rows", "consistent")


@pytest.mark.parametrize(
    ("case", "preset"),
    [*((SHARED, f"flash_{name}") for name in PRESETS), (WINDOW, "flash_consistent"), (WINDOW, "flash_stable")],
    ids=str,
)
def test_presets_with_shared_keys_and_behind_a_window(case: Case, preset: str, device: torch.device) -> None:
    """Groups are summed one head after another. Random bits, residuals and sums of rows read no column of the next head's."""
    kernels_agree(case, preset, (), device)


MASKED_SITES = [
    "score_gradients=m5 statistics=bf16",
    "row_max=scaled row_sum_floor=0.5",
    "exponent=separate_multiply probabilities=m3 divisor=rounded",
    "delta_sum=m4 row_residual=corrected_rows",
]
MORE_MASKED_SITES = [
    "tile_k=48 tile_product=bf16 accumulator=m4",
    "probabilities=m3 probabilities_rounding=stochastic output=m3 output_rounding=stochastic",
    "row_max=stabilized_safe row_sum_floor=0.5",
    "exponent=subtract_first",
    "saved_statistics=max_and_sum",
    "scores=bf16",
    "output=m3 delta_output=low16",
    "logsumexp=m9 delta=rowsum_p_dp_normalized",
    "delta_sum=m4 row_residual=centered_keys",
]


@pytest.mark.parametrize("sites", [*MASKED_SITES, *(pytest.param(x, marks=slow) for x in MORE_MASKED_SITES)])
def test_sites_act_behind_masks_as_in_the_reference(sites: str, device: torch.device) -> None:
    """Windows that begin behind a row's first block, rows that see nothing, and holes."""
    padding = ("0" * 9 + "1" * 31, "011" * 13 + "1")
    for case in (Case(T=40, S=48, H=1, K=1, window=9), Case(B=2, H=1, K=1, padding=padding)):
        kernels_agree(case, "flash", in_small_tiles(*sites.split()), device, torch.float32)


FULL = Case(T=33, S=33, causal=False)
ONE_P = ("backward_probabilities=forward", "divisor=rounded", "saved_statistics=max_and_sum")


@pytest.mark.parametrize("case", [FULL, replace(FULL, causal=True, T=40), replace(FULL, window=40)], ids=str)
@pytest.mark.parametrize(
    "sites",
    [
        ("score_gradients=e5m2_row",),
        ("probabilities_in_dv=int8_mx", "row_max_rounding=up", *ONE_P),
        ("probabilities=e4m3_row", *ONE_P),
    ],
    ids=str,
)
def test_columns_that_pad_a_block_of_keys_have_no_part_in_a_scale(
    case: Case, sites: tuple[str, ...], device: torch.device
) -> None:
    """Beside scores far below 0, which is that of a column of zeros."""
    q, k, v, do = case.tensors(device)
    tensors = (q - 5, k + 5, v, do)
    specs = (spec_of(backend, "flash", ("tile_k=32", *sites)) for backend in ("flash", "flash_reference"))
    found, expected = (computed(case, tensors, spec) for spec in specs)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).float().norm() < 2.0**-8 * y.float().norm()


@pytest.mark.parametrize("backend", ["flash", "flash_reference"])
@pytest.mark.parametrize("scale", ["_row", "_mx", "_nv"])
def test_hidden_values_have_no_part_in_a_scale_of_dp(scale: str, backend: str, device: torch.device) -> None:
    """Gradients of a sequence are the same to the bit whatever V of the next one is; a tile has keys of both."""
    case, first = Case(T=72, S=72, H=1, K=1, packed=(40, 32)), slice(40)
    q, k, v, do = case.tensors(device)
    other = torch.cat((v[:, first], 30 * v[:, 40:]), dim=1)
    spec = spec_of(backend, "flash", ("tile_k=32", f"probability_gradients=e2m1{scale}"))
    plain, found = (computed(case, (q, k, x, do), spec) for x in (v, other))
    assert same(tuple(x[:, first] for x in found), tuple(x[:, first] for x in plain))


@pytest.mark.parametrize("backend", ["flash", "flash_reference"])
def test_do_of_rows_that_see_nothing_has_no_part_in_its_scale(backend: str, device: torch.device) -> None:
    case = PACKED[1]  # the last ten rows belong to none
    q, k, v, do = case.tensors(device)
    larger = torch.cat((do[:, :30], 1000 * do[:, 30:]), dim=1)
    spec = spec_of(backend, "flash", ("output_gradient=int8_tensor",))
    assert same(*(computed(case, (q, k, v, x), spec) for x in (do, larger)))


@pytest.mark.parametrize("backend", NAMED)
@pytest.mark.parametrize("case", [KEYS[0], KEYS[1], KEYS[2], PACKED[1]], ids=str)
def test_what_nobody_sees_is_never_read(case: Case, backend: str, device: torch.device) -> None:
    """NaN in hidden keys and values, and in all of queries that see none, changes no bit."""
    tensors, seen = case.tensors(device), case.visible(device)
    hidden_keys, blind = ~seen.any(dim=1)[:, :, None, None], ~seen.any(dim=2)[:, :, None, None]
    if case.padding:  # queries between keys are there
        blind = torch.zeros_like(blind)
    hidden = (blind, hidden_keys, hidden_keys, blind)
    poisoned = tuple(x.masked_fill(where, torch.nan) for x, where in zip(tensors, hidden, strict=True))
    plain, found = (computed(case, x, spec_of(backend)) for x in (tensors, poisoned))
    assert same(plain, found)
    for x, where in zip(found, (blind, blind, hidden_keys, hidden_keys), strict=True):
        assert torch.all(x.masked_select(where) == 0)


@pytest.mark.parametrize("backend", ["flash", "flash_reference"])
@pytest.mark.parametrize(
    ("case", "preset", "sites"),
    [
        (SINKS, "flash_consistent", ()),
        (SINKS, "flash_delta_from_p", ("exponent=subtract_first", "saved_statistics=max_and_sum")),
        (SINKS, "flash_delta_normalized", ("exponent=separate_multiply",)),
        (SINKS, "flash", ("tile_k=16", "tile_product=m20")),
        (replace(SINKS, softcap=3.0), "flash", ()),
        (replace(SINKS, window=7), "flash", ()),
    ],
    ids=str,
)
def test_sinks_and_sites(case: Case, preset: str, sites: tuple[str, ...], backend: str, device: torch.device) -> None:
    assert_exact(case, device, spec_of(backend, preset, sites))


@pytest.mark.parametrize("sink", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("preset", ["flash", "flash_consistent"])
@pytest.mark.parametrize("backend", NAMED)
def test_a_sink_of_minus_infinity_is_none(backend: str, preset: str, sink: float, device: torch.device) -> None:
    """O and all gradients, also of rows that see no key."""
    case = Case(B=2, padding=("1" * 40, "0" * 40))
    q, k, v, do = (x.transpose(1, 2) for x in case.tensors(device))

    def passes(*sinks: Tensor) -> tuple[Tensor, ...]:
        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            settings = {"is_causal": True, "numerics": spec_of(backend, preset), "sinks": sinks}
            return attention.scaled_dot_product_attention(q, k, v, case.keys(device)[:, None, None], **settings)

        return results(attend, (q, k, v, *sinks), do)

    *found, of_sinks = passes(torch.full((2,), sink, device=device))
    assert same(found, passes())
    assert of_sinks.count_nonzero() == 0


def row_sums(preset: str, backend: str, device: torch.device) -> Tensor:
    """rowsum(dS) over the keys plus the sink's term of 16 rows, each the only one of its head, relative to the largest term.

    A feature of K that is 1 where that of Q is 0 has scale * rowsum(dS) as its dQ.
    """
    case = Case(T=1, H=16, K=16, causal=False, sinks=True)
    q, k, v, do, sinks = case.tensors(device, torch.float32)
    k, v = k + 1, v + 1
    q[..., 0], k[..., 0] = 0, 1
    spec = spec_of(backend, preset, ("probabilities=bf16", "output=bf16"))
    _, dq, *_, dsinks = computed(case, (q, k, v, do, torch.ones_like(sinks)), spec)
    return (dq[0, 0, :, 0] / case.D**-0.5 + dsinks) / dsinks.abs().max()


@pytest.mark.parametrize("backend", ["flash", "flash_reference"])
def test_by_flash_consistent_rows_of_ds_and_the_sink_sum_to_zero(backend: str, device: torch.device) -> None:
    assert row_sums("flash_consistent", backend, device).abs().max() < 1e-5
    assert row_sums("flash", backend, device).abs().max() > 1e-3


REAL = [
    Case(T=1000, S=1000, H=8, D=64),
    Case(T=1000, S=1000, H=8, K=1, D=128, window=300),
    Case(T=1000, S=1000, H=4, D=80),
    Case(T=500, S=500, H=4, D=192),
    Case(T=500, S=500, H=4, D=256, causal=False),
    Case(T=300, S=1000, H=8, D=128, bottom_right=True),
    Case(B=2, T=1000, S=1000, H=8, D=64, padding=("1" * 1000, "1" * 333 + "0" * 667)),
    Case(B=2, T=512, S=512, H=8, D=128, padding=("0" * 200 + "1" * 312, "011" * 170 + "11")),
    Case(T=1000, S=1000, H=8, D=96, packed=(300, 17, 128, 500)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["flash", "flash_consistent"])
@pytest.mark.parametrize("case", REAL, ids=str)
def test_real_sizes_on_a_gpu(case: Case, preset: str, device: torch.device) -> None:
    """Exact, and the same bits every time."""
    tensors = case.tensors(device)
    exact, first = formula(case, tensors, torch.float64), computed(case, tensors, spec_of("flash", preset))
    assert_as_exact(first, formula(case, tensors, torch.bfloat16), exact)
    for _ in range(10):
        assert same(first, computed(case, tensors, spec_of("flash", preset)))


def test_rules_for_heads_hold_where_heads_share_keys_and_part_no_group_of_them() -> None:
    case = Case(H=4)
    tensors = case.tensors(torch.device("cpu"))
    standard, flash = (spec_of(backend) for backend in ("standard", "flash_reference"))

    def attend(*heads: int) -> Tensor:
        rules = (AttentionRule(heads=heads, attention=standard),)
        plan = AttentionConfig(default=flash, rules=rules).resolve(1, 4)[0]
        return attention.run(*tensors[:3], plan, rounding_seed=torch.tensor(3))

    o = attend(2, 3)
    for heads, spec in ((slice(0, 2), flash), (slice(2, 4), standard)):
        assert torch.equal(o[:, :, heads], computed(case, tensors, spec)[0][:, :, heads])
    with pytest.raises(UserError, match="expected whole groups of 2 heads"):
        attend(1)
