# ruff: noqa
"""Digests of a GPT-2 step's matrix products (32 x 1,024 tokens) by cuBLAS and by one Triton kernel with fixed tiles, to compare kinds of GPU."""

import hashlib, torch, triton, triton.language as tl


@triton.jit
def product(a, b, c, M, N, K, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, K, BK):
        x = tl.load(
            a + m[:, None] * sam + (i + k)[None, :] * sak, mask=(m < M)[:, None] & (i + k < K)[None, :], other=0.0
        )
        y = tl.load(
            b + (i + k)[:, None] * sbk + n[None, :] * sbn, mask=(i + k < K)[:, None] & (n < N)[None, :], other=0.0
        )
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def fixed(a, b, dtype):
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=dtype)
    product[(triton.cdiv(M, 128), triton.cdiv(N, 128))](
        a,
        b,
        c,
        M,
        N,
        K,
        *a.stride(),
        *b.stride(),
        BM=128,
        BN=128,
        BK=64,
        num_warps=8,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return c


digest = lambda t: hashlib.sha256(t.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]
print("#", torch.cuda.get_device_name(), torch.__version__, triton.__version__)
T = 32 * 1024
for name, M, N, K in (
    ("qkv", T, 2304, 768),
    ("proj", T, 768, 768),
    ("up", T, 3072, 768),
    ("down", T, 768, 3072),
    ("head", 8192, 50304, 768),
    ("dW qkv", 768, 2304, T),
    ("dW up", 768, 3072, T),
    ("dW head", 50304, 768, 8192),
):
    g = torch.Generator().manual_seed(M + N + K)
    a = torch.randn(M, K, generator=g).bfloat16().cuda()
    b = torch.randn(K, N, generator=g).bfloat16().cuda()
    for dtype in (torch.bfloat16, torch.float32):
        blas = torch.mm(a, b) if dtype == torch.bfloat16 else torch.mm(a, b, out_dtype=dtype)
        tiles = fixed(a, b, dtype)
        print(
            name,
            str(dtype)[6:],
            "cublas",
            digest(blas),
            "fixed",
            digest(tiles),
            "largest difference",
            f"{(blas.float() - tiles.float()).abs().max().item():.3g}",
            flush=True,
        )
