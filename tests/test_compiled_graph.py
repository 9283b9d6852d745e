"""What torch.compile makes of attention: the gradient of the fused projection takes no copy."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from attention import AttentionConfig, AttentionSpec
from model import CausalSelfAttention, ModelConfig

ops = pytest.importorskip("attention.triton.ops")


class Watch(CustomGraphPass):
    """Notes the names of all operators that are left once torch.compile has rewritten a graph."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

    def uuid(self) -> None:
        return None  # never from a cache: the graph must pass by here


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_gradients_of_q_k_and_v_are_joined_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(n_layer=2, n_head=4, n_embd=64, block_size=64, vocab_size=256)
    plan = AttentionConfig(default=AttentionSpec(preset="flash")).resolve(config.n_layer, config.n_head)[0]
    layer = CausalSelfAttention(config, plan)
    monkeypatch.setattr(ops, "launch_forward", lambda q, k, v, seed, n, *_: ops.empty_outputs(q, n))
    monkeypatch.setattr(ops, "launch_backward", lambda do, q, k, *_: ops.empty_gradients(q, k).zero_())
    # In the kernels' place, tensors of their outputs' shapes: only the graph around them matters.
    watch = Watch()
    x_BTC = torch.randn(2, 16, config.n_embd, requires_grad=True)
    torch.compiler.reset()
    with (
        mock.patch.object(torch._inductor.config, "post_grad_custom_post_pass", watch),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        torch.compile(layer)(x_BTC, torch.tensor(0)).sum().backward()
    (backward,) = [names for names in watch.graphs if any("flash_backward" in name for name in names)]
    assert "aten.cat.default" not in backward
