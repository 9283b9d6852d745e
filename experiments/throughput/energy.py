"""Joules of one training step by class of kernel, GPT-2 124M at 32 x 1024. Run with the repository as current directory and in PYTHONPATH.

    python3 energy.py --out DIR [--total 90] [--seconds 2.5]

A class's own operations run on end, in the ratio of a step; NVML's energy counter is read before and after. Each result is a line of
DIR/energy.jsonl. ``--cpu`` tries all of it at tiny shapes without a GPU.
"""

from __future__ import annotations

import argparse, faulthandler, glob, json, math, os, statistics, sys, threading, time, traceback  # noqa: E401

sys.path.insert(0, os.getcwd())
CPU = "--cpu" in sys.argv
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402

from attention import AttentionConfig, AttentionSpec  # noqa: E402
from attention.dispatch import run as attend  # noqa: E402
from fused.gelu import _normal, gelu  # noqa: E402
from model import GPT, ModelConfig, initialize  # noqa: E402
from training import distributed  # noqa: E402
from training.nonfinite import Withholding  # noqa: E402
from training.optim import OptimConfig, build_optimizer, clip_gradients  # noqa: E402
from training.precision import PrecisionConfig  # noqa: E402
from training.step import step_unless, train_step  # noqa: E402

DEVICE = torch.device("cpu" if CPU else "cuda")
BF16, F32 = torch.bfloat16, torch.float32
B, T, L = (2, 32, 2) if CPU else (32, 1024, 12)
C, H = (64, 4) if CPU else (768, 12)
SHAPE = ModelConfig(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=500) if CPU else ModelConfig()
N, F, V, D = B * T, 4 * C, SHAPE.padded_vocab_size, C // H
BEGAN = time.time()
compiled = (lambda f: f) if CPU else torch.compile
rows: list[dict] = []


def emit(row: dict) -> None:
    row = {"t": round(time.time() - BEGAN, 1), **row}
    print(json.dumps(row, default=str), flush=True)
    with open(os.path.join(ARGS.out, "energy.jsonl"), "a") as f:
        f.write(json.dumps(row, default=str) + "\n")


def left() -> float:
    return ARGS.total - (time.time() - BEGAN)


def sync() -> None:
    if not CPU:
        torch.cuda.synchronize()


# ---- NVML


class Meter:
    """Energy counter, and samples of power and SM clock from a thread."""

    def __init__(self) -> None:
        self.nvml = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception as error:
            emit({"failed": "pynvml", "error": f"{type(error).__name__}: {error}"})
        self.samples: list[tuple[float, float, float, float, int]] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        if self.nvml:
            try:
                limit = self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3
                top = self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
                emit({"power limit W": limit, "SM clock max MHz": top, "energy counter": self.energy() is not None})
            except Exception as error:
                emit({"nvml": str(error)})
            self.thread.start()

    def energy(self) -> float | None:
        """Joules since the driver was loaded."""
        try:
            return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3
        except Exception:
            return None

    def _sample(self) -> None:
        n, h = self.nvml, self.handle

        def value(f, default=math.nan):
            try:
                return f()
            except Exception:
                return default

        def instant():
            field = n.nvmlDeviceGetFieldValues(h, [186])[0]  # NVML_FI_DEV_POWER_INSTANT, mW
            return field.value.uiVal / 1e3 if field.nvmlReturn == 0 else math.nan

        reasons = getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(n, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
        while not self.stop.wait(0.05):
            power = value(lambda: n.nvmlDeviceGetPowerUsage(h) / 1e3)
            clock = value(lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM))
            why = value(lambda: reasons(h), 0) if reasons else 0
            self.samples.append((time.time(), power, value(instant), clock, why))

    def between(self, t0: float, t1: float) -> dict:
        inside = [s for s in self.samples if t0 + 0.3 < s[0] < t1]  # NVML's power lags

        def middle(i):
            values = [s[i] for s in inside if not math.isnan(s[i])]
            return round(statistics.median(values), 1) if values else None

        # 0x4: software power cap, 0x80: hardware power brake, 0x20/0x40: thermal
        capped = sum(bool(s[4] & 0x4) for s in inside) / len(inside) if inside else None
        return {"W mean 1s": middle(1), "W instant": middle(2), "MHz": middle(3), "power capped": capped and round(capped, 2), "samples": len(inside)}


def measure(name: str, one, per_step: float = 1.0, seconds: float | None = None, show: bool = True) -> dict | None:
    """``one()`` on end; a row of it for a step's worth, which is ``per_step`` of them."""
    seconds = ARGS.seconds if seconds is None else seconds
    if left() < seconds + 1:
        emit({"skipped": name})
        return None
    try:
        before = time.time()
        one()
        sync()
        ready = time.time() - before
        began = time.time()
        one()
        sync()
        once = max(time.time() - began, 1e-5)
        block = max(1, int(0.05 / once))  # a synchronization every 50 ms or more
        stop = time.time() + ARGS.warm
        while time.time() < stop:
            for _ in range(block):
                one()
            sync()
        calls, e0, t0 = 0, METER.energy(), time.time()
        while time.time() < t0 + seconds:
            for _ in range(block):
                one()
            calls += block
            sync()
        e1, t1 = METER.energy(), time.time()
    except Exception as error:
        emit({"failed": name, "error": f"{type(error).__name__}: {str(error)[:300]}", "trace": traceback.format_exc().splitlines()[-7:]})
        return None
    row = {"class": name, "ms": (t1 - t0) / calls * 1e3 * per_step, **METER.between(t0, t1)}
    watts = (e1 - e0) / (t1 - t0) if e0 is not None and e1 is not None else row["W instant"] or row["W mean 1s"]
    row |= {"W": watts, "J": None if watts is None else watts * row["ms"] / 1e3, "calls": calls, "ready s": ready}
    row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    emit(row)
    if show:
        rows.append(row)
    return row


def randn(*shape, std=1.0, dtype=BF16, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, device=DEVICE, generator=g) * std).to(dtype)


def tokens(seed: int) -> torch.Tensor:
    """[B, T] int64 on the CPU, as unequal in frequency as words are."""
    g = torch.Generator().manual_seed(seed)
    weights = 1 / (torch.arange(SHAPE.vocab_size, dtype=torch.float64) + 2.7)
    return torch.multinomial(weights, N, replacement=True, generator=g).view(B, T)


def spec(preset: str) -> AttentionSpec:
    return AttentionSpec(preset=preset, backend="flash_reference" if CPU else "")


# ---- classes


def captured(one, times: int, name: str):
    """(``one`` ``times`` times as a CUDA graph, times), or (one, 1) where it cannot be: Python would be slower than some kernels."""
    if CPU:
        return one, 1
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                one()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(times):
                one()
        KEPT.append(one)  # a graph keeps no tensor that it reads
        return graph.replay, times
    except Exception as error:
        emit({"not captured": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
        return one, 1


KEPT: list = []

def products():
    """Matrix products of a step: 12 layers and the head; gradients of weights in BF16 as autocast leaves them, the head's in float32."""
    layers = [(C, 3 * C), (C, C), (C, F), (F, C)]
    sets = []
    for i, (k, n) in enumerate(layers):
        x, w, dy = randn(N, k, seed=i), randn(n, k, std=0.02, seed=10 + i), randn(N, n, std=1e-3, seed=20 + i)
        sets.append((x, w, dy, torch.empty(N, n, dtype=BF16, device=DEVICE), torch.empty_like(x), torch.empty_like(w)))
    x, w, z = randn(N, C, seed=30), randn(V, C, std=0.02, seed=31), torch.empty(N, V, dtype=BF16, device=DEVICE)
    dz, dx = randn(N, V, std=1e-3, seed=32), torch.empty(N, C, dtype=BF16, device=DEVICE)

    def one():
        for _ in range(L):
            for a, b, d, y, da, db in sets:
                torch.mm(a, b.mT, out=y)
                torch.mm(d, b, out=da)
                torch.mm(d.mT, a, out=db)
        torch.mm(x, w.mT, out=z)
        torch.mm(dz, w, out=dx)
        if CPU:
            torch.mm(dz.mT, x)
        else:
            torch.mm(dz.mT, x, out_dtype=F32)

    return one


def attention(preset: str):
    plan = AttentionConfig(default=spec(preset)).resolve(L, H)[0]
    seed = torch.zeros((), dtype=torch.int64, device=DEVICE)
    fused = randn(B, T, 3 * H, D, seed=40)
    q, k, v = (x.requires_grad_() for x in fused.split(H, dim=2))
    do = randn(B, T, H, D, std=1e-3, seed=41)

    def one():
        torch.autograd.grad(attend(q, k, v, plan, rounding_seed=seed), (q, k, v), do)

    return one


def norms():
    """A residual sum and its norm, forward and backward: 24 of a step's (the 25th norm has no sum)."""
    r, y = randn(N, C, dtype=F32, seed=50).requires_grad_(), randn(N, C, seed=51).requires_grad_()
    g = torch.ones(C, device=DEVICE, requires_grad=True)
    ds, dn = randn(N, C, std=1e-3, dtype=F32, seed=52), randn(N, C, std=1e-3, seed=53)

    @compiled
    def forward(r, y, g):
        s = r + y
        return s, torch.nn.functional.layer_norm(s, (C,), g).to(BF16)

    def one():
        torch.autograd.grad(forward(r, y, g), (r, y, g), (ds, dn))

    return one


def gelus():
    h, da = randn(N, F, seed=60), randn(N, F, std=1e-3, seed=61)
    forward = compiled(gelu)

    @compiled
    def backward(da, h):
        x = h.float()
        cdf, e = _normal(x)
        return (da.float() * (cdf + x * e / math.sqrt(2 * math.pi))).to(h.dtype)

    def one():
        with torch.no_grad():
            forward(h)
            backward(da, h)

    return one


def softmaxes():
    """(copy of logits, copy and softmax in place): the kernel overwrites its input, and what it leaves would not be logits."""
    saved, logits = randn(N, V, std=2.0, seed=70), torch.empty(N, V, dtype=BF16, device=DEVICE)
    loss, target = torch.empty(N, dtype=F32, device=DEVICE), tokens(71).flatten().to(DEVICE)
    if CPU:
        from fused.linear_cross_entropy import softmax_rows as softmax
    else:
        from fused.softmax_triton import softmax_rows_triton as softmax
    copy = lambda: logits.copy_(saved)  # noqa: E731
    return copy, lambda: (copy(), softmax(logits, target, loss))


def table():
    dx, t = randn(N, C, std=1e-3, dtype=F32, seed=80), tokens(81).flatten().to(DEVICE)
    return lambda: torch.ops.aten.embedding_dense_backward(dx, t, V, -1, False)


class Step:
    """The default training step, and its parts that a graph or the optimizer's class needs."""

    def __init__(self) -> None:
        plans = AttentionConfig(default=spec("flash")).resolve(L, H)
        self.raw = GPT(SHAPE, plans, fast=not CPU)
        initialize(self.raw, 1)
        self.raw.to(DEVICE)
        self.model = compiled(self.raw)
        self.precision = PrecisionConfig(dtype="bfloat16", compile=True)
        self.config = OptimConfig(lr=1e-5, min_lr=1e-6)
        self.optimizer = build_optimizer(self.raw, self.config, DEVICE)
        self.scaler, self.withholding = self.precision.scaler(DEVICE), Withholding("stop", DEVICE)
        self.batches = [(tokens(2 * i), tokens(2 * i + 1)) for i in range(4)]
        self.count = 0

    def whole(self) -> None:
        self.count += 1
        train_step(
            self.model,
            self.optimizer,
            self.scaler,
            [self.batches[self.count % 4]],
            [self.count],
            device=DEVICE,
            autocast=lambda: self.precision.autocast(DEVICE),
            grad_clip=1.0,
            withholding=self.withholding,
        )

    def update(self):
        """Norm, clip and AdamW on the gradients of the last step."""
        withheld = torch.zeros((), device=DEVICE)
        optimizer = self.optimizer
        if not CPU:  # one that a graph can hold; the kernels are the same
            optimizer = torch.optim.AdamW(list(self.raw.parameters()), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=True)
        if any(p.grad is None for p in self.raw.parameters()):
            for p in self.raw.parameters():
                p.grad = torch.randn_like(p) * 1e-3

        def one():
            clip_gradients(self.raw, 1.0)
            step_unless(optimizer, withheld)

        return one

    def graph(self):
        """(eager body, graph replay) of forward, backward, clip and AdamW on a fixed batch, or raises."""
        del self.optimizer
        parameters = list(self.raw.parameters())
        more = {} if CPU else {"fused": True, "capturable": True}
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, **more)
        x, y = (t.to(DEVICE) for t in self.batches[0])
        seed = torch.zeros((), dtype=torch.int64, device=DEVICE)

        def body():
            optimizer.zero_grad(set_to_none=True)
            with self.precision.autocast(DEVICE):
                _, loss = self.model(x, y, seed)
            loss.backward()
            clip_gradients(self.raw, 1.0)
            optimizer.step()
            return loss.detach()

        if CPU:
            return body, body
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.loss = body()
        return body, graph.replay


def guarded(name: str, function, *args):
    try:
        return function(*args)
    except Exception as error:
        emit({"failed": name, "error": f"{type(error).__name__}: {str(error)[:300]}", "trace": traceback.format_exc().splitlines()[-7:]})
        return None


def graphs(step: Step) -> None:
    made = guarded("graph capture", step.graph)
    if made is None:
        return
    eager, replay = made
    times: dict[str, list[float]] = {"eager": [], "graph": []}
    for _ in range(1 if CPU else 6):
        for name, f in (("eager", eager), ("graph", replay)):
            sync()
            t = time.perf_counter()
            for _ in range(10):
                f()
            sync()
            times[name].append((time.perf_counter() - t) * 100)
    ratio = [g / e for g, e in zip(times["graph"], times["eager"], strict=True)]
    emit({"step without and with a graph, ms": {k: [round(x, 2) for x in v] for k, v in times.items()}, "ratio": [round(x, 4) for x in ratio]})
    if left() > 6:
        measure("fixed batch, eager", eager, seconds=2.0, show=False)
        measure("fixed batch, graph", replay, seconds=2.0, show=False)


def table_of() -> None:
    head = f"{'class':34} {'ms':>8} {'W':>7} {'MHz':>6} {'J':>8} {'capped':>7}"
    print(head)
    show = lambda v, f: "-" if v is None else format(v, f)  # noqa: E731
    for r in rows:
        print(f"{r['class']:34} {show(r['ms'], '8.3f')} {show(r['W'], '7.1f')} {show(r['MHz'], '6.0f')} {show(r['J'], '8.3f')} {show(r['power capped'], '7.2f')}")
    byname = {r["class"]: r for r in rows}
    parts = [r for r in rows if r["class"] not in ("whole step", "idle", "attention flash_consistent", "copy of logits", "copy and softmax")]
    if all(r["J"] is not None for r in parts) and parts:
        joules, ms = sum(r["J"] for r in parts), sum(r["ms"] for r in parts)
        whole = byname.get("whole step")
        emit({"sum of classes": [r["class"] for r in parts], "ms": round(ms, 3), "J": round(joules, 3), "whole ms": whole and whole["ms"], "whole J": whole and whole["J"]})
        print(f"{'sum of classes':34} {ms:8.3f} {1e3 * joules / ms:7.1f} {'':6} {joules:8.3f}")


def main() -> None:
    emit({"gpu": "cpu" if CPU else torch.cuda.get_device_name(), "torch": torch.__version__, "shape": [B, T, L, C, V]})
    measure("idle", lambda: time.sleep(0.05), seconds=1.5)
    step = guarded("model", Step)
    if step is not None:
        measure("whole step", step.whole, seconds=ARGS.seconds + 1)
    for name, make, count in (
        ("matrix products", products, 1),
        ("attention flash", lambda: attention("flash"), L),
        ("residual sums and norms", norms, 2 * L),
        ("GELU", gelus, L),
    ):
        one = guarded(name, make)
        if one is not None:
            if name != "matrix products":
                one, times = captured(one, 4, name)
                count = count / times
            measure(name, one, count)
        del one
        KEPT.clear()
    if step is not None:
        one = guarded("update", step.update)
        if one is not None:
            one, times = captured(one, 2, "norm, clip, AdamW")
            measure("norm, clip, AdamW", one, 1 / times)
        del one
        KEPT.clear()
    pair = guarded("softmax", softmaxes)
    if pair is not None:
        a, b = measure("copy of logits", pair[0], seconds=2.0), measure("copy and softmax", pair[1])
        if a and b and a["J"] is not None and b["J"] is not None:
            ms, joules = b["ms"] - a["ms"], b["J"] - a["J"]
            row = {"class": "softmax of the head", "ms": ms, "J": joules, "W": 1e3 * joules / ms if ms > 0 else None, "MHz": b["MHz"], "power capped": b["power capped"]}
            emit(row)
            rows.append(row)
    del pair
    one = guarded("table", table)
    if one is not None:
        measure("gradient of the token table", one, seconds=2.0)
    one = guarded("flash_consistent", attention, "flash_consistent")
    if one is not None:
        one, times = captured(one, 4, "flash_consistent")
        measure("attention flash_consistent", one, L / times)
    table_of()
    del one
    KEPT.clear()
    if not CPU:
        torch.cuda.empty_cache()
    if step is not None and left() > 8:
        graphs(step)
    emit({"end": True})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--total", type=float, default=90)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--warm", type=float, default=0.6)
    parser.add_argument("--cpu", action="store_true")
    ARGS = parser.parse_args()
    faulthandler.dump_traceback_later(ARGS.total + 15, exit=True)
    distributed.set_deterministic(True)
    distributed.set_tf32(False)
    if not CPU:
        distributed.start("cuda")
    METER = Meter()
    main()
    METER.stop.set()
    faulthandler.cancel_dump_traceback_later()
