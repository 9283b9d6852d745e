"""A check for any training run: logits, entropy, one-hot rows and the error of delta of every attention, by layer and head.

    with watch(model, every=100, log="watch.jsonl", optimizer=optimizer):
        ...  # any training loop

It sees torch's and this package's ``scaled_dot_product_attention`` and, in Hugging Face models, any attention function but "eager". Every
n-th step one forward and backward pass is looked at; the others pay for two hooks. Training is not changed, unless ``switch`` is given.

A layer runs away by the rule of ``growth.py``, on largest logits. On 56 runs of GPT-2 124M, a probe every 100 steps, that rule on layer 1
warned of 16 of 19 explosions and flagged 1 of 15 stable runs (experiments/alarm/README.md).

Legend: B batch, H heads, T queries, S keys, D head dim, R some of the queries.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..functional import refuse, scaled_dot_product_attention, spec_of, stochastic
from ..plan import AttentionSpec
from ..reference.tiles import TORCHS
from ..user_error import invalid
from .growth import FMA_LOGIT, RATES, GrowthAlarm, GrowthRule, RunsAway
from .log import close_log, open_log, read_log, strict, table_of
from .measure import Call, as_lists, measure

STEPS, RATE = "steps", "summed learning rate"
"""What a log's clock is."""
_COMPILED = "watch: the model is compiled: expected what torch.compile(model) returned, not the module inside, and no model.compile()"


@dataclass
class Look:
    """A forward pass that is looked at. Its hooks hold it, as its gradients may come late, twice or never."""

    step: int
    clock: float
    calls: list[Call] = field(default_factory=list)
    found: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    hidden: int = 0
    """Calls of attention that could not be seen."""
    awaited: set[int] = field(default_factory=set)
    """Calls whose gradients have not come; none once the look is written."""


class Watch(TorchFunctionMode):
    """Made by ``watch``. As a context manager it is closed with the block. Rows of the last look: ``record``."""

    def __init__(self, model: nn.Module, **chosen: Any):
        super().__init__()
        self._model = model
        self._every, self._sequences, self._warm_up = chosen["every"], chosen["sequences"], chosen["warm_up"]
        self._switch, self._wandb, self._say = chosen["switch"], chosen["wandb"], chosen["say"]
        optimizer, earlier = chosen["optimizer"], chosen["earlier"]
        rate = 1.0 if optimizer is None else float(optimizer.param_groups[0]["lr"])
        step, clock = (earlier[-1]["step"], earlier[-1]["clock"]) if earlier else (0, 0.0)
        self._step, self._clock = chosen["start"], clock + (chosen["start"] - step) * rate
        self._counts, self._passes, self._first = optimizer is None, 0, chosen["start"]
        self._log = open_log(Path(chosen["log"]), chosen["cut"], chosen["say"]) if chosen["log"] else None
        self.record: dict[str, Any] = {}
        self._alarm = GrowthAlarm(chosen["rule"], self._warm_up)
        self.left = self._alarm.left
        """Step at which a layer ran away."""
        self._largest: tuple[float, int, int] | None = None
        """Largest logit that was judged, its step and its layer."""
        self._not_finite = self._warned = False
        self._due, self._inside, self._looked_at, self._seen, self._hidden = False, False, -1, 0, 0
        self._look: Look | None = None
        self._recall(earlier)
        self._pass = ExitStack()
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def __enter__(self) -> Watch:  # the model's passes enter the mode, not the block
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __deepcopy__(self, _: Any) -> Watch:  # a copy of the model has the hooks too, which serve this model alone
        return self

    def __reduce__(self) -> Any:
        raise TypeError("watch: a watched model has hooks: save its state_dict(), or close() the watch first")

    def close(self) -> None:
        """Take the hooks away and close the file."""
        self._pass.close()  # torch runs no hook at its end where a pass was interrupted
        self._write()
        if self._hooks and self._passes and not self.record and self._warm_up < sys.maxsize:
            self._say(f"watch: no step was looked at (every = {self._every})")
        if self._hooks and self._largest is None and self._not_finite:
            self._say("watch: no look had finite logits")
        if self._hooks and self._largest is not None:
            logit, step, layer = self._largest
            meaning = "; above 1,000 is a warning" if logit > 1000 else ""
            if logit > FMA_LOGIT:
                meaning = f"; past {FMA_LOGIT:,.0f}: run the control, from a checkpoint before that"
            seen = len(self.record["max_logit"])
            where = f"at step {step} in attention layer {layer} of layers 0 to {seen - 1}"
            self._say(f"watch: largest logit {logit:.4g}, {where}{meaning}")
        if self._hooks and not self._passes:
            warnings.warn(
                "watch: the model made no forward pass in training mode: expected what the loop calls", stacklevel=2
            )
        if self._hooks and self._passes > 1 and not self._counts and self._step == self._first:
            warnings.warn(
                f"watch: the optimizer made no step in {self._passes} forward passes: expected the one that the loop steps",
                stacklevel=2,
            )
        while self._hooks:
            self._hooks.pop().remove()
        if self._log is not None:
            close_log(self._log)

    # ---- when

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._write()
        self._step += 1
        self._clock += float(optimizer.param_groups[0]["lr"])

    def _begin(self, model: nn.Module, _: Any) -> None:
        if model is not self._model:
            return
        if torch.compiler.is_compiling():
            raise ValueError(_COMPILED)
        if not (model.training and torch.is_grad_enabled()):
            return
        self._seen, self._hidden = 0, 0
        self._passes += 1
        self._due = self._step % self._every == 0 and self._step != self._looked_at
        if self._due:
            self._write()
            self._look = Look(self._step, self._clock)
        if self._due or (self._switch is not None and self.left):
            # What is compiled hides its calls. Nothing is compiled before this module is there, and it takes seconds to import.
            if "torch._dynamo" in sys.modules:
                try:
                    self._pass.enter_context(torch.compiler.set_stance("force_eager"))
                except RuntimeError:  # its own pass is compiled around this hook
                    self._due, self._look = False, None
                    raise ValueError(_COMPILED) from None
            self._register()
            super().__enter__()
            self._pass.callback(super().__exit__, None, None, None)

    def _end(self, model: nn.Module, _: Any, output: Any) -> None:
        if model is not self._model or not (model.training and torch.is_grad_enabled()):
            return
        self._pass.close()
        if output is None and sys.exc_info()[1] is not None:  # the pass failed, and may be tried again
            self._due, self._look = False, None
            return
        if self._due and not self._seen:
            self.close()
            raise ValueError(
                "watch: this forward pass made no call of scaled_dot_product_attention that it can see (in Hugging Face: "
                'attn_implementation="sdpa"; torch.nn.MultiheadAttention with need_weights=False)'
            )
        if self._due and self._hidden and not self._warned:
            self._warned = True
            self._say(
                f"watch: {self._hidden} of {self._seen + self._hidden} attention layers are not seen: "
                "torch.nn.MultiheadAttention needs need_weights=False"
            )
        if self._due:
            self._looked_at, self._due = self._step, False
            if self._look is not None:
                self._look.hidden = self._hidden
                if not self._look.awaited:  # as in reentrant checkpointing
                    self._write()
        if self._counts:
            self._step, self._clock = self._step + 1, self._clock + 1

    # ---- what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.multi_head_attention_forward:
            return self._torchs_module(lambda: func(*args, **(kwargs or {})))
        if func not in (TORCHS, scaled_dot_product_attention) or self._inside:
            return func(*args, **(kwargs or {}))
        return self._attend(lambda: func(*args, **(kwargs or {})), **_named(*args, **(kwargs or {})))

    def _torchs_module(self, run: Callable[[], Any]) -> Any:
        """Run the attention of ``nn.MultiheadAttention``. It calls torch's function where no mode sees it, or, for weights, none at all."""
        before, function = self._seen, functional.scaled_dot_product_attention

        def attend(*args: Any, **settings: Any) -> Tensor:
            return self._attend(lambda: function(*args, **settings), **_named(*args, **settings))

        functional.scaled_dot_product_attention = attend
        try:
            return run()
        finally:
            functional.scaled_dot_product_attention = function
            self._hidden += self._seen == before

    def _register(self) -> None:
        """For this pass, stand in for the attention function of a Hugging Face model that is not torch's."""
        library: Any = sys.modules.get("transformers.modeling_utils")
        configs = (getattr(module, "config", None) for module in self._model.modules())
        name = next((c._attn_implementation for c in configs if c and hasattr(c, "_attn_implementation")), None)
        if library is None or name in (None, "sdpa", "eager"):
            return
        functions = library.ALL_ATTENTION_FUNCTIONS
        function = functions[name]

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
            def run() -> Tensor:
                return function(module, q, k, v, mask, **more)[0].transpose(1, 2)

            padding = mask
            if mask is not None and mask.ndim == 2:  # flash kernels' own: which keys are no padding
                padding = mask[:, None, None, : k.shape[2]].bool()
            causal = mask is None and q.shape[2] > 1 and more.get("is_causal", getattr(module, "is_causal", True))
            named = _named(q, k, v, padding, more.get("dropout", 0.0), causal, more.get("scaling"), True)
            window, named["softcap"] = more.get("sliding_window"), more.get("softcap") or 0.0
            if causal and window and window < k.shape[2]:
                named["attn_mask"] = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(
                    1 - window
                )
            return self._attend(run, **named).transpose(1, 2), None

        functions[name] = attend

        def undo() -> None:
            del functions[name]
            if name not in functions or functions[name] is not function:
                functions[name] = function

        self._pass.callback(undo)

    def _attend(self, run: Callable[[], Tensor], **named: Any) -> Tensor:
        layer, self._seen = self._seen, self._seen + 1
        self._inside = True
        try:
            moved = self._switch if layer in self.left else None
            if self._switch is not None and (moved is not None or (self._due and not self.record)):
                try:  # in the first pass, so that what it refuses is known before it is needed
                    _refuse_checkpointing()
                    if moved is None:
                        with torch.no_grad():
                            scaled_dot_product_attention(**named, numerics=self._switch)
                except ValueError as error:
                    raise ValueError(f"watch: switch = {self._switch!r} cannot serve layer {layer}: {error}") from None
            o = run() if moved is None else scaled_dot_product_attention(**named, numerics=moved)
        finally:
            self._inside = False
        if o.numel() == 0:  # a batch of nothing has nothing to measure
            self._look = None
        if self._due and self._look is not None:
            self._keep(self._look, layer, named, o)
        return o

    def _keep(self, look: Look, layer: int, named: dict[str, Any], o: Tensor) -> None:
        # The hooks below outlive this call. What they hold must not hold q or o: a graph that its own hooks keep is never freed.
        q, mask, dtype, sequences, differentiated = (
            named["query"],
            named["attn_mask"],
            o.dtype,
            self._sequences,
            named["query"].requires_grad,
        )

        def few(x: Tensor) -> Tensor:
            return x.detach().reshape(-1, *x.shape[-3:])[:sequences].to(dtype, copy=True)

        if mask is not None:
            mask = mask.detach().reshape(-1, *(1,) * (3 - mask.ndim), *mask.shape[-3:])[: self._sequences].clone()
        call = Call(
            q_BHTD=few(q),
            k_BHSD=few(named["key"]),
            v_BHSD=few(named["value"]),
            o_BHTD=few(o),
            mask_BHTS=mask,
            causal=bool(named["is_causal"]),
            scale=q.shape[-1] ** -0.5 if named["scale"] is None else named["scale"],
            softcap=named["softcap"],
            dropout=named["dropout_p"],
        )
        look.calls.append(call)

        def output_gradient(do: Tensor) -> None:
            came("do_BHTD", do)
            if not differentiated:
                finish()

        def query_gradient(dq: Tensor) -> None:
            came("dq_BHTD", dq)
            finish()

        def came(name: str, gradient: Tensor) -> None:
            if layer in look.awaited:
                changes: dict[str, Any] = {name: few(gradient)}
                look.calls[layer] = replace(look.calls[layer], **changes)

        def finish() -> None:
            if layer in look.awaited:
                look.found[layer] = measure(look.calls[layer])
                look.awaited.remove(layer)
                if not look.awaited:
                    self._write()

        if o.requires_grad:
            look.awaited.add(layer)
            o.register_hook(output_gradient)
            if differentiated:
                q.register_hook(query_gradient)

    # ---- what is said

    def _write(self) -> None:
        """Bring a look to the host and the file. Calls whose gradient never came are measured without one."""
        look, self._look = self._look, None
        if look is None or not look.calls:
            return
        found = [look.found.get(layer) or measure(call) for layer, call in enumerate(look.calls)]
        look.awaited.clear()
        look.calls.clear()
        lists = as_lists(found)
        more: dict[str, Any] = {"clock_is": STEPS if self._counts else RATE}
        if look.hidden:
            more["hidden"] = look.hidden
        if self._switch is not None and self.left:
            more |= {"switched": sorted(self.left), "switch": self._name()}
        self.record = {"step": look.step, "clock": look.clock, **more, **lists}
        if self._log is not None:
            self._log.write(json.dumps(strict(self.record)) + "\n")
            self._log.flush()
        if self._wandb is not None:
            self._wandb.log(table_of(self.record))
        self._judge(look.step, look.clock, lists["max_logit"])
        for layer, made in enumerate(lists.get("nan_made", [])):
            if made and any(made):
                self._say(f"step {look.step}: attention layer {layer}: its kernel made a NaN of finite q, k, v and dO")

    def _recall(self, earlier: Sequence[dict[str, Any]]) -> None:
        """Go on from a file's records: which layers ran away, and what growth is measured from."""
        say, self._say = self._say, lambda line: None
        for record in earlier:
            self._judge(record["step"], record["clock"], [list(map(float, heads)) for heads in record["max_logit"]])
            for layer in record.get("switched", ()):  # also where this watch has another rule
                self.left.setdefault(layer, record["step"])
        self._say, self._largest, self._not_finite = say, None, False
        if self.left:
            layers = ", ".join(map(str, sorted(self.left)))
            now = "the model's own attention, as switch= is not given" if self._switch is None else self._name()
            say(f"watch: by the log attention layers {layers} ran away before step {self._first}: they run {now}")
        if earlier and self._first - earlier[-1]["step"] > 2 * self._every:
            say(f"watch: the log ends at step {earlier[-1]['step']}, and this run starts at {self._first}")
        if self._first > self._warm_up and not self._alarm.has_begun:
            from_step = math.ceil(self._first * self._alarm.rule.window)
            say(
                f"watch: started at step {self._first}, it can tell of a layer that runs away from about step {from_step:,} on"
            )

    def _judge(self, step: int, clock: float, logits: list[list[float]]) -> None:
        if step < self._warm_up:
            return
        if not all(math.isfinite(logit) for logit_H in logits for logit in logit_H):
            if not self._not_finite:
                self._say(f"step {step}: attention's logits are not finite; the alarm waits until they are")
            self._not_finite = True
            return
        self._not_finite = False
        largest = max((max(logit_H), step, layer) for layer, logit_H in enumerate(logits))
        self._largest = max(self._largest or largest, largest)
        for found in self._alarm.update(step, clock, dict(enumerate(logits))):
            self._say(self._sentence(found))

    def _sentence(self, found: RunsAway) -> str:
        then = "run the control" if self._switch is None else f"from now on it runs {self._name()}"
        return f"{found} ({RATES}); {then}"

    def _name(self) -> str:
        return self._switch.label() if isinstance(self._switch, AttentionSpec) else str(self._switch)


def _refuse_checkpointing() -> None:
    """``ValueError`` within activation checkpointing: it calls attention again in the backward pass, where ``watch`` does not see it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    recomputed = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    if recomputed or not torch.is_grad_enabled():
        raise ValueError("expected no activation checkpointing; put replace_sdpa around the training loop")


_SIGNATURE = inspect.signature(scaled_dot_product_attention)


def _named(*args: Any, **more: Any) -> dict[str, Any]:
    """The arguments of a call by name, without what ours has beyond torch's but the soft-cap."""
    bound = _SIGNATURE.bind(*args, **more)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("numerics", "rounding_seed")}


def _require(right: bool, name: str, value: object, expected: str) -> None:
    if not right:
        raise invalid(f"watch: {name}", value, expected)


def watch(
    model: nn.Module,
    *,
    every: int = 100,
    log: str | Path | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    switch: str | AttentionSpec | None = None,
    wandb: Any = None,
    warm_up: int = 0,
    sequences: int = 1,
    start: int = 0,
    rule: GrowthRule | None = None,
    say: Callable[[str], object] = print,
) -> Watch:
    """Look at every attention of ``model`` in each n-th training step, from now on until ``close()`` or the end of the block.

    Args:
        model: what the loop calls; of a compiled model what ``torch.compile`` returned, whose looked-at passes run uncompiled.
        every: steps between two looks.
        log: JSONL file; each look appends a line: step, clock, and ``COLUMNS`` by layer and head. Of records before ``start`` the alarm
            remembers growth, and which layers ran away; those from ``start`` on go, to a file beside it.
        optimizer: counts the steps, and its learning rate is the alarm's clock. Without it a training forward pass is a step.
        switch: preset, or ``AttentionSpec``, that a layer moves to when it runs away; one process only.
        wandb: a W&B run; each look adds a table.
        warm_up: steps at the start that the alarm does not look at: the learning rate's warm-up.
        sequences: of the batch that are looked at, the first ones.
        start: number of the first step, of a resumed run. Without a log of the steps before, the clock takes today's learning rate for
            them, and the alarm can judge from about 1.3 times ``start`` on.
        rule: the alarm's thresholds.
        say: called with a line when a layer runs away or a kernel made a NaN, and at the end with the largest logit.

    Layers are numbered by their calls in a forward pass. Raises ``ValueError`` for bad arguments, and in the first pass that makes no call.
    Warns at the end where the model made no training pass.
    """
    for name, value, least in (
        ("every", every, 1),
        ("sequences", sequences, 1),
        ("warm_up", warm_up, 0),
        ("start", start, 0),
    ):
        _require(type(value) is int and value >= least, name, value, f"a whole number of {least} or more")
    _require(isinstance(model, nn.Module), "model", model, "a torch.nn.Module")
    _require(callable(say), "say", say, "a function of one line")
    _require(isinstance(log, str | Path | None), "log", log, "a path or None")
    _require(
        isinstance(optimizer, torch.optim.Optimizer | None), "optimizer", optimizer, "a torch.optim.Optimizer or None"
    )
    _require(isinstance(rule, GrowthRule | None), "rule", rule, "a GrowthRule or None")
    _require(wandb is None or callable(getattr(wandb, "log", None)), "wandb", wandb, "a W&B run or None")
    try:
        if switch is not None:
            blind = "expected numerics that do not round stochastically, as no seed reaches them"
            refuse(stochastic(spec_of(switch)), f"numerics = {switch!r}: {blind}")
    except ValueError as error:
        raise ValueError(f"watch: switch: {error}") from None
    processes = torch.distributed.is_available() and torch.distributed.is_initialized()
    if switch is not None and processes:
        raise ValueError(f"watch: switch = {switch!r}: expected None, as each process would decide by itself")
    if processes and torch.distributed.get_rank():
        log = wandb = None
        warm_up = sys.maxsize  # it never judges
    earlier, cut = [] if log is None else read_log(Path(log)), None
    if earlier:
        last = earlier[-1]["step"]
        goes_on = f"a new file, as this one has steps to {last}; or start=, the step of the checkpoint that its run goes on from"
        _require(start > 0, "log", str(log), goes_on)
        cut = start if last >= start else None
        earlier = [record for record in earlier if record["step"] < start]
    if earlier:
        by = earlier[-1].get("clock_is")
        by_rate = "the optimizer, or a new log: the clock of this one is its summed learning rate"
        _require(optimizer is not None or by != RATE, "optimizer", optimizer, by_rate)
        by_steps = "None, or a new log: the clock of this one counts steps"
        _require(optimizer is None or by != STEPS, "optimizer", type(optimizer).__name__, by_steps)
    elif start > 0 and optimizer is not None:
        rate = float(optimizer.param_groups[0]["lr"])
        loaded = "above 0, as it stands for that of the steps before: load the states of optimizer and scheduler first"
        _require(rate > 0, "learning rate", rate, loaded)
    chosen = {"every": every, "log": log, "optimizer": optimizer, "switch": switch, "wandb": wandb, "warm_up": warm_up}
    more = {"sequences": sequences, "start": start, "earlier": earlier, "cut": cut, "say": say}
    return Watch(model, **chosen, **more, rule=rule)
