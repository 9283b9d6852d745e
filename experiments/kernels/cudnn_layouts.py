"""torch's default attention and dO's memory layout: errors of dQ, dK, dV against FP64, ways out, and models of three layers (a GPU)."""

import contextlib, torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


def layouts(o, kind, g):
    B, H, T, D = o.shape
    if kind == "BHTD":
        return torch.randn(B, H, T, D, device="cuda", dtype=o.dtype, generator=g)
    return torch.randn(B, T, H, D, device="cuda", dtype=o.dtype, generator=g).transpose(1, 2)


def error(q, k, v, dO, got):
    q6, k6, v6 = (x.detach().double().requires_grad_() for x in (q, k, v))
    T, D = q.shape[-2:]
    s = q6 @ k6.transpose(-1, -2) / D**0.5
    s = s.masked_fill(torch.ones(T, T, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    (s.softmax(-1) @ v6).backward(dO.double())
    return [float((a.double() - b.grad).norm() / b.grad.norm()) for a, b in zip(got, (q6, k6, v6))]


def series(name, T, orders, function=sdpa, contiguous=False, in_layout="BHTD"):
    g = torch.Generator("cuda").manual_seed(0)
    for n, kind in enumerate(orders):
        if in_layout == "BHTD":
            q, k, v = (
                torch.randn(2, 4, T, 64, device="cuda", dtype=torch.bfloat16, generator=g).requires_grad_()
                for _ in range(3)
            )
        else:
            q, k, v = (
                torch.randn(2, T, 4, 64, device="cuda", dtype=torch.bfloat16, generator=g)
                .transpose(1, 2)
                .requires_grad_()
                for _ in range(3)
            )
        o = function(q, k, v, is_causal=True)
        dO = layouts(o, kind, g)
        got = torch.autograd.grad(o, (q, k, v), dO.contiguous() if contiguous else dO)
        print(
            f"{name},{T},{n + 1},{in_layout},{kind},{','.join(f'{e:.2e}' for e in error(q, k, v, dO, got))},{'x'.join(map(str, o.stride()))}",
            flush=True,
        )


print(torch.__version__, torch.backends.cudnn.version(), torch.cuda.get_device_name())
A, B = ["BHTD", "BTHD", "BHTD"], ["BTHD", "BHTD", "BTHD"]
series("default", 320, A)
series("default", 352, B)
series("default", 416, A, in_layout="BTHD")
series("default", 480, B, in_layout="BTHD")
series("contiguous dO", 512, A, contiguous=True)
series("contiguous dO", 544, B, contiguous=True)
series("contiguous dO", 528, A, contiguous=True, in_layout="BTHD")
torch.backends.cuda.enable_cudnn_sdp(False)
series("cudnn off", 608, A)
series("cudnn off", 640, B)
torch.backends.cuda.enable_cudnn_sdp(True)
# A compiled function, and a compiled two-layer model whose second half hands back another layout.
compiled = torch.compile(lambda q, k, v, is_causal: sdpa(q, k, v, is_causal=is_causal))
series("compiled function", 672, A, compiled)
series("compiled function", 736, B, compiled)


class Attention(torch.nn.Module):
    def __init__(self, fold):
        super().__init__()
        self.fold = fold
        self.qkv = torch.nn.Linear(256, 768, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, 4, 64).transpose(1, 2) for t in self.qkv(x).split(256, -1))
        o = sdpa(q, k, v, is_causal=True)
        if self.fold == "transpose":
            return x + o.transpose(1, 2).reshape(B, T, C)
        if self.fold == "heads":
            return x + o.sum(1).repeat(1, 1, 4)
        return x + o.reshape(B, 4 * T, 64).reshape(
            B, T, C
        )  # wrong mixing of axes, but a dO that is [B, H, T, D] in memory


def model(name, T, folds, compile_it):
    torch.manual_seed(0)
    m = torch.nn.Sequential(*[Attention(f) for f in folds]).cuda().bfloat16()
    f = torch.compile(m) if compile_it else m
    x = torch.randn(2, T, 256, device="cuda", dtype=torch.bfloat16)

    def grads(g):
        m.zero_grad()
        g(x).float().pow(2).mean().backward()
        return [p.grad.float().clone() for p in m.parameters()]

    got = grads(f)
    torch.backends.cuda.enable_cudnn_sdp(False)
    want = grads(m)
    torch.backends.cuda.enable_cudnn_sdp(True)
    print(
        f"model {name},{T},{'compiled' if compile_it else 'eager'},{' '.join(folds)},{','.join(f'{float((a - b).norm() / b.norm()):.2e}' for a, b in zip(got, want))}",
        flush=True,
    )


T = 768
for c in (False, True):
    for folds in (
        ["transpose"] * 3,
        ["transpose", "plain", "transpose"],
        ["plain", "transpose", "plain"],
        ["heads", "transpose", "heads"],
    ):
        T += 32
        with contextlib.suppress(RuntimeError):
            model("three layers", T, folds, c)
