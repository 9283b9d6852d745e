"""Run public test suites against the installed package. By hand: docs/huggingface.md has the counts of the last time.

    pip install pytest parameterized einops transformers==VERSION
    python scripts/public_suites.py transformers CHECKOUT       # of VERSION: models that name no attention have ours
    python scripts/public_suites.py flash-attention CHECKOUT    # flash_attn_func is ours

Prints how many tests passed, failed and were skipped, and why they failed.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from low_precision_attention import huggingface, scaled_dot_product_attention
from torch import Tensor
from torch.overrides import TorchFunctionMode

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2"]


def attention_by_default() -> None:
    """Models of transformers that ask for no attention have ours."""
    from transformers import PreTrainedModel

    name, choose = huggingface.register(), PreTrainedModel.get_correct_attn_implementation

    def choose_ours(model: Any, asked: str | None, *arguments: Any, **settings: Any) -> Any:
        return choose(model, name if asked is None else asked, *arguments, **settings)

    PreTrainedModel.get_correct_attn_implementation = choose_ours  # type: ignore[method-assign,assignment]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attention's function of [batch, time, heads, head dim]; its masks are aligned to the last query and key."""
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes: expected None")
    (left, right), mask = (int(x) for x in window_size), None
    right = 0 if causal else right
    if left >= 0 or right >= 0:
        distance = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None]
        distance = distance - k.shape[1] + q.shape[1]
        mask = torch.ones_like(distance, dtype=torch.bool)
        mask &= distance <= right if right >= 0 else mask
        mask &= distance >= -left if left >= 0 else mask
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    settings: dict[str, Any] = {"scale": softmax_scale, "enable_gqa": True, "softcap": softcap}
    o = scaled_dot_product_attention(*heads_first, mask, dropout_p, **settings).transpose(1, 2)
    return (o, None, None) if return_attn_probs else o


def put_in_place_of_flash_attn() -> None:
    names = {
        "flash_attn": ["kvpacked_func", "qkvpacked_func", "varlen_func", "varlen_kvpacked_func", "with_kvcache"],
        "flash_attn.bert_padding": ["pad_input", "unpad_input"],
        "flash_attn.flash_attn_interface": ["_get_block_size_n", "USE_TRITON_ROCM"],
        "flash_attn.layers": [],
        "flash_attn.layers.rotary": ["apply_rotary_emb"],
    }
    names["flash_attn"] = [f"flash_attn_{name}" for name in (*names["flash_attn"], "varlen_qkvpacked_func")]
    for module, contents in names.items():
        sys.modules[module] = ModuleType(module)
        vars(sys.modules[module]).update(dict.fromkeys(contents))
    vars(sys.modules["flash_attn"])["flash_attn_func"] = flash_attn_func


class Grid:
    """One test's cases without what we refuse, each so many-th; "cuda" is the CPU where there is no GPU."""

    def __init__(self, every: int, longest: int) -> None:
        self.every, self.longest = every, longest

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        def wanted(item: Any) -> bool:
            case = item.callspec.params if hasattr(item, "callspec") else {}
            off = not any(case.get(name, True) for name in ("dropout_p", "alibi", "deterministic", "kvpacked"))
            return off and max(case["seqlen_q"], case["seqlen_k"]) <= self.longest

        items[:] = [item for item in items if item.originalname == "test_flash_attn_output" and wanted(item)]
        items[:] = items[:: self.every]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        if torch.cuda.is_available():
            return (yield)
        with OnCpu():
            return (yield)


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return function(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", choices=("transformers", "flash-attention"))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--families", nargs="*", default=FAMILIES, help="transformers: model folders")
    parser.add_argument("--every", type=int, default=1, help="flash-attention: run each so many-th case")
    parser.add_argument("--longest", type=int, default=2048, help="flash-attention: of cases up to this length")
    options = parser.parse_args()
    if not options.checkout.is_dir():
        parser.exit(2, f"error: checkout = {str(options.checkout)!r}: expected a folder\n")
    plugins: list[Any] = []
    if options.suite == "transformers":
        attention_by_default()
        tests = [f"tests/models/{family}/test_modeling_{family}.py" for family in options.families]
        tests += ["-k", "not fsdp2 and not test_tp and not test_ep"]  # these start processes that do not know of ours
    else:
        put_in_place_of_flash_attn()
        if not torch.cuda.is_available():
            torch.cuda.get_device_capability = lambda device=None: (9, 0)
            torch.cuda.get_device_properties = lambda device=None: argparse.Namespace(total_memory=2**40)  # type: ignore[assignment,return-value]
        plugins = [Grid(options.every, options.longest)]
        tests = ["tests/test_flash_attn.py"]
    os.chdir(options.checkout)
    os.environ["COLUMNS"] = "240"  # room for the reasons in pytest's summary
    quiet = ["-q", "--tb=short", "-rfE", "--no-header", "-p", "no:cacheprovider"]
    code = pytest.main([*quiet, *tests], plugins=plugins)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # nothing was tested
        sys.exit(int(code))


if __name__ == "__main__":
    main()
