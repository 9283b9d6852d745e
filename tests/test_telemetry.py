"""training/telemetry.py: a probe changes no bit of a run, says what is known of planted cases, and its file outlives a kill."""

import contextlib
from typing import Any

import pytest
import torch
from attention_cases import causal_scores
from tiny_runs import Place, column, lines, optimizer, preset, tiny_model, weights

from attention import AttentionConfig, AttentionRule, AttentionSpec
from probes.capture import capture
from probes.delta_error import delta_errors
from training.telemetry import STATISTICS, measure

BF16 = {"precision.dtype": "bfloat16"}
OFTEN, NEVER = {"telemetry.every": 1}, {"telemetry.every": 0}


# ---- no bit of the training


MIXED = AttentionConfig(
    flash_backend="flash_reference",
    default=AttentionSpec(preset="flash_stochastic_p_o"),
    rules=(AttentionRule(layers=(1,), heads=(1,), attention=AttentionSpec(preset="flash_o_stochastic_delta_nearest")),),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "stochastic_accumulated": {**BF16, "attention": MIXED, "data.micro_batch": 2},
    "float16_qk_clip_sequences": {"precision.dtype": "float16", "model.qk_clip_tau": 0.1, "telemetry.sequences": 3},
    "muon_rounded_forward": {**BF16, "optim.optimizer": "muon", "attention": preset("flash", "rounded_forward")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_the_same_bits_with_a_probe_every_step_and_with_none(place: Place, name: str) -> None:
    # The last step's weights are probed, too; a checkpoint between probes must not matter either.
    with_probes, without = (
        place.train(f"{name}_{word}", {**SETTINGS[name], **every, "checkpoint.every": 5, "evaluation.every": 0})
        for word, every in (("often", OFTEN), ("never", NEVER))
    )
    assert len(lines(with_probes, name="telemetry.jsonl")) == 21
    assert weights(with_probes, 20) == weights(without, 20)
    assert optimizer(with_probes, 20) == optimizer(without, 20)
    assert column(with_probes, "train_loss") == column(without, "train_loss")


# ---- what a probe says


TOKENS = torch.randint(256, (1, 17), generator=torch.Generator().manual_seed(0))
BATCH = TOKENS[:, :-1], TOKENS[:, 1:], torch.tensor(5)


def bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


PLANS = {
    "one": preset("flash"),
    "mixed": MIXED,
    "three": AttentionConfig(
        flash_backend="flash_reference",
        default=AttentionSpec(numerics="rounded_forward"),
        rules=(
            AttentionRule(layers=(2,), heads=(0,), attention=AttentionSpec(preset="standard")),
            AttentionRule(layers=(0,), attention=AttentionSpec(preset="flash_delta_from_p")),
        ),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_each_layer_and_head_has_its_place(name: str) -> None:
    model = tiny_model(PLANS[name], n_layer=3)
    record, _ = measure(model, *BATCH, bf16())
    for layer in capture(model, *BATCH[:2], autocast=bf16(), rounding_seed=BATCH[2]):
        error_BHT = delta_errors(layer).error_BHT
        for head in range(2):
            mean = error_BHT[:, head].double().mean().item()
            assert record["delta_error_mean"][layer.layer][head].item() == pytest.approx(mean, rel=1e-4, abs=1e-12)
            logits = causal_scores(layer.q_BTHD[0, :, head].float(), layer.k_BTHD[0, :, head].float(), layer.scale)
            expected = pytest.approx(logits.max().item(), rel=2.0**-8, abs=1e-6)
            assert record["max_logit"][layer.layer][head].item() == expected


def changed(*sites: str) -> AttentionConfig:
    return AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(sites=sites))


def test_logits_are_of_q_and_k_as_all_their_sites_round_them() -> None:
    """Two sites that do the same to Q and K: layer 0 is the same, though ``inputs`` rounds its V too."""
    plans = changed("queries_and_keys=m1"), changed("inputs=m1")
    one, other = (measure(tiny_model(plan), *BATCH, bf16())[0] for plan in plans)
    assert all(torch.equal(one[name][0], other[name][0]) for name in STATISTICS[1:])


def test_what_all_keys_share_is_in_no_logit_where_their_mean_is_subtracted() -> None:
    logits = []
    for shared in (0, 8):
        model = tiny_model(changed("key_mean=subtracted"), bias=True)
        model.attentions()[0].c_attn.bias.data[16:32] = shared
        logits.append(measure(model, *BATCH, contextlib.nullcontext())[0]["max_logit"])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


def test_a_measurement_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "__index__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
            count.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    measure(tiny_model(), *BATCH, bf16())
    assert count == []
