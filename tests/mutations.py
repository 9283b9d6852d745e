"""Mutations: small faults, each of which the tests named beside it must find. One or more for every rounding site, and for what recording,
replay, resume, policies and refusals promise.

    python tests/mutations.py                 run all: ten minutes or so; writes tests/mutations.txt
    python tests/mutations.py --only delta    those whose name contains a word; the report keeps its other lines
    python tests/mutations.py --dry           say only whether each still applies

A fault is text of one product file that is replaced; the file is the one that holds the text, wherever it was moved. A mutation that
no longer applies is to be written anew with the code, not deleted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests/mutations.txt"


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new``; ``tests`` are arguments of pytest, in Triton's interpreter where ``kernel``.

    Those of test_sites.py run in both ways, as the reference is what the kernels are held to.
    """

    name: str
    old: str
    new: str
    tests: str
    kernel: bool = False


def site(name: str, old: str, new: str, *, of: str = "") -> Mutation:
    return Mutation(f"site {name}", old, new, f"tests/test_sites.py -k {of or name.split()[0]}")


def kernel(name: str, old: str, new: str, *, of: str = "") -> Mutation:
    return Mutation(f"kernel {name}", old, new, f"tests/test_sites.py -k {of or name.split()[0]}", kernel=True)


GOLDEN = "tests/test_golden.py -k reference"
SITES = [
    site("inputs", "sites.inputs(x.transpose(1, 2).float())", "x.transpose(1, 2).float()"),
    site("scores", "self._masked(self.sites.scores(s), rows, columns)", "self._masked(s, rows, columns)"),
    site(
        "statistics of m",
        "sites.statistics(torch.maximum(m, exponent.row_max(s)))",
        "torch.maximum(m, exponent.row_max(s))",
    ),
    site("statistics of l", "row_sum = sites.statistics(rescale * row_sum", "row_sum = (rescale * row_sum"),
    site("tile_sum", "sites.tile_sum(p_bar.sum(dim=-1, keepdim=True))", "p_bar.sum(dim=-1, keepdim=True)"),
    site("logsumexp", "return sites.logsumexp(m + log_l)", "return m + log_l"),
    Mutation(
        "site saved_statistics",
        "return torch.cat((m, log_l), dim=-1)",
        "return torch.cat((m + log_l, 0 * log_l), dim=-1)",
        "tests/test_exponent.py -k apart",
    ),
    site(
        "exponent unfused",
        'if n.exponent == "fma" else SeparateMultiply(problem)',
        "if n.exponent else SeparateMultiply(problem)",
        of="exponent",
    ),
    Mutation(
        "site exponent folded",
        "difference = s.double().mul_(self.c).sub_(m).float()",
        "difference = s.mul(self.c).sub_(m)",
        "tests/test_exponent.py -k 'not kernels'",
    ),
    site("probabilities forward", "return self.sites.probabilities(p_bar_BHRC)", "return p_bar_BHRC"),
    site(
        "probabilities backward",
        "dv = sites.probabilities(p).transpose(-1, -2) @ do\n    return",
        "dv = p.transpose(-1, -2) @ do\n    return",
    ),
    site("probabilities_rounding", "n.probabilities_rounding, bits)", '"nearest", bits)'),
    Mutation(
        "site probabilities_rounding: draws by tile",
        "B * H, rows, columns).view",
        "B * H, rows, slice(0, columns.stop - columns.start)).view",
        "tests/test_weights.py",
    ),
    Mutation(
        "site products",
        "return a_high @ b_low + a_low @ b_high + a_high @ b_high",
        "return a_high @ b_low + a_high @ b_high",
        f"{GOLDEN} tests/test_attention.py",
    ),
    site(
        "divisor",
        "rescale * divisor + sites.tile_sum(weights.sum",
        "rescale * divisor + sites.tile_sum(p_bar.sum",
    ),
    site(
        "backward_probabilities",
        "form.problem.sites.probabilities(form.exp(s, m)) * form",
        "form.exp(s, m) * form",
    ),
    site("row_max_rounding", "return row_max.ceil()", "return row_max"),
    site("tile_product", "+ sites.tile_product(product))", "+ product)"),
    site(
        "accumulator",
        "o_bar = sites.accumulator(sites.accumulator(rescale * o_bar) + sites.tile_product(product))",
        "o_bar = rescale * o_bar + sites.tile_product(product)",
    ),
    site("output", "output = round_output(o, n.output,", 'output = round_output(o, "fp32",'),
    site(
        "output_rounding",
        "output = round_output(o, n.output, n.output_rounding,",
        'output = round_output(o, n.output, "nearest",',
    ),
    site(
        "output_gradient",
        "do_BHTD = problem.sites.output_gradient(do.transpose(1, 2).float())\n        o_BHTD",
        "do_BHTD = do.transpose(1, 2).float()\n        o_BHTD",
    ),
    Mutation(
        "site delta normalized",
        "total = _over_row_sum(total, row_sum)",
        "total = total * 1.0",
        "tests/test_row_residual.py",
    ),
    Mutation(
        "site delta from P",
        "total += (p * dp).sum(dim=-1, keepdim=True)",
        "total += (problem.sites.probabilities(p) * dp).sum(dim=-1, keepdim=True)",
        f"{GOLDEN} tests/test_delta_error.py",
    ),
    Mutation("site delta recomputed", "recomputed += p @", "recomputed += problem.sites.probabilities(p) @", GOLDEN),
    Mutation(
        "site delta_output",
        "delta_output = round_output(o_exact, n.delta_output,",
        "delta_output = round_output(output.float(), n.delta_output,",
        "tests/test_sites.py -k delta_output",
    ),
    Mutation(
        "site delta_rounding: a stream of its own",
        "n.delta_rounding, seed, DELTA_STREAM",
        "n.delta_rounding, seed, OUTPUT_STREAM",
        GOLDEN,
    ),
    site(
        "delta_sum",
        "return problem.sites.delta_sum((do * o).sum(dim=-1, keepdim=True))",
        "return (do * o).sum(dim=-1, keepdim=True)",
    ),
    site(
        "probability_gradients",
        "dp = problem.sites.probability_gradients(do @ problem.v[:, :, columns].transpose(-1, -2))\n    return",
        "dp = do @ problem.v[:, :, columns].transpose(-1, -2)\n    return",
    ),
    site("score_gradients in dQ", "problem.scale * (sites.score_gradients(ds) @", "problem.scale * (ds @"),
    site("score_gradients in dK", "sites.score_gradients(ds_of_keys).transpose", "ds_of_keys.transpose"),
    Mutation(
        "site row_residual centered",
        "sums.ds * problem.k.mean(dim=2, keepdim=True)",
        "sums.ds * problem.k[:, :, :1]",
        "tests/test_sites.py -k row_residual",
    ),
    Mutation(
        "site row_residual corrected",
        "return excess, sites.delta_sum(delta + _over_row_sum(sums.ds_unrounded, sums.p))",
        "return excess, delta",
        "tests/test_row_residual.py tests/test_sites.py -k row_residual",
    ),
    site(
        "gradient_accumulator",
        "total[:, :, where] = add(total[:, :, where] + part)",
        "total[:, :, where] = total[:, :, where] + part",
    ),
    Mutation(
        "site row_max",
        "tied = (close.sum(dim=-1, keepdim=True) > 1)",
        "tied = (close.sum(dim=-1, keepdim=True) > 2)",
        "tests/test_stabilize.py",
    ),
    site("row_max_tolerance", "numerics.row_max_tolerance / scale", "0.0 / scale"),
    Mutation(
        "site row_max_cap",
        "numerics.row_max_cap * unit / scale",
        "numerics.row_max_cap",
        "tests/test_exponent.py -k cap",
    ),
    Mutation(
        "site row_sum_floor",
        "sites.tile_sum(p_bar.sum(dim=-1, keepdim=True)).clamp(min=least))\n        weights",
        "sites.tile_sum(p_bar.sum(dim=-1, keepdim=True)))\n        weights",
        "tests/test_row_sum_floor.py",
    ),
    site("hidden_tiles", 'hidden=n.hidden_tiles == "visited"', "hidden=False"),
    site(
        "tile_k",
        "_slices(self.k.shape[2], self.sites.numerics.tile_k)",
        "_slices(self.k.shape[2], self.sites.numerics.tile_q)",
    ),
    site(
        "in standard attention",
        "dp = sites.probability_gradients(do_BHTD @ problem.v.transpose(-1, -2))",
        "dp = do_BHTD @ problem.v.transpose(-1, -2)",
        of="probability_gradients",
    ),
    Mutation(
        "sites survive autocast",
        "        with torch.autocast(device.type, enabled=False):\n            yield",
        "        if device.type:\n            yield",
        "tests/test_attention.py -k autocast",
    ),
    Mutation(
        "input is the format of q",
        'if getattr(n, name) == "input"}',
        'if getattr(n, name) == "inputs"}',
        "tests/test_sites.py -k input_is",
    ),
]
KERNELS = [
    kernel("scores", "b_s = round_to(b_s, SITES.scores)", "b_s = b_s * 1.0"),
    kernel(
        "statistics",
        "b_l = round_to(b_alpha * b_l + b_sum, SITES.statistics)\n        b_m = b_m_new",
        "b_l = b_alpha * b_l + b_sum\n        b_m = b_m_new",
    ),
    kernel("tile_sum", "b_sum = round_to(tl.sum(b_p, 1), SITES.tile_sum)", "b_sum = tl.sum(b_p, 1)"),
    kernel(
        "accumulator",
        "b_scaled = round_to(b_alpha[:, None] * b_acc, SITES.accumulator)",
        "b_scaled = round_to(b_acc, SITES.accumulator)",
    ),
    kernel(
        "delta_sum",
        "b_delta = round_to(tl.sum(b_do.to(tl.float32) * b_o, 1), SITES.delta_sum)",
        "b_delta = tl.sum(b_do.to(tl.float32) * b_o, 1)",
    ),
    kernel(
        "delta_output residual",
        "b_o += b_r.to(tl.float32) * residual_unit(b_o, SITES.output, -SITES.delta_output, False)",
        "b_o += b_r.to(tl.float32) * 0.0",
        of="residual",
    ),
    kernel(
        "delta normalized",
        "b_delta = tl.div_rn(b_delta, b_row_sum)",
        "b_delta = b_delta * 1.0",
        of="normalized",
    ),
    kernel(
        "probabilities backward",
        "b_dv_part = dot(operand(b_p, SITES.probabilities, DTYPE), b_do, b_dv_part)",
        "b_dv_part = dot(operand(b_p, FP32, DTYPE), b_do, b_dv_part)",
        of="probabilities",
    ),
    kernel(
        "score_gradients",
        "b_dk_part = dot(operand(b_ds, SITES.score_gradients, DTYPE), b_q, b_dk_part)",
        "b_dk_part = dot(operand(b_ds, FP32, DTYPE), b_q, b_dk_part)",
    ),
    kernel(
        "gradient_accumulator",
        "b_dv = tl.where(m_full, round_to(b_dv + b_dv_part, SITES.gradient_accumulator), b_dv)",
        "b_dv = tl.where(m_full, b_dv + b_dv_part, b_dv)",
    ),
    Mutation(
        "kernel draws of P_bar by head",
        "o_zero + STREAM, o_zero + i_bh, _ROUNDS",
        "o_zero + STREAM, o_zero, _ROUNDS",
        "tests/test_kernels.py -k p_bar_draws",
        kernel=True,
    ),
    Mutation(
        "kernel row_residual",
        "b_share = tl.div_rn(b_r, b_row_sum)",
        "b_share = b_r",
        "tests/test_row_residual.py -k taken_out",
        kernel=True,
    ),
]
ROUNDING = [
    Mutation(
        "ties go to even",
        "raised = pattern + ((pattern >> cut) & 1) + ((1 << (cut - 1)) - 1)",
        "raised = pattern + ((1 << (cut - 1)) - 1)",
        "tests/test_rounding.py",
    ),
    Mutation(
        "stochastic rounding is unbiased",
        "return random_bits >> (RANDOM_BITS - cut)",
        "return random_bits >> (RANDOM_BITS - cut + 1)",
        "tests/test_rounding.py",
    ),
    Mutation(
        "a residual restores what was lost",
        "largest = 2 ** (bits - 1) - 1",
        "largest = 2 ** (bits - 2) - 1",
        "tests/test_rounding.py",
    ),
    Mutation("Philox has seven rounds", "ROUNDS = 7", "ROUNDS = 6", "tests/test_rounding.py"),
]
DISPATCH = [
    Mutation(
        "heads come back in their places",
        "back = tuple(order.index(head) for head in range(plan.n_head))",
        "back = tuple(order)",
        "tests/test_attention.py -k mixture",
    ),
    Mutation(
        "layers draw apart",
        "offset = (plan.layer * plan.n_head + group.heads[0] + 1)",
        "offset = (group.heads[0] + 1)",
        "tests/test_attention.py -k stochastic",
    ),
    Mutation(
        "a layout for torch is refused",
        "if x.ndim != 4 or x.shape[2] != plan.n_head:",
        "if x.ndim != 4:",
        "tests/test_attention.py -k laid_out",
    ),
    Mutation(
        "a seed is an int64 scalar",
        "if not isinstance(rounding_seed, Tensor) or rounding_seed.dtype != torch.int64 or rounding_seed.ndim:",
        "if not isinstance(rounding_seed, Tensor):",
        "tests/test_attention.py -k seed_that",
    ),
    Mutation(
        "overlapping rules are refused",
        "if (layer, head) in owner:",
        "if (layer, head) in owner and rule is None:",
        "tests/test_plan.py",
    ),
    Mutation(
        "an L to round and no L are refused together",
        'lambda n: n.saved_statistics != "logsumexp" and n.logsumexp not in ("fp32", "input"),',
        'lambda n: n.saved_statistics == "none",',
        "tests/test_exponent.py -k refused",
    ),
    Mutation(
        "drawing what is not rounded is refused",
        'lambda n: n.probabilities_rounding != "nearest" and n.probabilities == "fp32",',
        'lambda n: n.probabilities_rounding == "none",',
        "tests/test_plan.py",
    ),
]
RECORDING = [
    Mutation(
        "an altered recording is found",
        "if checksum != stored:",
        "if checksum == b'':",
        "tests/test_recording.py -k 'byte or swapped'",
    ),
    Mutation(
        "a resumed recording is cut",
        "self._file.truncate(self._start(rows))",
        "self._file.truncate(max(self._start(rows), self._file.seek(0, 2)))",
        "tests/test_recording.py -k 'resum' tests/test_batches.py",
    ),
    Mutation(
        "a recording is not overwritten",
        "if os.path.lexists(folder):",
        "if not folder.parent:",
        "tests/test_recording.py -k overwritten tests/test_batches.py",
    ),
    Mutation(
        "a resume beyond the last row is refused",
        "if found.steps < steps:",
        "if found.steps < 0:",
        "tests/test_recording.py -k resum",
    ),
    Mutation(
        "an unfinished recording does not call itself complete",
        '{"chain_start": start, "steps": steps, "complete": complete}',
        '{"chain_start": start, "steps": steps, "complete": True}',
        "tests/test_recording.py",
    ),
    Mutation(
        "another format version is refused",
        "if version != FORMAT_VERSION:",
        "if version is None:",
        "tests/test_recording.py -k version",
    ),
    Mutation(
        "another run's recording is not resumed",
        "if value != getattr(header, name):",
        "if name is None:",
        "tests/test_recording.py -k another_runs",
    ),
    Mutation(
        "a step counts when its tokens are there",
        "self._tokens.put_last(self.steps, tokens_GT.tobytes())",
        "self._tokens.put_last(max(self.steps - 1, 0), tokens_GT.tobytes())",
        "tests/test_recording.py",
    ),
    Mutation(
        "rank 0 alone records",
        "if config.record and rank == 0:",
        "if config.record:",
        "tests/test_batches.py -k rank",
    ),
    Mutation(
        "any split sees the same micro-batches",
        "[(m * self._world_size + self._rank) * size for m",
        "[(self._rank * self.accumulation() + m) * size for m",
        "tests/test_batches.py -k split",
    ),
    Mutation(
        "a replay ends with its recording",
        "if self.steps_available is not None and step >= self.steps_available:",
        "if self.steps_available is None and step < 0:",
        "tests/test_batches.py -k ends",
    ),
    Mutation(
        "a replay on other data is refused",
        "if file.header.sha256 != recorded:",
        "if file.header.sha256 == '':",
        "tests/test_batches.py -k other_data",
    ),
    Mutation(
        "a replay of other sizes is refused",
        "if recorded != asked:",
        "if recorded == 0:",
        "tests/test_batches.py -k other_sizes",
    ),
    Mutation(
        "each step has its own digest",
        "self._digest = next_checksum(self._digest, offsets_G)",
        "self._digest = next_checksum(self._digest, offsets_G[:0])",
        "tests/test_batches.py -k digest",
    ),
    Mutation(
        "each step draws anew",
        "counter=[0, 0, 0, position]",
        "counter=[0, 0, 0, position // 2]",
        "tests/test_batches.py -k 'draws or pinned'",
    ),
    Mutation(
        "carried validation is checked",
        "!= header.validation_windows_sha256:",
        "== '':",
        "tests/test_recording.py -k changed",
    ),
]
RESUME = [
    Mutation(
        "a resume has the optimizer's state",
        "optimizer.load_state_dict(loaded.optimizer_state)",
        "optimizer.state_dict()",
        "tests/test_resume.py -k equals_straight",
    ),
    Mutation(
        "a resume has the generators' state",
        "torch.set_rng_state(parts[0].clone())",
        "torch.get_rng_state()",
        "tests/test_checkpoint.py -k random_numbers",
    ),
    Mutation(
        "a resume goes on in the data after a rollback",
        "resume_at = loaded.position if",
        "resume_at = loaded.step if",
        "tests/test_nonfinite.py -k resumed",
    ),
    Mutation(
        "a resume keeps the lowered rate",
        'run.guard.load_state(loaded.extra["guard"])',
        "run.guard.state()",
        "tests/test_nonfinite.py",
    ),
    Mutation(
        "another setting is refused",
        "record.check_settings(saved, ",
        "(lambda *_: None)(saved, ",
        "tests/test_resume.py -k another_setting",
    ),
    Mutation(
        "another number of processes is refused",
        "if len(loaded.rng) != place.world_size:",
        "if len(loaded.rng) == 0:",
        "tests/test_resume.py -k processes",
    ),
    Mutation(
        "other data are refused",
        'batches.digest() != loaded.extra["data_digest"]',
        'batches.digest() == ""',
        "tests/test_resume.py -k other_data",
    ),
    Mutation(
        "a damaged checkpoint is passed over",
        "        damage = _damage(path)\n        if damage is not None:",
        "        damage = None\n        if damage is not None:",
        "tests/test_checkpoint.py -k falls",
    ),
    Mutation(
        "checkpoints of a course that was left go",
        "if step > newest or not",
        "if not",
        "tests/test_checkpoint.py -k abandoned",
    ),
    Mutation(
        "the last k stay",
        "[-self.config.keep_last :]",
        "[-self.config.keep_last - 1 :]",
        "tests/test_checkpoint.py -k stay",
    ),
    Mutation(
        "tied weights are stored once",
        "if first.setdefault(place, name) == name:",
        "if first.setdefault(place, name):",
        "tests/test_checkpoint.py -k tied",
    ),
    Mutation(
        "a rollback passes over broken weights",
        "not all(bool(t.isfinite().all()) for t in loaded.model_state.values())",
        "not loaded.model_state",
        "tests/test_nonfinite.py -k broken",
    ),
    Mutation(
        "a rollback gives up after so many",
        "self.rollbacks >= self.config.max_rollbacks",
        "self.rollbacks > self.config.max_rollbacks",
        "tests/test_nonfinite.py -k gives_up",
    ),
    Mutation(
        "a run that another process trains is left alone",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "tests/test_resume.py -k 'another_process or locked'",
    ),
]
REFUSALS = [
    Mutation(
        "a run that started meanwhile is not overwritten",
        "        folder.mkdir(parents=True)\n    except FileExistsError:",
        "        folder.mkdir(parents=True, exist_ok=True)\n    except FileExistsError:",
        "tests/test_bad_input.py",
    ),
    Mutation(
        "the device withholds what follows a stop",
        "withheld = bad | self._stopped",
        "withheld = bad",
        "tests/test_late_values.py -k withheld",
    ),
    Mutation(
        "the device withholds an update that is not finite",
        "bad = ~(loss.isfinite() & norm.isfinite())",
        "bad = ~loss.isfinite()",
        "tests/test_late_values.py -k withheld",
    ),
    Mutation(
        "values are read before a checkpoint",
        "often = (every, config.evaluation.every, config.checkpoint.every, config.telemetry.every)",
        "often = (every, config.evaluation.every, config.telemetry.every)",
        "tests/test_late_values.py -k stop",
    ),
    Mutation(
        "a rollback reads at once",
        'every = 1 if config.nonfinite.policy == "rollback" else',
        'every = 1 if config.nonfinite.policy == "" else',
        "tests/test_late_values.py -k rollback",
    ),
    Mutation(
        "the loss scale is not to blame below 1",
        "bad & loss.isfinite() & (loss_scale >= 1.0)",
        "bad & loss.isfinite() & (loss_scale >= 0.0)",
        "tests/test_late_values.py -k overflow",
    ),
    Mutation(
        "skips in a row have a limit",
        'policy == "skip" and skips >= self.config.max_skips',
        'policy == "skip" and skips < 0',
        "tests/test_nonfinite.py -k skip",
    ),
    Mutation(
        "checkpoints from before a row of skips stay",
        "prune=not run.guard.skips_in_a_row,",
        "prune=True,",
        "tests/test_nonfinite.py -k skip",
    ),
    Mutation(
        "a rollback passes over weights that give what is not finite",
        "again = bad_step == run.guard.went_back_to",
        "again = False",
        "tests/test_nonfinite.py -k finite_weights",
    ),
    Mutation(
        "auto begins a recording again that a killed start has left",
        'None if config.run.resume == "no" else 0',
        'None if config.run.resume != "yes" else 0',
        "tests/test_crashes.py -k change_of_a_file",
    ),
    Mutation(
        "auto leaves a folder alone that no run has made",
        "if path.name not in _OF_A_START",
        "if not path.name",
        "tests/test_unattended.py -k no_run",
    ),
    Mutation(
        "a run that is asked to leave saves",
        "leave(run, step, step > saved)",
        "leave(run, step, False)",
        "tests/test_unattended.py -k asked",
    ),
    Mutation(
        "a run of an operator that is gone is not gone on with",
        "if goes_on_from is not None and alike is not ANY and value not in alike:",
        "if goes_on_from is None and alike is not ANY and value not in alike:",
        "tests/test_retired.py",
    ),
    Mutation(
        "muon's factors are of this step",
        "torch._foreach_copy_(inputs, list(directions))",
        "torch._foreach_copy_(inputs, inputs)",
        "tests/test_muon.py",
    ),
    Mutation(
        "a vocabulary that is too small is refused",
        "if batches.vocabulary_size > config.model.vocab_size:",
        "if batches.vocabulary_size > 10 ** 9:",
        "tests/test_bad_input.py",
    ),
    Mutation(
        "a backend that cannot run is refused",
        "            if reason is None:\n                continue",
        "            if True:\n                continue",
        "tests/test_attention.py -k refused",
    ),
    Mutation(
        "torch's kernels take no sites",
        'and (self.numerics != "hardware" or self.sites)',
        'and self.numerics != "hardware"',
        "tests/test_plan.py",
    ),
    Mutation(
        "a backend refuses a site that it has not",
        "if backend not in declared.backends and value != declared.elsewhere:",
        "if backend == name:",
        "tests/test_sites.py -k refuses",
    ),
    Mutation(
        "an unknown field is refused",
        "(unknown := sorted(content.keys() - hints.keys()))",
        "(unknown := [])",
        "tests/test_config.py tests/test_bad_input.py",
    ),
    Mutation(
        "a user's error is exit code 2",
        "raise SystemExit(2)",
        "raise SystemExit(1)",
        "tests/test_bad_input.py tests/test_errors.py",
    ),
]
ALL = [*SITES, *KERNELS, *ROUNDING, *DISPATCH, *RECORDING, *RESUME, *REFUSALS]


def product_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines() if not line.startswith(("tests/", "experiments/"))]


def find(mutation: Mutation, files: list[Path]) -> list[Path]:
    """Files that hold ``old``, once for each time."""
    return [file for file in files for _ in range((ROOT / file).read_text().count(mutation.old))]


def copied(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not name.startswith("experiments/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def passes(folder: Path, mutation: Mutation, *, interpreted: bool) -> bool:
    """Whether the tests of a mutation pass in a copy, in a process that has torch already; one test at least must have run."""
    log = folder / "pytest.log"
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.remove(str(ROOT / "tests"))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if interpreted else "0"}
        arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *shlex.split(mutation.tests)]
        skipped = ["--deselect", "tests/test_sites.py::test_the_kernels_in_tritons_interpreter"]
        os._exit(int(pytest.main([*arguments, *skipped])))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with {code}: {log.read_text()[-300:]!r}")
    return code == 0


def survives(folder: Path, mutation: Mutation) -> bool:
    ways = (True,) if mutation.kernel else (False, True) if "test_sites" in mutation.tests else (False,)
    return all(passes(folder, mutation, interpreted=way) for way in ways)


def run(chosen: list[Mutation], places: dict[str, list[Path]]) -> list[str]:
    """One line a mutation, in a copy of the repository."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        for mutation in chosen:
            if len(places[mutation.name]) != 1:
                lines.append(f"does not apply  {mutation.name}")
                continue
            began = time.monotonic()
            path = folder / places[mutation.name][0]
            original = path.read_text()
            path.write_text(original.replace(mutation.old, mutation.new))
            try:
                outcome = "NOT CAUGHT" if survives(folder, mutation) else "caught"
            except RuntimeError as error:
                outcome = f"NOT RUN: {error}"
            path.write_text(original)
            lines.append(f"{outcome:14}  {mutation.name}  [{places[mutation.name][0]}; {mutation.tests}]")
            print(f"{lines[-1]}  {time.monotonic() - began:.0f} s", flush=True)
    return lines


def kept(names: set[str]) -> list[str]:
    """Lines of the last report about mutations that are not run now."""
    lines = REPORT.read_text().splitlines()[2:] if REPORT.exists() else []
    return [line for line in lines if line[16:].partition("  [")[0] in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [mutation for mutation in ALL if arguments.only in mutation.name]
    files = product_files()
    places = {mutation.name: find(mutation, files) for mutation in chosen}
    lost = [f"{name}: found {len(where)} times" for name, where in places.items() if len(where) != 1]
    print("\n".join(lost) or f"all {len(chosen)} apply")
    if arguments.dry:
        return bool(lost)
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / str(job) for job in range(arguments.jobs)]
        for job, part in enumerate(parts):
            if os.fork() == 0:
                part.write_text("\n".join(run(chosen[job :: arguments.jobs], places)))
                os._exit(0)
        for _ in parts:
            os.wait()
        lines = sorted(line for part in parts for line in part.read_text().splitlines())
    rows = kept({mutation.name for mutation in ALL} - set(places)) + lines
    caught = sum(row.startswith("caught") for row in rows)
    REPORT.write_text("\n".join([f"{caught} of {len(ALL)} mutations caught", "", *sorted(rows)]) + "\n")
    print(
        f"{sum(line.startswith('caught') for line in lines)} of {len(chosen)} caught now; {REPORT}: {caught} of {len(ALL)}"
    )
    return caught != len(ALL)


if __name__ == "__main__":
    raise SystemExit(main())
