"""GPT-2 (Radford et al. 2019) with the parameter names of nanoGPT. Off by default: what a Llama changes in it, and stabilizers.

How attention is computed and rounded is not decided here: each layer hands q, k, v and its plan to ``attention.run``.

Shape suffixes: B batch, T positions, C width (n_embd), H heads, D head width (C / H), V vocabulary (padded), L layers.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention import LayerPlan, dispatch
from attention.watching.measure import largest_logits
from errors import check_size, check_types, invalid
from fused.embedding import lookup
from fused.gelu import gelu
from fused.linear_cross_entropy import linear_cross_entropy

Position = Literal["learned", "rotary", "none"]
Norm = Literal["layer", "rms"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]
RotaryTable = Literal["fp32", "bf16"]
Operators = Literal["torch", "own"]
"""What computes everything but attention: plain torch, or the operators of ``fused/``."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the network and its stabilizers. Raises ``UserError`` for a value that no network can have."""

    n_layer: int = 12
    """Transformer blocks."""
    n_head: int = 12
    """Attention heads a block; divides n_embd."""
    n_kv_head: int = 0
    """Heads of keys and values, each shared by n_head / n_kv_head heads of queries (Ainslie et al. 2023); 0: n_head."""
    n_embd: int = 768
    """Width of the residual stream."""
    block_size: int = 1024
    """Longest sequence, in tokens."""
    vocab_size: int = 50257
    """Tokens of the vocabulary."""
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this (50257 -> 50304); 1 pads nothing."""
    bias: bool = False
    """Biases in linear layers and layer norms, as OpenAI's GPT-2 has them."""
    position: Position = "learned"
    """learned: an embedding of positions; rotary: q and k rotated by their position (Su et al. 2021), features d and d + D / 2 a pair, as
    in Llama; none: neither."""
    rotary_base: float = 10_000.0
    """Pair d rotates by rotary_base^(-2 d / D) radians a position."""
    rotary_table: RotaryTable = "fp32"
    """Format of the rotation's cosines and sines; bf16: as in a Hugging Face Llama in BF16. q and k are rotated in FP32, rounded once."""
    norm: Norm = "layer"
    """layer: LayerNorm; rms: RMSNorm (Zhang & Sennrich 2019), without biases. Both in FP32, eps 1e-5."""
    activation: Activation = "gelu"
    """gelu: exact (nanoGPT); gelu_tanh: its tanh approximation (OpenAI's GPT-2); swiglu: silu(W_g x) * W_1 x (Shazeer 2020), 8 / 3 as wide
    inside as outside, rounded up to a multiple of 64."""
    tie_embeddings: bool = True
    """One matrix for token embedding and output head (Press & Wolf 2017)."""
    qk_norm: bool = False
    """Norm (of the kind of ``norm``) over D of q and k in every head, before any rotation, one gain [D] for all (Henry et al. 2020; this
    form: Dehghani et al. 2023)."""
    attention_softcap: float = 0.0
    """Attention logits become cap * tanh(logit / cap) (Gemma 2: 50); 0 is off."""
    gated_attention: bool = False
    """o * sigmoid(W x), elementwise, before the output projection, x the block's normed input (arXiv 2505.06708, position G1)."""
    qk_clip_tau: float = 0.0
    """After a step, heads whose largest logit passed this are scaled back to it (Kimi K2: 100); 0 is off."""

    def __post_init__(self) -> None:
        check_types("model", self)
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "vocab_multiple"):
            check_size(f"model.{name}", getattr(self, name), 1)
        if self.n_embd % self.n_head:
            raise invalid("model.n_head", self.n_head, f"a divisor of model.n_embd = {self.n_embd}")
        check_size("model.n_kv_head", self.n_kv_head, 0)
        if self.n_head % self.kv_heads:
            raise invalid(
                "model.n_kv_head", self.n_kv_head, f"a divisor of model.n_head = {self.n_head}, or 0 for as many"
            )
        if self.position == "rotary" and self.head_width % 2:
            expected = f"learned or none with an odd head width n_embd / n_head = {self.head_width}"
            raise invalid("model.position", self.position, expected)
        if not (self.rotary_base > 0 and math.isfinite(self.rotary_base)):
            raise invalid("model.rotary_base", self.rotary_base, "a finite number above 0")
        for name in ("attention_softcap", "qk_clip_tau"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise invalid(f"model.{name}", value, "a finite number of at least 0 (0 is off)")
        if self.qk_norm and self.qk_clip_tau:
            expected = "0 together with model.qk_norm = True: a norm undoes any scaling of W_q and W_k"
            raise invalid("model.qk_clip_tau", self.qk_clip_tau, expected)
        if self.qk_clip_tau and self.features:
            expected = "0 together with model.n_kv_head: it scales the keys of one head of queries"
            raise invalid("model.qk_clip_tau", self.qk_clip_tau, expected)

    @property
    def padded_vocab_size(self) -> int:
        """V: rows of the embedding and columns of the logits."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def features(self) -> tuple[str, ...]:
        """What attention must be able to do, of ``attention.numerics.FEATURES``."""
        return ("grouped",) if self.kv_heads < self.n_head else ()


def make_norm(config: ModelConfig, width: int, bias: bool) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-5) if config.norm == "rms" else nn.LayerNorm(width, bias=bias)


class Rotary(nn.Module):
    """Rotates the pair of features (d, d + D / 2) of position t by t * base^(-2 d / D), in FP32 (arXiv 2104.09864)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D = config.head_width
        rate = config.rotary_base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        angle_T1E = torch.arange(config.block_size, dtype=torch.float64)[:, None, None] * rate
        table = torch.bfloat16 if config.rotary_table == "bf16" else torch.float32
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angle_T1E.cos().to(table).float(), persistent=False)
        self.register_buffer("sin", angle_T1E.sin().to(table).float(), persistent=False)

    def forward(self, x_BTHD: Tensor, inverse: bool = False) -> Tensor:
        """x [B, T, H, D] rotated, or rotated back, in its dtype."""
        T = x_BTHD.shape[1]
        cos, sin = self.cos[:T], -self.sin[:T] if inverse else self.sin[:T]
        a, b = x_BTHD.chunk(2, dim=-1)  # products with the table are in FP32, its dtype
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BTHD)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention: everything around q, k, v -> o, which is ``attention.run``'s.

    ``c_attn`` rows are [W_q; W_k; W_v], the D rows of a head lie together inside each; k and v may have fewer heads, HK. While training
    with ``qk_clip_tau``, ``max_logit_H`` keeps each head's largest logit until ``training.qk_clip`` reads it.
    """

    def __init__(self, config: ModelConfig, plan: LayerPlan):
        super().__init__()
        C, D = config.n_embd, config.head_width
        self.plan = plan
        self.heads = [config.n_head, config.kv_heads, config.kv_heads]
        self.softcap = config.attention_softcap
        self.tracks_logits = config.qk_clip_tau > 0
        self.c_attn = nn.Linear(C, sum(self.heads) * D, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.q_norm = make_norm(config, D, bias=False) if config.qk_norm else None
        self.k_norm = make_norm(config, D, bias=False) if config.qk_norm else None
        self.rotary = Rotary(config) if config.position == "rotary" else None
        self.gate = nn.Linear(C, C, bias=config.bias) if config.gated_attention else None
        self.max_logit_H: Tensor  # every rank's own
        self.register_buffer("max_logit_H", torch.full((config.n_head,), -math.inf), persistent=False)

    def forward(self, x_BTC: Tensor, rounding_seed: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]; ``rounding_seed`` int64 [] on the same device."""
        B, T, C = x_BTC.shape
        # Split by heads, as the kernels return their gradients: a compiler then sees that joining them takes no copy.
        fused_BTFD = self.c_attn(x_BTC).view(B, T, sum(self.heads), C // self.heads[0])
        q_BTHD, k_BTHD, v_BTHD = fused_BTFD.split(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            # In float32: autocast does so for layer norms only. Attention takes one dtype for q, k and v.
            normed = self.q_norm(q_BTHD.float()), self.k_norm(k_BTHD.float())
            q_BTHD, k_BTHD = (x.type_as(v_BTHD) for x in normed)
        if self.rotary is not None:
            q_BTHD, k_BTHD = self.rotary(q_BTHD), self.rotary(k_BTHD)
        if self.tracks_logits and self.training:
            with torch.no_grad():
                logits_H = largest_logits(q_BTHD, k_BTHD, scale=q_BTHD.shape[-1] ** -0.5)
                self.max_logit_H.copy_(torch.maximum(self.max_logit_H, logits_H))
        o_BTHD = self.attend(q_BTHD, k_BTHD, v_BTHD, rounding_seed)
        o_BTC = o_BTHD.reshape(B, T, C)
        if self.gate is not None:
            o_BTC = o_BTC * torch.sigmoid(self.gate(x_BTC))
        return self.project(o_BTC)

    def attend(self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, rounding_seed: Tensor) -> Tensor:
        """o [B, T, H, D]. ``probes.capture`` puts a recorder in this method's place for one pass."""
        return dispatch.run(q_BTHD, k_BTHD, v_BTHD, self.plan, rounding_seed=rounding_seed, softcap=self.softcap)

    def project(self, o_BTC: Tensor) -> Tensor:
        """W_o o. Where the plan leaves o in float32, autocast would round it on the way in, so it is projected in float32."""
        if o_BTC.dtype != torch.float32:
            return self.c_proj(o_BTC)
        with torch.autocast(o_BTC.device.type, enabled=False):
            return self.c_proj(o_BTC)


def _gelu_tanh(h: Tensor) -> Tensor:
    return functional.gelu(h, approximate="tanh")


class MLP(nn.Module):
    """W_2 gelu(W_1 x), four times as wide inside; or SwiGLU, W_2 (silu(W_g x) * W_1 x), which has about as many parameters."""

    def __init__(self, config: ModelConfig, operators: Operators):
        super().__init__()
        exact = functional.gelu if operators == "torch" else gelu
        self.activate = exact if config.activation == "gelu" else _gelu_tanh
        gated = config.activation == "swiglu"
        width = -(-8 * config.n_embd // (3 * 64)) * 64 if gated else 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, width, bias=config.bias)
        self.c_gate = nn.Linear(config.n_embd, width, bias=config.bias) if gated else None
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        if self.c_gate is not None:
            return self.c_proj(functional.silu(self.c_gate(x_BTC)) * self.c_fc(x_BTC))
        return self.c_proj(self.activate(self.c_fc(x_BTC)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, operators: Operators):
        super().__init__()
        self.ln_1 = make_norm(config, config.n_embd, config.bias)
        self.attn = CausalSelfAttention(config, plan)
        self.ln_2 = make_norm(config, config.n_embd, config.bias)
        self.mlp = MLP(config, operators)

    def forward(self, x_BTC: Tensor, rounding_seed: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), rounding_seed)
        return x_BTC + self.mlp(self.ln_2(x_BTC))


class Transformer(nn.Module):
    """Embeddings, blocks and the last norm: tokens -> [B, T, C]."""

    def __init__(self, config: ModelConfig, plans: tuple[LayerPlan, ...], operators: Operators):
        super().__init__()
        self.look_up = functional.embedding if operators == "torch" else lookup
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.h = nn.ModuleList(Block(config, plan, operators) for plan in plans)
        self.ln_f = make_norm(config, config.n_embd, config.bias)

    def forward(self, tokens_BT: Tensor, rounding_seed: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, C]."""
        x_BTC = self.look_up(tokens_BT, self.wte.weight)
        if self.wpe is not None:
            x_BTC = x_BTC + self.wpe.weight[: tokens_BT.shape[1]]
        for block in self.h:
            x_BTC = block(x_BTC, rounding_seed)
        return self.ln_f(x_BTC)


class GPT(nn.Module):
    """GPT-2 language model. Call ``initialize`` (or load weights) before use.

    ``operators`` other than torch's change last bits.
    Raises ``ValueError`` when ``plans`` does not hold one plan for every layer.
    """

    def __init__(self, config: ModelConfig, plans: tuple[LayerPlan, ...], operators: Operators = "torch"):
        super().__init__()
        self.operators = operators
        if len(plans) != config.n_layer:
            raise ValueError(f"{len(plans)} attention plans for {config.n_layer} layers")
        self.config = config
        self.transformer = Transformer(config, plans, operators)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, rounding_seed: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits [B, T, V] of every position and, given targets, the loss (see ``loss``). Training with operators other than torch's
        keeps no logits: None.

        ``tokens_BT``, ``targets_BT`` int64; ``rounding_seed`` int64 [] seeds stochastic rounding (none given: 0);
        ``attention.run`` keeps layers apart. Raises ``UserError`` for sequences beyond block_size.
        """
        T = tokens_BT.shape[1]
        if self.config.block_size < T:
            raise invalid("data.sequence_length", T, f"at most model.block_size = {self.config.block_size}")
        if rounding_seed is None:
            rounding_seed = torch.zeros((), dtype=torch.int64, device=tokens_BT.device)
        x_BTC = self.transformer(tokens_BT, rounding_seed)
        if self.operators != "torch" and self.training and targets_BT is not None:
            return None, self.fused_loss(x_BTC, targets_BT)
        logits_BTV = self.lm_head(x_BTC)
        return logits_BTV, None if targets_BT is None else self.loss(logits_BTV, targets_BT)

    def loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats over targets other than -1, float32 [].

        The columns that pad the vocabulary take part in the softmax, as in nanoGPT: they are never a target and training pushes them down.
        """
        return functional.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=-1)

    def fused_loss(self, x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        """``loss`` of the head applied to x, without keeping logits."""
        device = x_BTC.device.type
        if torch.is_autocast_enabled(device):
            x_BTC = x_BTC.to(torch.get_autocast_dtype(device))
        return linear_cross_entropy(x_BTC.flatten(0, 1), self.lm_head.weight, targets_BT.flatten())

    def attentions(self) -> list[CausalSelfAttention]:
        return [cast(Block, block).attn for block in self.transformer.h]

    def set_plans(self, plans: tuple[LayerPlan, ...]) -> None:
        """Give every layer its plan, from the next forward pass on. A compiled model notices by its guards and recompiles."""
        for attention, plan in zip(self.attentions(), plans, strict=True):
            if attention.plan != plan:
                attention.plan = plan

    def w_q(self, layer: int) -> Tensor:
        """W_q of a layer (0-based), [C, C], a view of ``c_attn.weight``; rows h * D .. (h + 1) * D are head h."""
        return self.attentions()[layer].c_attn.weight[: self.config.n_embd]

    def w_k(self, layer: int) -> Tensor:
        """W_k of a layer, [HK * D, C], as ``w_q``."""
        rows = self.config.kv_heads * self.config.head_width
        return self.attentions()[layer].c_attn.weight[self.config.n_embd :][:rows]

    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, sequence_length: int) -> int:
        """Forward and backward operations a token: 6 N + 12 L H D T (PaLM, arXiv 2204.02311, appendix B).

        N leaves out look-up tables; a tied one is a matrix product, too.
        """
        tables = 0 if self.transformer.wpe is None else self.transformer.wpe.weight.numel()
        tables += 0 if self.config.tie_embeddings else self.transformer.wte.weight.numel()
        attention = 12 * self.config.n_layer * self.config.n_embd * sequence_length
        return 6 * (self.num_parameters() - tables) + attention


@torch.no_grad()
def initialize(model: GPT, seed: int) -> None:
    """GPT-2's initialization: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2 L)), gains 1, biases 0.

    Every parameter is drawn on the CPU in float32 from a generator of its own, seeded by (seed, name): no parameter depends
    on the device, the number of processes, the attention plan or which other parameters there are.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            deviation = 0.02 / math.sqrt(2 * model.config.n_layer) if name.endswith("c_proj.weight") else 0.02
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.normal_(0.0, deviation, generator=generator))
