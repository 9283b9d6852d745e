"""quack-kernels beside what the repository does, at GPT-2's shapes. Run with the repository as the current directory and in PYTHONPATH.

    python3 bench_quack.py --out DIR [--total 150] [--only lce,act,res,mm,sustained]
    python3 bench_quack.py --compile-only    # without a GPU: fills QUACK_CACHE_DIR with kernels for sm_90a

Each result is a line of DIR/quack.jsonl. An error that breaks the CUDA context restarts this program without what is done.
"""

from __future__ import annotations

import argparse, faulthandler, gc, glob, json, math, os, signal, statistics, sys, time, traceback  # noqa: E401

SITE = os.environ.get("QUACK_SITE", "site-packages")
for _path in (SITE, f"{SITE}/nvidia_cutlass_dsl/dsl_packages"):  # a .pth file in a --target folder is not read
    if os.path.isdir(_path) and _path not in sys.path:
        sys.path.insert(0, _path)
sys.path.insert(0, os.getcwd())
COMPILE_ONLY = "--compile-only" in sys.argv
if COMPILE_ONLY:
    os.environ.update(QUACK_ARCH="90", CUTE_DSL_ARCH="sm_90a", CUDA_VISIBLE_DEVICES="")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Kernels compiled ahead lie there.
os.environ.setdefault("QUACK_CACHE_DIR", f"{SITE}/quack_cache")

import torch  # noqa: E402

DEVICE = "cpu" if COMPILE_ONLY else "cuda"
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
N, C, F, V = (int(x) for x in os.environ.get("QUACK_SHAPE", "32768,768,3072,50304").split(","))


class OutOfTime(Exception):
    pass


class State:
    began = time.time()
    total = 150.0
    out = "."
    done: set[str] = set()
    rounds = 20

    def left(self) -> float:
        return self.total - (time.time() - float(os.environ.get("QUACK_BEGAN", self.began)))


S = State()


def emit(row: dict) -> None:
    row = {"t": round(S.total - S.left(), 1), **row}
    text = json.dumps(row, default=str)
    print(text, flush=True)
    if not COMPILE_ONLY:
        with open(os.path.join(S.out, "quack.jsonl"), "a") as f:
            f.write(text + "\n")


def healthy() -> bool:
    if COMPILE_ONLY:
        return True
    try:
        torch.cuda.synchronize()
        return True
    except Exception:
        return False


def attempt(name: str, function, *args, seconds: float = 30.0):
    """Call it within its time; an error is a row. Restarts where the context is broken."""
    if S.left() < 2 or name in S.done:
        emit({"skipped": name})
        return None

    def alarm(*_):
        raise OutOfTime(f"{name}: more than {seconds} s")

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, min(seconds if not COMPILE_ONLY else 600, max(1.0, S.left())))
    result = None
    try:
        result = function(*args)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = traceback.format_exc().strip().splitlines()
        emit({"failed": name, "error": f"{type(error).__name__}: {str(error)[:300]}", "trace": lines[-7:]})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not healthy():
        emit({"restart_after": name})
        S.done.add(name)
        os.environ["QUACK_DONE"] = ";".join(sorted(S.done))
        os.environ.setdefault("QUACK_BEGAN", str(S.began))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    return result


def relative(a, b) -> float:
    b = b.to(F64)
    return ((a.to(F64) - b).norm() / b.norm()).item()


def events(functions: dict, rounds: int, repeat: int = 1) -> dict:
    """Medians of interleaved rounds, ms a call, with the range."""
    times = {name: [] for name in functions}
    for r in range(rounds + 3):
        for name, f in functions.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(repeat):
                f()
            b.record()
            if r >= 3:
                times[name].append((a, b))
        if r % 4 == 3:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    out = {}
    for name, pairs in times.items():
        ms = sorted(a.elapsed_time(b) / repeat for a, b in pairs)
        out[name] = {"ms": round(statistics.median(ms), 4), "p10": round(ms[len(ms) // 10], 4), "p90": round(ms[-1 - len(ms) // 10], 4)}
    return out


def quick(f, n: int = 6) -> float:
    for _ in range(2):
        f()
    pairs = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        pairs.append((a, b))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def same_bits(f) -> bool:
    """f() returns tensors: two runs, equal bits."""
    one = [t.clone() for t in f()]
    two = f()
    return all(torch.equal(a, b) for a, b in zip(one, two))


def randn(*shape, std=1.0, dtype=BF16, seed=0):
    if COMPILE_ONLY:
        return torch.empty(*shape, dtype=dtype)
    g = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, device=DEVICE, generator=g) * std).to(dtype)


def empty(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


# ---- quack: kernels and their configs

# (tile_M, tile_N, pingpong, cluster_M, cluster_N)
PP, CO = True, False
WIDE = [
    (128, 192, PP, 2, 1),  # quack's default
    (256, 128, CO, 2, 1),
    (256, 192, CO, 2, 1),
    (128, 256, CO, 2, 1),
    (256, 192, CO, 1, 2),
    (192, 128, PP, 1, 2),
    (128, 160, PP, 2, 1),
]
EPI = [(128, 192, PP, 2, 1), (128, 128, PP, 2, 1), (256, 128, CO, 2, 1), (256, 192, CO, 2, 1), (192, 128, PP, 1, 2), (128, 160, PP, 2, 1)]
MODS: dict = {}


def mods() -> dict:
    if MODS:
        return MODS
    from quack.activation import dgelu_erf, dgelu_tanh_approx
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.library import dact_mod, identity_epi, linear_act_mod

    @gemm_epilogue()
    def dgelu_erf_alone(acc, c):
        dx, out = dgelu_erf(c, acc)
        return {"D": dx}

    @gemm_epilogue()
    def dgelu_tanh_alone(acc, c):
        dx, out = dgelu_tanh_approx(c, acc)
        return {"D": dx}

    @gemm_epilogue()
    def add_c(acc, c):
        return {"D": acc + c}

    def act(name):
        return linear_act_mod(name, gated=False, has_c=False, has_rowvec=False, has_colvec=False, sr=False, has_alpha=False)

    MODS.update(
        mm=identity_epi,
        add=add_c,
        act_erf=act("gelu_erf"),
        act_tanh=act("gelu_tanh_approx"),
        dact_erf=dact_mod("gelu_erf"),
        dact_tanh=dact_mod("gelu_tanh_approx"),
        dact_erf_alone=dgelu_erf_alone,
        dact_tanh_alone=dgelu_tanh_alone,
    )
    return MODS


def gemm(mod, A, B, D, Cin=None, config=WIDE[0], swizzle=8, **more):
    """D = epilogue(A [M, K] B [N, K]^T)."""
    m, n, pingpong, cm, cn = config
    epi_args = more.pop("epi_args", {})
    mods()[mod].gemm(
        A, B, D, Cin, epi_args=epi_args, tile_M=m, tile_N=n, cluster_M=cm, cluster_N=cn, pingpong=pingpong, max_swizzle_size=swizzle, **more
    )


def best(label: str, make, configs) -> tuple | None:
    """The fastest config of ``make(config)() `` by quick timing; all are told of."""
    seen, first = {}, None
    for config in configs:
        def one(config=config):
            f = make(config)
            f()
            if COMPILE_ONLY:
                return 0.0
            return quick(f)

        before = time.time()
        ms = attempt(f"{label} {config}", one, seconds=25)
        if ms is not None:
            seen[config] = ms
            if COMPILE_ONLY:
                print(f"  {label} {config}: {time.time() - before:.1f} s", flush=True)
    if not seen:
        return None
    first = min(seen, key=seen.get)
    emit({"tuned": label, "best": first, "ms": {str(k): round(v, 4) for k, v in seen.items()}})
    return first


# ---- (a) head and cross-entropy


def lce_inputs():
    x = randn(N, C, seed=1)
    w = randn(V, C, std=0.1, dtype=F32, seed=2)
    if COMPILE_ONLY:
        t = torch.zeros(N, dtype=torch.int64)
    else:
        g = torch.Generator(DEVICE).manual_seed(3)
        t = torch.randint(0, V, (N,), device=DEVICE, generator=g)
        t[::512] = -1
    return x, w, t


def lce_reference(x, w, t, step=2048):
    """FP64 of the BF16 operands: (sum of losses, dx, dw) of the sum."""
    torch.use_deterministic_algorithms(False)  # scatter_add_ at one place a row is exact
    x64, w64 = x.to(F64), w.to(BF16).to(F64)
    dx, dw, total = torch.empty_like(x64), torch.zeros_like(w64), 0.0
    for s in range(0, N, step):
        xs, ts = x64[s : s + step], t[s : s + step]
        z = xs @ w64.T
        lse = z.logsumexp(-1, keepdim=True)
        keep = (ts != -1).to(F64)[:, None]
        at = ts.clamp(min=0)[:, None]
        total += ((lse - z.gather(1, at)) * keep).sum().item()
        z = z.sub_(lse).exp_()
        z.scatter_add_(1, at, -torch.ones_like(at, dtype=F64))
        z *= keep
        dx[s : s + step] = z @ w64
        dw += z.T @ xs
        del z
    torch.use_deterministic_algorithms(True)
    return total, dx, dw


def section_lce():
    import quack.linear_cross_entropy as q
    from quack.cross_entropy import cross_entropy_fwd_out

    x, w, t = lce_inputs()
    cores = {}

    def scaled(chunk):
        loss, dx, dw = q.scaled_exp_linear_cross_entropy_fwd(x, w.to(BF16), t, chunk, -1)
        return loss[:N].sum(), dx, dw

    def chunked(chunk):
        loss, dx, dw, last, last_x = q.chunked_linear_cross_entropy_fwd(x, w.to(BF16), t, chunk, -1, tuned=False)
        if dw is None:
            dw = torch.empty(V, C, dtype=F32, device=DEVICE)
            mods()["mm"].gemm(last.T, last_x.mT, dw, epi_args={}, tile_M=128, tile_N=256, cluster_M=2, cluster_N=1)
        else:
            q.gemm_add_inplace(last.T, last_x, dw, tuned=False)
        return loss.sum(), dx, dw

    if COMPILE_ONLY:
        attempt("lce scaled_exp", compile_scaled_exp)
        attempt("cross_entropy kernel", compile_cross_entropy)
        return
    from fused.linear_cross_entropy import _sum_and_gradients, linear_cross_entropy

    cores["ours"] = lambda: _sum_and_gradients(x, w, t, 32768)
    for chunk in (32768, 8192, 4096):
        cores[f"scaled_exp {chunk}"] = lambda chunk=chunk: scaled(chunk)
    cores["chunked 32768"] = lambda: chunked(32768)
    good, results = {}, {}
    for name, f in cores.items():
        r = attempt(f"lce {name}", lambda f=f: [a.clone() for a in f()], seconds=40)
        if r is not None:
            good[name], results[name] = f, r
    times = attempt("lce times", events, good, S.rounds, seconds=30)
    emit({"lce core (loss sum, dx, dW f32), ms": times})

    def errors():
        total, dx, dw = lce_reference(x, w, t)
        for name, (loss, a, b) in results.items():
            emit({"lce error": name, "loss": abs(loss.item() - total) / total, "dx": relative(a, dx), "dw": relative(b, dw)})

    attempt("lce errors", errors, seconds=30)
    results.clear()
    for name, f in good.items():
        emit({"lce same bits": name, "is": attempt(f"lce bits {name}", same_bits, f)})

    # whole: forward and backward of autograd, eager; and the softmax kernel alone
    xg, wg = x.detach().requires_grad_(), w.detach().requires_grad_()

    def ours_autograd():
        loss = linear_cross_entropy(xg, wg, t)
        return torch.autograd.grad(loss, (xg, wg))

    def scaled_autograd():
        with torch.autocast("cuda", dtype=BF16):
            loss = q.scaled_exp_linear_cross_entropy(xg, wg, t, 32768, -1)
        return torch.autograd.grad(loss, (xg, wg))

    both = {}
    for name, f in (("ours", ours_autograd), ("scaled_exp 32768", scaled_autograd)):
        if attempt(f"autograd {name}", lambda f=f: [g.sum() for g in f()]) is not None:
            both[name] = f
    emit({"lce autograd eager, ms": attempt("autograd times", events, both, S.rounds)})

    from fused.softmax_triton import softmax_rows_triton

    logits, loss = randn(N, V, seed=4), torch.empty(N, dtype=F32, device=DEVICE)
    kernels = {
        "ours": lambda: softmax_rows_triton(logits, t, loss),
        "quack cross_entropy": lambda: cross_entropy_fwd_out(logits, t, None, loss, None, logits, None, -1),
    }
    ok = {k: f for k, f in kernels.items() if attempt(f"softmax {k}", lambda f=f: (f(), 1)[1]) is not None}
    emit({"softmax kernel in place, ms": attempt("softmax times", events, ok, S.rounds)})
    SUSTAIN["lce ours"] = cores["ours"]
    fast = [n for n in good if n != "ours"]
    if fast and times:
        name = min(fast, key=lambda n: times[n]["ms"])
        SUSTAIN[f"lce {name}"] = good[name]


def compile_scaled_exp():
    import quack.linear_cross_entropy as q

    q.lce_glue = lambda *a, **k: None
    x, w, t = lce_inputs()
    for chunk in (N, N // 4):
        q.scaled_exp_linear_cross_entropy_fwd(x, w.to(BF16), t, chunk, -1)
    return 1


def compile_cross_entropy():
    from cutlass import BFloat16, Int64
    from quack.cross_entropy import CrossEntropy

    CrossEntropy.compile(BFloat16, Int64, None, V, False, True, None, None)
    return 1


# ---- (b) GELU in the epilogue


def section_act():
    x, w1 = randn(N, C, seed=5), randn(F, C, std=0.05, seed=6)
    dout, w2 = randn(N, C, std=1e-3, seed=7), randn(C, F, std=0.02, seed=8)
    h, a, dh, a2 = empty(N, F), empty(N, F), empty(N, F), empty(N, F)
    makes = {
        "act_erf": lambda c: lambda: gemm("act_erf", x, w1, h, config=c, epi_args={"mAuxOut": a}),
        "act_tanh": lambda c: lambda: gemm("act_tanh", x, w1, h, config=c, epi_args={"mAuxOut": a}),
        "dact_erf_alone": lambda c: lambda: gemm("dact_erf_alone", dout, w2.mT, dh, h, config=c),
        "dact_tanh_alone": lambda c: lambda: gemm("dact_tanh_alone", dout, w2.mT, dh, h, config=c),
        "dact_erf": lambda c: lambda: gemm("dact_erf", dout, w2.mT, dh, h, config=c, epi_args={"mAuxOut": a2}),
    }
    chosen = {}
    if not COMPILE_ONLY:
        torch.mm(x, w1.mT, out=h)
    for name, make in makes.items():
        config = best(f"gelu {name}", make, EPI if name != "dact_erf" else EPI[:4])
        if config:
            chosen[name] = make(config)
    if COMPILE_ONLY:
        return
    from fused.gelu import _normal, gelu

    forward = torch.compile(gelu)

    def slope(da, h):
        z = h.float()
        cdf, e = _normal(z)
        return (da.float() * (cdf + z * e / math.sqrt(2 * math.pi))).to(h.dtype)

    backward = torch.compile(slope)

    def ours_forward():
        hh = torch.mm(x, w1.mT)
        return hh, forward(hh)

    def ours_backward():
        return (backward(torch.mm(dout, w2), h),)

    with torch.no_grad():
        attempt("gelu compile", lambda: (ours_forward(), ours_backward(), 1)[2], seconds=60)
        functions = {
            "forward ours": ours_forward,
            "forward mm alone": lambda: torch.mm(x, w1.mT),
            **{f"forward quack {k}": chosen[k] for k in ("act_erf", "act_tanh") if k in chosen},
            "backward ours": ours_backward,
            "backward mm alone": lambda: torch.mm(dout, w2),
            **{f"backward quack {k}": chosen[k] for k in chosen if k.startswith("dact")},
        }
        emit({"gelu, ms a layer": attempt("gelu times", events, functions, S.rounds)})

        def errors():
            rows = slice(0, 2048)
            h64 = x[rows].to(F64) @ w1.to(F64).T
            a64 = 0.5 * h64 * (1 + torch.erf(h64 / math.sqrt(2)))
            hh, aa = ours_forward()
            emit({"gelu error": "forward ours", "h": relative(hh[rows], h64), "a": relative(aa[rows], a64)})
            for k in ("act_erf", "act_tanh"):
                if k in chosen:
                    chosen[k]()
                    emit({"gelu error": f"forward {k}", "h": relative(h[rows], h64), "a": relative(a[rows], a64)})
            h.copy_(hh)
            z = hh[rows].to(F64)
            s64 = 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
            d64 = (dout[rows].to(F64) @ w2.to(F64)) * s64
            emit({"gelu error": "backward ours", "dh": relative(ours_backward()[0][rows], d64)})
            for k in [k for k in chosen if k.startswith("dact")]:
                chosen[k]()
                emit({"gelu error": f"backward {k}", "dh": relative(dh[rows], d64)})

        attempt("gelu errors", errors)
        for k, f in chosen.items():
            outs = (h, a) if k.startswith("act") else (dh,)
            emit({"gelu same bits": k, "is": attempt(f"gelu bits {k}", same_bits, lambda f=f, outs=outs: (f(), outs)[1])})
    SUSTAIN["gelu fwd ours"], SUSTAIN["gelu bwd ours"] = ours_forward, ours_backward
    for k in ("act_erf", "dact_erf_alone"):
        if k in chosen:
            SUSTAIN[f"gelu {k}"] = chosen[k]


# ---- (c) residual sum in the epilogue, float32 stream


def section_res():
    for k_name, K in (("c_proj of mlp", F), ("c_proj of attention", C)):
        x, w = randn(N, K, seed=9), randn(C, K, std=0.02, seed=10)
        r, out = randn(N, C, dtype=F32, seed=11), empty(N, C, dtype=F32)
        make = lambda c: lambda: gemm("add", x, w, out, r, config=c)  # noqa: E731
        config = best(f"residual {k_name}", make, EPI[:4])
        if COMPILE_ONLY:
            return
        g = torch.ones(C, device=DEVICE)

        @torch.compile
        def sum_norm(r, y):
            s = r + y
            return s, torch.nn.functional.layer_norm(s, (C,), g).to(BF16)

        @torch.compile
        def norm(s):
            return torch.nn.functional.layer_norm(s, (C,), g).to(BF16)

        ours = lambda: sum_norm(r, torch.mm(x, w.mT))  # noqa: E731
        with torch.no_grad():
            functions = {"ours: mm, sum and norm": ours, "mm alone": lambda: torch.mm(x, w.mT), "norm of the sum alone": lambda: norm(out)}
            if config:
                q = make(config)
                functions |= {"quack: mm and sum": q, "quack: mm and sum, then norm": lambda: (q(), norm(out))}
            attempt("residual compile", lambda: ([f() for f in functions.values()], 1)[1], seconds=60)
            emit({f"residual {k_name}, ms a layer": attempt("residual times", events, functions, S.rounds)})

            def errors():
                rows = slice(0, 2048)
                exact = x[rows].to(F64) @ w.to(F64).T + r[rows].to(F64)
                row = {"residual error": k_name, "ours": relative(ours()[0][rows], exact)}
                if config:
                    q()
                    row |= {"quack": relative(out[rows], exact), "same bits": same_bits(lambda: (q(), (out,))[1])}
                emit(row)

            attempt("residual errors", errors)


# ---- (d) the plain products of a step


def section_mm():
    totals: dict = {}
    layers = [("qkv", C, 3 * C, 12), ("proj", C, C, 12), ("fc", C, F, 12), ("fc_proj", F, C, 12), ("head", C, V, 1)]
    rows = []
    for name, k, n, count in layers:
        if S.left() < 20 and not COMPILE_ONLY:
            emit({"skipped": f"mm {name}"})
            continue
        x, w, dy = randn(N, k, seed=12), randn(n, k, std=0.02, seed=13), randn(N, n, std=1e-3, seed=14)
        y, dx, dw = empty(N, n), empty(N, k), empty(n, k, dtype=F32)
        dwb = empty(n, k)
        cases = {
            "y": (lambda: torch.mm(x, w.mT, out=y), lambda c: lambda: gemm("mm", x, w, y, config=c), WIDE),
            "dx": (lambda: torch.mm(dy, w, out=dx), lambda c: lambda: gemm("mm", dy, w.mT, dx, config=c), WIDE[:5]),
            "dw": (
                lambda: torch.mm(dy.mT, x, out=dwb),
                lambda c: lambda: gemm("mm", dy.mT, x.mT, dw, config=c[0], split_k=c[1]),
                [(c, s) for c in (WIDE[0], WIDE[1], WIDE[3]) for s in ((1,) if name == "head" else (1, 2, 4))],
            ),
        }
        if COMPILE_ONLY and name != "qkv":
            return
        for what, (ours, make, configs) in cases.items():
            config = best(f"mm {name} {what}", make, configs)
            if COMPILE_ONLY:
                continue
            functions = {"torch": ours}
            if what == "dw":
                functions["torch f32"] = lambda: torch.mm(dy.mT, x, out_dtype=F32)
            if config:
                functions["quack"] = make(config)
            t = attempt(f"mm {name} {what}", events, functions, S.rounds, seconds=20)
            if t:
                flops = 2 * N * k * n

                def check():
                    ours()
                    right = {"y": y, "dx": dx, "dw": dwb}[what].clone()
                    make(config)()
                    return relative({"y": y, "dx": dx, "dw": dw}[what][:2048], right[:2048])

                differs = attempt(f"mm {name} {what} check", check) if config else None
                rates = {key: round(flops / v["ms"] / 1e9) for key, v in t.items()}
                emit({"mm": f"{name} {what}", "of a step": count, "times": t, "TFLOPS": rates, "quack from torch": differs})
                rows.append((count, t))
            if config and what == "dw":
                emit({"dw same bits": name, "is": attempt("dw bits", same_bits, lambda: (make(config)(), (dw,))[1])})
        del x, w, dy, y, dx, dw, dwb
    for count, t in rows:
        for key in t:
            totals[key] = totals.get(key, 0) + count * t[key]["ms"]
        totals["faster of torch and quack"] = totals.get("faster of torch and quack", 0) + count * min(
            t["torch"]["ms"], t.get("quack", t["torch"])["ms"]
        )
    emit({"mm, ms a step": {k: round(v, 3) for k, v in totals.items()}})


# ---- sustained: what a power limit leaves


SUSTAIN: dict = {}


def section_sustained():
    """Seconds of one operation on end: ms, W and J a call."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception as error:
        emit({"failed": "pynvml", "error": str(error)})
        return
    for name, f in SUSTAIN.items():
        if S.left() < 4:
            break

        def one(f=f):
            with torch.no_grad():
                stop, calls = time.time() + 0.5, 0
                while time.time() < stop:
                    f()
                    torch.cuda.synchronize()
                e0, t0 = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.time()
                while time.time() < t0 + 1.6:
                    for _ in range(8):
                        f()
                    calls += 8
                    torch.cuda.synchronize()
                clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                e1, t1 = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.time()
            return {"ms": (t1 - t0) / calls * 1e3, "W": (e1 - e0) / 1e3 / (t1 - t0), "J": (e1 - e0) / 1e3 / calls, "MHz": clock}

        r = attempt(f"sustained {name}", one, seconds=8)
        if r:
            emit({"sustained": name, **{k: round(v, 3) for k, v in r.items()}})


def patch_for_compiling():
    """Everything but launches."""
    import quack.gemm as g
    import quack.gemm_runtime.host as host
    import quack.cache.async_compile as a

    for module in (g, host):
        module.get_max_active_clusters = lambda *x, **k: 66
        module.launch_gemm = lambda *x, **k: None
    a._install_gpu_blind_device_attrs()
    a._pin_dsl_arch("sm_90a")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--total", type=float, default=150)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="lce,act,res,mm,sustained")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    S.total, S.out, S.rounds = (1e5 if COMPILE_ONLY else args.total), args.out, args.rounds
    S.done = set(filter(None, os.environ.get("QUACK_DONE", "").split(";")))
    faulthandler.enable()
    if not COMPILE_ONLY:
        faulthandler.dump_traceback_later(max(5.0, S.left() + 20), exit=True)
        from training import distributed

        distributed.set_deterministic(True)
        distributed.set_tf32(False)
        torch.zeros(1, device="cuda")
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    else:
        about = {"torch": torch.__version__}
    began = time.time()
    import quack
    import cutlass

    emit({**about, "quack": quack.__version__, "cutlass": cutlass.__version__, "import s": round(time.time() - began, 1), "shape": [N, C, F, V]})
    import quack.cache.jit as jit

    # A cache made on another machine with the same Python and packages serves: its name is made fixed.
    jit._compute_source_fingerprint = lambda: "fixed"
    if COMPILE_ONLY:
        patch_for_compiling()
    else:
        import quack.gemm as g
        import quack.gemm_runtime.host as host

        asked = host.get_max_active_clusters

        def clusters(size, **more):
            try:
                return asked(size, **more)
            except Exception as error:
                emit({"failed": "get_max_active_clusters", "error": str(error)[:200], "taken": 132 // size})
                return 132 // size

        g.get_max_active_clusters = host.get_max_active_clusters = clusters
        emit({"cache": os.environ["QUACK_CACHE_DIR"], "kernels": len(glob.glob(os.environ["QUACK_CACHE_DIR"] + "/fixed/*.o")), "clusters of 2": clusters(2)})
    sections = {"lce": section_lce, "act": section_act, "res": section_res, "mm": section_mm, "sustained": section_sustained}
    for name in args.only.split(","):
        if name in S.done:
            continue
        before = time.time()
        # Only what is inside of a section is timed out; a section as a whole ends with the total.
        try:
            sections[name]()
        except Exception as error:
            emit({"failed": f"section {name}", "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc().splitlines()[-6:]})
            if not healthy():
                S.done.add(name)
                os.environ["QUACK_DONE"] = ";".join(sorted(S.done))
                os.environ.setdefault("QUACK_BEGAN", str(S.began))
                os.execv(sys.executable, [sys.executable, *sys.argv])
        S.done.add(name)
        emit({"section": name, "s": round(time.time() - before, 1)})
        gc.collect()
        if not COMPILE_ONLY:
            torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
