"""r = rowsum(dS) of every published attention on the tensors of a checkpoint:

    python -m experiments.row_residual.measure_rows runs/NAME/checkpoints/step_00001000 [MORE ...] [--own] --data data/tokens/corpus

Appends to ``--out`` a row a checkpoint, layer and attention of experiments/*/runs, each computed by the PyTorch reference on q, k, v, dO
and x of one backward pass: of the run's own attention, the same tensors for all (``captured`` plain); with --own, of that attention in
every layer, so that dO has gone through the O that its delta reads (own). Columns:

    r_rms, r_mean   of r as the dQ product has it, over the root mean square of delta
    r_delta_rms     the same without the rounding of dS: what delta and P alone leave
    growth          -u^T G v / |dW_Q|, G = scale sum_i r_i (P K)_i / rowsum(P)_i x_i^T, (u, v) W_Q's top singular pair: above 0, r makes
                    W_Q grow
    growth_se       its standard error, from the sequences
    growth_delta, growth_delta_se     the same without the rounding of dS
    head_growth     sum over heads of growth along the top pair of each head's rows of W_Q
    size            |G| / |dW_Q|
    coherence       |G| over the root of the sum of its terms' squares: 1 if they have nothing in common, sqrt(tokens) if all are alike
    dw_q_error      |dW_Q - exact| / |exact|, exact by FP64 from the same tensors
    dw_q_growth     -u^T (dW_Q - exact) v / |exact|: all roundings, not r's alone
    exact_growth    -u^T exact v / |exact|
"""

from __future__ import annotations

import csv
import json
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attention import AttentionConfig, HeadGroup, LayerPlan
from attention.reference.exact import exact_float32
from attention.reference.tiles import FORMAT_OF, delta_operands
from config import TrainConfig, from_json
from errors import OneLineParser, UserError, exit_on_user_error
from figures.checkpoints import build, read_tokens, spread
from model import GPT
from probes.capture import LayerCapture, capture
from probes.delta_error import effective_numerics, over_groups, row_residuals
from training.weights import read_checkpoint

EXPERIMENTS = Path(__file__).resolve().parents[1]
STUDIES = ("fast_failure", "other_recipes", "published_fix")
Variant = tuple[str, AttentionConfig, float]


def variant_of(run: Path) -> Variant:
    """Name of a run's attention, its config, and its soft-cap."""
    config = json.loads((run / "config.json").read_text())["config"]
    chosen: AttentionConfig = from_json(AttentionConfig, config["attention"])
    softcap = float(config["model"]["attention_softcap"])
    return chosen.label() + (f" softcap {softcap:g}" if softcap else ""), chosen, softcap


def variants(n_layer: int, n_head: int) -> dict[str, tuple[tuple[LayerPlan, ...], float]]:
    """Plans and soft-cap of every published attention by its name, but for those that name layers or heads this model lacks."""
    found: dict[str, tuple[tuple[LayerPlan, ...], float]] = {}
    for run in sorted(run for study in STUDIES for run in (EXPERIMENTS / study / "runs").iterdir()):
        name, chosen, softcap = variant_of(run)
        try:
            found[name] = (chosen.resolve(n_layer, n_head), softcap)
        except UserError as error:
            print(f"left out {name}: {error}")
    return found


def outer_sums(rows_BHTD: Tensor, x_BTC: Tensor) -> Tensor:
    """sum over tokens of rows[T]^T x[T], of each sequence, [B, H * D, C] float32: dW_Q from dQ."""
    return torch.einsum("bhtd,btc->bhdc", rows_BHTD.float(), x_BTC.float()).flatten(1, 2)


def along(u: Tensor, v: Tensor, matrix_BCC: Tensor) -> Tensor:
    """-u^T M v of each sequence, [B]."""
    return -torch.einsum("c,bcd,d->b", u, matrix_BCC, v)


def exact_pass(layer: LayerCapture) -> tuple[Tensor, Tensor]:
    """dQ [B, H, T, D] and delta [B, H, T] by FP64, from q, k, v and dO as they were captured."""
    parts = []
    for operands in zip(layer.q_BTHD, layer.k_BTHD, layer.v_BTHD, layer.do_BTHD, strict=True):
        q, k, v, do = (x.transpose(0, 1).double() for x in operands)
        s = layer.scale * (q @ k.mT)
        if layer.softcap:
            s = layer.softcap * torch.tanh(s / layer.softcap)
        hidden = torch.ones_like(s[0], dtype=torch.bool).triu(1)
        p, dp = torch.softmax(s.masked_fill(hidden, -torch.inf), dim=-1), do @ v.mT
        delta = (p * dp).sum(dim=-1)
        ds = p * (dp - delta[..., None])
        if layer.softcap:
            ds = ds * (1 - (s / layer.softcap).square())
        parts.append((layer.scale * (ds @ k), delta))
    dq, delta = (torch.stack(part).float() for part in zip(*parts, strict=True))
    return dq, delta


def gradient_of_q(layer: LayerCapture) -> Tensor:
    """dQ [B, H, T, D] float32 with the roundings of the layer's plan, before its own rounding to the dtype of q."""

    def dq(group: HeadGroup) -> Tensor:
        key = effective_numerics(group).concrete(FORMAT_OF[layer.q_BTHD.dtype]).key()
        q, k, v, _, do = (x.float().contiguous() for x in layer.heads(group))
        settings = (key, layer.scale, True, layer.softcap)
        o, delta_o, saved = torch.ops.attention.flash_reference_forward(q, k, v, layer.rounding_seed, *settings)
        operands = delta_operands(o, delta_o)
        gradients = torch.ops.attention.flash_reference_backward(do, q, k, v, *operands, saved, *settings)
        return gradients[0].transpose(1, 2)

    return over_groups(layer, dq)


def unrounded(plan: LayerPlan) -> LayerPlan:
    """The plan with dS as it is before it is rounded."""

    def key(group: HeadGroup) -> str:
        return effective_numerics(group).with_sites({"score_gradients": "fp32"}).key()

    return replace(plan, groups=tuple(replace(group, numerics=key(group)) for group in plan.groups))


Pairs = tuple[Tensor, Tensor, Tensor, Tensor]


def top_pairs(w_q_CC: Tensor, n_head: int) -> Pairs:
    """(u [C], v [C]) of W_Q's largest singular value, and ([H, D], [H, C]) of each head's rows. By LAPACK: a GPU takes longer."""
    whole = torch.linalg.svd(w_q_CC.double().cpu(), full_matrices=False)
    heads = torch.linalg.svd(w_q_CC.double().cpu().view(n_head, -1, w_q_CC.shape[1]), full_matrices=False)
    found = (whole[0][:, 0], whole[2][0], heads[0][:, :, 0], heads[2][:, 0])
    return tuple(x.float().to(w_q_CC.device) for x in found)  # type: ignore[return-value]


def of_layer(layer: LayerCapture, pairs: Pairs, exact_dq: Tensor, exact_delta: Tensor) -> dict[str, float]:
    """The columns of one attention, which is the layer's plan."""
    u, v, u_HD, v_HC = pairs
    exact_BCC = outer_sums(exact_dq, layer.x_BTC)
    exact, size_delta = exact_BCC.sum(dim=0), exact_delta.square().mean().sqrt()
    columns: dict[str, Tensor] = {}
    for suffix, plan in (("_delta", unrounded(layer.plan)), ("", layer.plan)):
        r_BHT, key_BHTD = row_residuals(replace(layer, plan=plan))
        terms = layer.scale * r_BHT[..., None] * key_BHTD
        G_BCC = outer_sums(terms, layer.x_BTC)
        growth_B = along(u, v, G_BCC) / exact.norm()
        columns[f"r{suffix}_rms"] = r_BHT.square().mean().sqrt() / size_delta
        columns[f"growth{suffix}"] = growth_B.sum()
        columns[f"growth{suffix}_se"] = growth_B.std() * len(growth_B) ** 0.5
    columns["r_mean"] = r_BHT.mean() / size_delta
    squares = terms.square().sum(dim=(1, 3)) * layer.x_BTC.float().square().sum(dim=-1)
    G = G_BCC.sum(dim=0)
    columns["size"], columns["coherence"] = G.norm() / exact.norm(), G.norm() / squares.sum().sqrt()
    columns["head_growth"] = -torch.einsum("hd,hdc,hc->", u_HD, G.view(*u_HD.shape, -1), v_HC) / exact.norm()
    error_BCC = outer_sums(gradient_of_q(layer), layer.x_BTC) - exact_BCC
    columns["dw_q_error"] = error_BCC.sum(dim=0).norm() / exact.norm()
    columns["dw_q_growth"] = along(u, v, error_BCC).sum() / exact.norm()
    columns["exact_growth"] = along(u, v, exact_BCC).sum() / exact.norm()
    return {name: value.item() for name, value in columns.items()}


def by_reference(plan: LayerPlan) -> LayerPlan:
    """The plan without our kernels: one compiler run less for each attention."""
    names = {"flash": "flash_reference", "standard_triton": "standard"}
    changed = (replace(group, backend=names.get(group.backend, group.backend)) for group in plan.groups)
    return replace(plan, groups=tuple(changed))


def seeded(layer: LayerCapture) -> LayerCapture:
    """The capture with the seed that ``attention.run`` gave to this layer's (first) group: a stochastic O is drawn as it was."""
    plan = layer.plan
    offset = (plan.layer * plan.n_head + plan.groups[0].heads[0] + 1) * 0x9E3779B97F4A7C15 & (2**62 - 1)
    return replace(layer, rounding_seed=layer.rounding_seed ^ offset)


def seen(
    model: GPT, config: TrainConfig, batch: tuple[Tensor, Tensor], layers: Sequence[int] | None, own: bool
) -> Iterator[tuple[str, LayerCapture]]:
    """Every attention by its name, as the plan of what it is to be measured on, layer by layer."""
    known = variants(config.model.n_layer, config.model.n_head)
    tokens, targets = batch

    def captured() -> list[LayerCapture]:
        autocast = config.precision.autocast(tokens.device)
        return [seeded(layer) for layer in capture(model, tokens, targets, layers, autocast=autocast)]

    plain = [] if own else captured()
    for name, (plans, softcap) in known.items():
        if own:
            model.set_plans(tuple(by_reference(plan) for plan in plans))
            for attention in model.attentions():
                attention.softcap = softcap
        for layer in captured() if own else plain:
            yield name, replace(layer, plan=plans[layer.layer], softcap=softcap)


def measure(path: Path, arguments: Namespace, device: torch.device) -> list[dict[str, object]]:
    """Rows of one checkpoint."""
    loaded = read_checkpoint(path)
    model, config, _ = build(loaded, device)
    data = arguments.data or Path(config.data.dataset)
    tokens = read_tokens(data, config.model.vocab_size)
    length = min(arguments.length, config.data.sequence_length)
    (batch,) = spread(tokens, 1, arguments.sequences, length, str(data))
    n_layer, n_head = config.model.n_layer, config.model.n_head
    with torch.no_grad(), exact_float32(device):
        chosen = range(n_layer) if arguments.layers is None else arguments.layers
        pairs = {layer: top_pairs(model.w_q(layer).detach(), n_head) for layer in chosen}
        place = {"checkpoint": loaded.path.parent.parent.name, "step": loaded.step}
        place["captured"] = "own" if arguments.own else "plain"
        rows: list[dict[str, object]] = []
        exact: dict[object, tuple[Tensor, Tensor]] = {}
        on_device = (batch[0].to(device), batch[1].to(device))
        for name, layer in seen(model, config, on_device, arguments.layers, arguments.own):
            key = (name if arguments.own else "", layer.layer, layer.softcap)
            if key not in exact:
                exact = exact if not arguments.own else {}
                exact[key] = exact_pass(layer)
            measured = of_layer(layer, pairs[layer.layer], *exact[key])
            values = {column: f"{value:.4g}" for column, value in measured.items()}
            rows.append({**place, "layer": layer.layer, "attention": name, **values})
    return rows


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+", help="checkpoints: runs/NAME/checkpoints/step_N")
    parser.add_argument("--data", type=Path, help="data set (default: the run's)")
    parser.add_argument("--sequences", type=int, default=8, help="of validation data (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of one at most (default %(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", help="from 0 (default: all)")
    parser.add_argument("--own", action="store_true", help="one backward pass by each attention, not one for all")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "rows.csv")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(min(4, torch.get_num_threads()))  # LAPACK on all cores of a server waits for itself
    for path in arguments.checkpoints:
        began = time.perf_counter()
        rows = measure(path, arguments, device)
        is_new = not arguments.out.exists()
        with arguments.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
        print(f"{path}: {len(rows)} rows in {time.perf_counter() - began:.0f} s, appended to {arguments.out}")


if __name__ == "__main__":
    main()
