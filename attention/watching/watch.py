"""A check for any training run: logits, entropy, one-hot rows and the error of delta of every attention, by layer and head.

    with watch(model, every=100, log="watch.jsonl", optimizer=optimizer):
        ...  # any training loop

It sees torch's and this package's ``scaled_dot_product_attention`` and, in Hugging Face models, any attention function but "eager" and
"flex_attention"; other attention hands over its tensors with ``look``. Every n-th step one forward and backward pass is looked at; the
others pay for two hooks. Training is not changed, but in three cases. What is compiled runs uncompiled where it is looked at, and may round
elsewhere. Torch's encoder layers and attention modules in eval mode leave their inference path there, and give other values at padded
positions (it warns). Where a query is its key or value, too, outside a fused kernel, gradients are added in another order. A failure of the
watch itself is one warning.

A layer is flagged by the rule of ``growth.py``, on largest logits.

Legend: B batch, H heads, G key heads, T queries, S keys, D head dim.
"""

import contextlib
import functools
import json
import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..huggingface_models import Hook
from ..user_error import invalid
from .growth import FMA_LOGIT, LARGE_LOGIT, RATE, STEPS, GrowthAlarm, GrowthRule
from .log import BACK_TO, close_log, layers_of, named, open_log, read_log, strict, table_of
from .look import Look, of_this_call
from .measure import as_lists
from .passes import COMPILED, QKV, Pass, compiled_within, may_attend, plain_mask, within_checkpoint
from .verdict import BELOW, control_says

SHOWN = 8
"""Modules named in a line."""
PATIENCE = 999
"""A step may take the gradients of so many passes."""


class Watch:
    """Made by ``watch``. As a context manager it is closed with the block. Rows of the last look: ``record``."""

    def __init__(self, model: nn.Module, **chosen: Any):
        self._model = model
        self._every, self._sequences, self._warm_up = chosen["every"], chosen["sequences"], chosen["warm_up"]
        self._wandb, self._say_to = chosen["wandb"], chosen["say"]
        self._optimizer = optimizer = chosen["optimizer"]
        earlier = chosen["earlier"]
        self._clock_is = STEPS if optimizer is None else RATE
        self._rate = (lambda: 1.0) if optimizer is None else functools.partial(_rate, optimizer)
        last = earlier[-1] if earlier else {"step": 0, "clock": 0.0}
        self._clock: float = last["clock"]
        self._step, self._gap = chosen["start"], chosen["start"] - last["step"]
        """Steps of no record. The clock takes them in at the first pass: until then a Trainer loads its optimizer's state."""
        self._counts, self._passes, self._first = optimizer is None, 0, chosen["start"]
        self._versions: list[int] = []
        """Of the weights in the first pass."""
        self._stepped_since = False
        """Whether an optimizer that holds some of them has made a step since."""
        self._log = open_log(Path(chosen["log"])) if chosen["log"] else None
        self._in_eval_mode = 0
        """Passes with gradients."""
        self._back_to = chosen["back_to"]
        """Step from which on the log's records are to count no more; the next record says so."""
        self.record: dict[str, Any] = {}
        self._alarm = GrowthAlarm(chosen["rule"], self._warm_up, self._clock_is)
        self.flagged = self._alarm.flagged
        """Step at which a layer was flagged."""
        self._largest: tuple[float, int, int] | None = None
        """Largest logit that was judged, its step and its layer."""
        self._fma_logit = FMA_LOGIT
        self._not_finite = False
        self._is_first = self._warm_up < sys.maxsize
        """Of several processes the one that judges, and warns."""
        self._warned: set[str] = set()
        """What of the watch itself has failed."""
        self._hidden: list[str] | None = None
        """Modules that hide their attention; None before the first look."""
        self._numbered: tuple[int, int] | None = None
        """Calls of the last look that it numbered itself, and its step."""
        self._looked_at = -1
        self._look: Look | None = None
        self._recall(earlier)
        self._lock, self._process = threading.RLock(), os.getpid()
        self._local = threading.local()
        """``seeing``: while a pass of training runs, what looks at its calls, or None."""
        self._seeing: set[Pass] = set()
        """Passes of all threads."""
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(Hook(self._begin)),
            model.register_forward_hook(Hook(self._end), always_call=True),
        ]
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_post_hook(Hook(self._stepped)))
            _count_skipped(self)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:  # a model may keep it, for ``look``
        return Unwatched, ()

    def close(self) -> None:
        """Take the hooks away and close the file."""
        if not self._hooks or os.getpid() != self._process:
            return
        self._leave()
        if self._passes and not self.record and self._looked_at < 0:
            self._say(f"watch: no step was looked at (every = {self._every})")
        elif self._looked_at >= 0 and self._step - self._looked_at > 2 * self._every:
            self._say(f"watch: no step was looked at after {self._looked_at}: the model was compiled, or not called")
        if self._largest is None and self._not_finite:
            self._say("watch: no look had finite logits")
        if self._largest is not None:
            logit, step, layer = self._largest
            where = f"at step {step} in attention layer {layer}, one of {len(self.record['max_logit'])}"
            self._say(
                f"watch: largest logit {logit:.4g}, {where}{_advice(logit, self._fma_logit, self.record.get('attention'))}"
            )
        if not self._passes:
            self._warn("passes", "no forward pass with gradients in training mode: expected what the loop calls")
        self._warn_without_steps(1)

    def _leave(self) -> None:
        _count_no_more(self)
        while self._hooks:
            self._hooks.pop().remove()
        with self._lock:
            while self._seeing:
                self._cut_short(self._seeing.pop())
            self._write()
            self._close_log()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            with contextlib.suppress(OSError):
                close_log(log)

    # ---- failures, which are the watch's own and not the training's

    def _guard(self, run: Callable[[], object], what: str = "measuring") -> None:
        try:
            # Selective checkpointing, a mode, tells operations apart by their order. torch has no public way past modes.
            with _disable_current_modes():
                run()
        except Exception as error:
            self._warn(what, f"{what} failed, and the training goes on: {type(error).__name__}: {error}")

    def _warn(self, what: str, message: str) -> None:
        if self._is_first and what not in self._warned:
            self._warned.add(what)
            warnings.warn(" ".join(f"watch: {message}".split()), stacklevel=_level_of_the_caller())

    def _warn_without_steps(self, passes: int) -> None:
        if self._passes > passes and not self._counts and self._step == self._first:
            none = f"the optimizer made no step in {self._passes} forward passes"
            self._warn("steps", f"{none}: expected the one that the loop steps, unless one step takes more passes")

    def _refuse(self, what: str, message: str) -> None:
        """``ValueError`` in the first pass; later, where a run would be lost by it, a warning."""
        if self._passes <= 1:
            self._leave()
            raise ValueError(f"watch: {message}")
        self._warn(what, message)

    def _say(self, line: str) -> None:
        self._guard(lambda: self._say_to(line), "say")

    # ---- when

    def _stepped(self, *_: Any) -> None:
        with self._lock:
            self._write()
            self._step += 1
            self._clock += self._rate()

    def _begin(self, model: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            if self._passes == 0 and model is self._model and model.training and torch.is_grad_enabled():
                raise ValueError(COMPILED)
            return  # compiled in the middle of a run: close() says so
        if model is not self._model or os.getpid() != self._process:
            return
        interrupted: Pass | None = self._local.__dict__.pop("seeing", None)
        if interrupted is not None:  # torch ran no hook at its end, as after Ctrl-C
            self._cut_short(interrupted)
        # Activation checkpointing calls the model again in the backward pass; a reentrant one had no gradients before.
        again = torch._C._current_graph_task_id() != -1 and within_checkpoint()
        if again or not torch.is_grad_enabled():
            return
        if not model.training:
            self._in_eval_mode += 1
            if self._in_eval_mode == 3 and not self._passes:
                passes = "the first three forward passes with gradients were in eval mode, in which it does not look"
                self._warn("eval mode", f"{passes}: if they train the model, call model.train() first")
            return
        self._local.seeing = None
        with self._lock:
            self._warn_without_steps(PATIENCE)
            self._passes += 1
            if self._counts and self._passes <= 2:
                self._note_unchanged(model)
            if self._gap:
                self._clock, self._gap = self._clock + self._gap * self._rate(), 0
                if not self._clock > 0 and self._is_first:
                    stands = "it stands for that of the steps before: load the states of optimizer and scheduler first"
                    self._refuse("rate", f"learning rate = {self._rate()}: expected above 0, as {stands}")
            due = self._step % self._every == 0 and self._step != self._looked_at
            if not due and not (self._passes == 1 and compiled_within(model)):  # whose refusal may not come later
                return
            self._write()
            if self._optimizer is not None:
                _count_skipped(self)  # again: whoever had wrapped it before may have undone both
            look = self._look = Look(self._step, self._clock, self._sequences, self._guard, self._complete)
            self._looked_at = self._step
            seeing = self._local.seeing = Pass(look, self._attend)
            self._seeing.add(seeing)
        try:
            if self._hidden is None:
                self._warn_of_inference_paths(model)
            seeing.open(model, names=self._hidden is None)
        except Exception as error:
            refused = isinstance(error, ValueError)
            if refused and self._passes == 1:
                raise
            self._cut_short(seeing)
            self._local.seeing, self._looked_at = None, self._step
            failed = f"measuring failed, and the training goes on: {type(error).__name__}: {error}"
            self._warn("compiled" if refused else "open", str(error).removeprefix("watch: ") if refused else failed)

    def _note_unchanged(self, model: nn.Module) -> None:
        """torch counts what is written to a tensor, but not by a fused step or through ``.data``: a hook tells an optimizer's steps."""
        versions = [parameter._version for parameter in model.parameters() if parameter.requires_grad]
        if self._passes == 1:
            watched = weakref.ref(self)  # the hook is torch's, and would keep the model

            def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                if (watch := watched()) is not None and not held.isdisjoint(map(id, watch._model.parameters())):
                    watch._stepped_since = True

            self._first_pass = register_optimizer_step_post_hook(stepped)
            self._hooks.append(self._first_pass)
            weakref.finalize(self, self._first_pass.remove)
        else:
            self._first_pass.remove()
            if versions and versions == self._versions and not self._stepped_since:
                each = "each forward pass counts as a step: give optimizer= where a step takes several"
                self._say(f"watch: no weight is seen to change between the first two passes, and {each}")
        self._versions = versions

    def _warn_of_inference_paths(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nn.TransformerEncoderLayer | nn.MultiheadAttention) and not module.training:
                why = "torch's inference path, if it takes that, is not taken where it is looked at: padded positions get other values"
                return self._warn("inference", f"{name or 'the model'} is in eval mode: {why}")

    def _cut_short(self, seeing: Pass) -> None:
        """A pass did not come to its end, and may be tried again."""
        seeing.close()
        with self._lock:
            self._seeing.discard(seeing)
            if seeing.look is self._look:
                self._looked_at, self._look = -1, None

    def _end(self, model: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or model is not self._model or os.getpid() != self._process:
            return
        if not hasattr(self._local, "seeing"):
            return
        seeing: Pass | None = self._local.__dict__.pop("seeing")
        failed = output is None and sys.exc_info()[1] is not None
        if seeing is not None and failed:
            self._cut_short(seeing)
        elif seeing is not None:
            seeing.close()
            with self._lock:
                self._seeing.discard(seeing)
            self._saw(seeing)
        if self._counts and not failed:
            with self._lock:
                self._step, self._clock = self._step + 1, self._clock + 1

    def _saw(self, seeing: Pass) -> None:
        if seeing.recompiled:  # torch's CheckpointError in the backward pass: what ran uncompiled runs compiled there
            compiled = "compiled blocks within activation checkpointing"
            self._refuse("recompiled", f"{compiled}: expected torch.compile around the checkpoint, or none")
        hidden = seeing.hidden if seeing.seen or seeing.hidden else may_attend(self._model)
        kinds = [f"{name} ({type(self._model.get_submodule(name)).__name__})" for name in hidden[:SHOWN]]
        kinds += [f"{len(hidden) - SHOWN} more"] * (len(hidden) > SHOWN)
        names = ", ".join(kinds) or "no module looks like it"
        if not seeing.seen:
            self._refuse(
                "nothing seen",
                "this forward pass made no call of scaled_dot_product_attention that it can see (in Hugging Face: "
                'attn_implementation="sdpa", or the name of huggingface.register() where a model refuses that; '
                "torch.nn.MultiheadAttention with need_weights=False; attention of another kind "
                f"calls look(), docs/diagnosis.md); attention that was not seen: {names}",
            )
        if self._hidden is None:
            self._hidden = seeing.hidden
            if self._hidden:
                self._say(
                    f"watch: attention of {len(self._hidden)} module(s) is not seen: {names}: torch.nn.MultiheadAttention needs "
                    "need_weights=False, another kind calls look() (docs/diagnosis.md)"
                )
        if count := seeing.seen - seeing.given:
            before, earlier = self._numbered or (count, 0)
            self._numbered = count, seeing.look.step
            if count != before:
                calls = f"calls of attention = {count} at step {seeing.look.step}, {before} at step {earlier}"
                numbers = "layers are numbered by their calls, so a number is not always the same layer"
                self._warn("calls", f"{calls}: expected as many, as {numbers}: skip none at random")
        if not seeing.look.awaited:  # as in reentrant checkpointing
            self._complete(seeing.look)

    # ---- what

    def look(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None = None,
        *,
        layer: int | None = None,
        causal: bool = False,
        scale: float | None = None,
        softcap: float = 0.0,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
        layout: Literal["BHTD", "BTHD"] = "BHTD",
    ) -> None:
        """Hand over a call of attention that ``watch`` does not see, from inside the model. Outside of a look it does nothing.

        Of ``flash_attn_varlen_func`` give one sequence, ``q[:n][None]``, without ``o``, to measure logits alone. To measure all, give the
        packed batch as one sequence, with ``layout="BTHD"`` and a ``mask`` of its sequences. Make ``q_ = q[None]`` first: attention reads
        ``q_[0]``, ``look`` gets ``q_``, and so for k and v. After it the model reads ``o_[0]`` of ``o_ = o[None]``.

        Args:
            q, k, v: as attention reads them: [B, H, T, D], [B, G, S, D], [B, G, S, D], or as flash_attn has them
                (``layout="BTHD"``); G divides H. Where the model uses q elsewhere, too, give attention and ``look`` one ``q.view_as(q)``.
            o: the tensor that attention returned and the model uses; without it gradients are not measured.
            layer: its number; by default the calls of a pass are counted.
            causal: query t sees keys up to t.
            scale: of Q K^T; default 1 / sqrt(D).
            softcap: c > 0: the scores are c tanh(S / c).
            mask: as torch's ``attn_mask``, bool or floating, broadcast to [B, H, T, S].
            sinks: [H], one more logit of each row, without a value.
            dropout: probability of the dropout of P, as torch's ``dropout_p``. Which of P it drops is not known: above 0 gradients and O
                are not measured, and the record is none of the three that the verdict NO needs, unless this layer is frozen; the other
                columns are of P without it.

        Raises ``ValueError`` for arguments that cannot be, in the first pass; later that is one warning.
        """
        if torch.compiler.is_compiling():
            return
        seeing: Pass | None = getattr(self._local, "seeing", None)
        if seeing is None or seeing.over:
            return
        number, seeing.seen, seeing.given = seeing.seen, seeing.seen + 1, seeing.given + (layer is not None)
        taken = seeing.look
        try:
            numbers = {"causal": causal, "scale": scale, "softcap": softcap, "dropout": dropout}
            _check_settings(_check_look(q, k, v, o, layer, layout), mask, sinks, numbers)
            if layer is not None and layer in taken:
                itself = "calls of torch's scaled_dot_product_attention need no look(), as watch sees them itself"
                raise ValueError(f"layer = {layer}: expected each layer once in a forward pass; {itself}")
        except ValueError as error:
            return self._refuse("look", f"look: {error}")
        number = taken.number(number) if layer is None else layer
        taken.numerics.add(None)
        flags: dict[str, Any] = {"causal": bool(causal), "scale": scale, "softcap": softcap or 0.0, "foreign": True}
        flags |= {"sinks": sinks, "dropout": float(dropout or 0.0)}
        heads_at = -3 if layout == "BHTD" else -2
        self._guard(lambda: taken.keep(number, q, k, v, o, mask=mask, heads_at=heads_at, **flags))

    def _attend(self, seeing: Pass, number: int, run: Callable[..., Tensor], named: dict[str, Any]) -> Tensor:
        """A call that was seen, ``number`` in its pass: computed and kept."""
        qkv = [named[name] for name in QKV]

        def alias() -> None:
            qkv[:] = of_this_call(*qkv)

        self._guard(alias)
        o, look = run(*qkv), seeing.look
        if o.numel() == 0:  # a batch of nothing has nothing to measure
            return o
        layer = look.number(number)

        def keep() -> None:
            look.numerics.add(named.get("ours"))
            causal, mask = bool(named["is_causal"]), plain_mask(named, o.device)
            cast = named.get("torchs") and torch.is_autocast_enabled(o.device.type)
            if cast and mask is not None and mask.is_floating_point():
                mask = mask.to(o.dtype)
            flags = {name: named[name] for name in ("scale", "softcap", "sinks")}
            flags |= {"causal": causal, "dropout": named["dropout_p"], "grouped": named["enable_gqa"]}
            flags["foreign"] = not (named.get("torchs") or named.get("ours"))
            look.keep(layer, *qkv, o, mask=mask, kernel=named.get("kernel"), **flags)

        self._guard(keep)
        return o

    # ---- what is said

    def _complete(self, look: Look) -> None:
        with self._lock:
            if look is self._look:
                self._write()

    def _write(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            self._guard(lambda: self._record(look, look.finish()))

    def _record(self, look: Look, found: dict[int, dict[str, Tensor]]) -> None:
        if not found:
            return
        lists = as_lists(list(found.values()))
        more: dict[str, Any] = {"clock_is": self._clock_is}
        if list(found) != list(range(len(found))):
            more["layers"] = list(found)
        if self._hidden:
            more["hidden"] = len(self._hidden)
        more |= {name: of for name in ("frozen", "frozen_q") if (of := getattr(look, name))}
        if None not in look.numerics and not self._hidden:
            more["attention"] = ", ".join(sorted(filter(None, look.numerics)))
        if look.fma_logit < FMA_LOGIT:
            more["fma_logit"] = look.fma_logit
        if look.softcap:
            more["softcap"] = [look.softcap.get(layer, 0.0) for layer in found]
        if self._back_to is not None:
            more[BACK_TO], self._back_to = self._back_to, None
        self.record = {"step": look.step, "clock": look.clock, **more, **lists}
        self._write_log()
        if self._wandb is not None:
            self._write_wandb()
        self._judge(self.record)
        for layer, made in zip(found, lists.get("nan_made", []), strict=False):
            if made and any(made):
                self._say(f"step {look.step}: attention layer {layer}: its kernel made a NaN of finite q, k, v and dO")

    def _write_log(self) -> None:
        if self._log is None:
            return
        try:
            self._log.write(json.dumps(strict(self.record)) + "\n")
            self._log.flush()
        except OSError as error:
            self._close_log()
            step = self.record["step"]
            self._warn("log", f"the log ends before step {step}, and the training goes on: {error}")

    def _write_wandb(self) -> None:
        try:
            # Not committed, it goes into the loop's own next row: W&B's step is the loop's.
            self._wandb.log(table_of(self.record), commit=False)
        except Exception as error:
            self._wandb = None
            goes_on = f"from step {self.record['step']} on, and the training goes on"
            self._warn("W&B", f"W&B gets no table {goes_on}: {type(error).__name__}: {error}")

    def _recall(self, earlier: Sequence[dict[str, Any]]) -> None:
        """Go on from a file's records: which layers were flagged, and what growth is measured from."""
        say, self._say_to = self._say_to, lambda line: None
        for record in earlier:
            self._judge(record)
        self._say_to, self._largest, self._not_finite = say, None, False
        if self.flagged:
            say(f"watch: flagged by the log before step {self._first}: attention {named(sorted(self.flagged))}")
        if earlier and self._first - earlier[-1]["step"] > 2 * self._every:
            say(f"watch: the log ends at step {earlier[-1]['step']}, and this run starts at {self._first}")
        if self._first > self._warm_up and not self._alarm.has_begun:
            from_step = math.ceil(self._first * self._alarm.rule.window)
            say(f"watch: started at step {self._first}: until about step {from_step:,} it sees sudden growth only")

    def _judge(self, record: dict[str, Any]) -> None:
        step, logits = record["step"], dict(zip(layers_of(record), record["max_logit"], strict=True))
        if step < self._warm_up:
            return
        if not all(math.isfinite(logit) for logit_H in logits.values() for logit in logit_H):
            if not self._not_finite:
                self._say(f"step {step}: attention's logits are not finite; the alarm waits until they are")
            self._not_finite = True
            return
        self._not_finite = False
        largest = max((max(logit_H), step, layer) for layer, logit_H in logits.items())
        attention = record.get("attention")
        before = "" if self._largest is None else _advice(self._largest[0], self._fma_logit, attention)
        self._fma_logit = min(self._fma_logit, record.get("fma_logit", FMA_LOGIT))
        self._largest = max(self._largest or largest, largest)
        if (advice := _advice(self._largest[0], self._fma_logit, attention)) != before:
            self._say(f"step {step}: attention layer {largest[2]}: largest logit {largest[0]:.4g}{advice}")
        for found in self._alarm.update(step, record["clock"], logits):
            self._say(f"{found}; {control_says(attention, self._largest[0], self._fma_logit) or 'run the control'}")


HOOKS = "_optimizer_step_post_hooks"
"""Of an optimizer, by which it is known: a wrapper that hands on every attribute has those of what is within."""
_counting: "weakref.WeakSet[Watch]" = weakref.WeakSet()
"""Open watches with an optimizer."""
_COUNTING_LOCK = threading.Lock()
_scalers_step: Any = None
"""What ``GradScaler.step`` is while there are any, unless others have wrapped it since."""


def _count_skipped(watch: Watch) -> None:
    """Wrap the step of ``GradScaler`` while any watch has an optimizer: a step that it skips runs no hook of the optimizer."""
    global _scalers_step
    with _COUNTING_LOCK:
        _counting.add(watch)
        scaler: Any = torch.amp.GradScaler
        if scaler.step is not _scalers_step:
            scaler.step = _scalers_step = _counted(scaler.step)


def _count_no_more(watch: Watch) -> None:
    with _COUNTING_LOCK:
        _counting.discard(watch)
        scaler: Any = torch.amp.GradScaler
        # Where others have wrapped ours it stays, and counts for nobody.
        if not _counting and scaler.step is _scalers_step:
            scaler.step = scaler.step.__wrapped__


def _counted(step: Any) -> Any:
    """``step``, after which watches of its optimizer that saw none have made one."""

    @functools.wraps(step)
    def scalers_step(scaler: Any, optimizer: Any, *args: Any, **more: Any) -> Any:
        hooks = getattr(_innermost(optimizer), HOOKS, None)
        with _COUNTING_LOCK:
            watches = [(watch, watch._step) for watch in _counting if getattr(watch._optimizer, HOOKS) is hooks]
        made = step(scaler, optimizer, *args, **more)
        for watch, before in watches:
            if watch._step == before:
                watch._stepped()
        return made

    return scalers_step


class Unwatched:
    """What a copy of a ``Watch`` is, as in a copy of the model that keeps it: it looks at nothing."""

    def look(self, *_: Any, **__: Any) -> None:
        return None

    def close(self) -> None:
        return None


def _level_of_the_caller() -> int:
    """How far above who asks the first frame is that is neither torch's nor of this package."""
    frame, level, passed = sys._getframe(1), 1, ("torch", __name__.partition(".")[0])
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in passed:
        frame, level = frame.f_back, level + 1
    return level


def _advice(logit: float, fma_logit: float, attention: str | None) -> str:
    past = logit > fma_logit
    if not past and logit <= LARGE_LOGIT:
        return ""
    bound = f"; past {fma_logit:,.0f}" if past else f"; above {LARGE_LOGIT:,.0f}"
    run = f"run the control, {BELOW}" if past else "run the control"
    return f"{bound}: {control_says(attention, logit, fma_logit) or run}"


def _check_look(q: Tensor, k: Tensor, v: Tensor, o: Tensor | None, layer: int | None, layout: str) -> list[int]:
    """Gives [B, H, T, S]."""
    if layout not in ("BHTD", "BTHD"):
        raise ValueError(f"layout = {layout!r}: expected one of BHTD, BTHD")
    if layer is not None and (type(layer) is not int or layer < 0):
        raise ValueError(f"layer = {layer!r}: expected a whole number of 0 or more")
    heads, length = (1, 2) if layout == "BHTD" else (2, 1)
    given = {"q": q, "k": k, "v": v} | ({} if o is None else {"o": o})
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.ndim != 4:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} = {shape}: expected a tensor [{', '.join(layout)}]")
    B, H, T, S = q.shape[0], q.shape[heads], q.shape[length], k.shape[length]
    fits = {
        "k": k.shape[0] == B and k.shape[3] == q.shape[3] and H % max(k.shape[heads], 1) == 0,
        "v": v.shape[0] == B and v.shape[length] == S and v.shape[heads] == k.shape[heads],
        "o": o is None or (o.shape[0], o.shape[heads], o.shape[length], o.shape[3]) == (B, H, T, v.shape[3]),
    }
    for name, right in fits.items():
        if not right:
            raise ValueError(
                f"{name} = {list(given[name].shape)}: expected a shape that fits q {list(q.shape)}, {layout}"
            )
    return [B, H, T, S]


_LARGEST = sys.float_info.max
_NUMBERS = {
    "causal": (-math.inf, math.inf, "True or False"),
    "scale": (-_LARGEST, _LARGEST, "a finite number or None"),
    "softcap": (0, _LARGEST, "a finite number of 0 or more"),
    "dropout": (0, 1, "a number from 0 to 1"),
}


def _check_settings(shape: list[int], mask: Tensor | None, sinks: Tensor | None, numbers: dict[str, Any]) -> None:
    for name, (least, most, expected) in _NUMBERS.items():
        if numbers[name] is not None and not least <= _number(numbers[name]) <= most:
            raise ValueError(f"{name} = {numbers[name]!r}: expected {expected}")
    if sinks is not None and (not isinstance(sinks, Tensor) or sinks.shape != (shape[1],)):
        given = list(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ValueError(f"sinks = {given}: expected a tensor [H], H = {shape[1]}")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(f"mask is {getattr(mask, 'dtype', type(mask).__name__)}: expected a bool or floating tensor")
    if mask.ndim > 4 or any(size not in (1, n) for size, n in zip(mask.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"mask = {list(mask.shape)}: expected a shape that broadcasts to {shape}")


def _number(x: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return math.nan if isinstance(x, str) else float(x)
    return math.nan


def _require(right: bool, name: str, value: object, expected: str) -> None:
    if not right:
        raise invalid(f"watch: {name}", value, expected)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """The largest of its groups: one may be frozen."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _innermost(optimizer: Any) -> Any:
    """The optimizer whose steps can be counted: the one inside Accelerate's, which is an instance of torch's class without its hooks."""
    while optimizer is not None and not hasattr(optimizer, HOOKS):
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if isinstance(inner, torch.optim.Optimizer) else None
    return optimizer


def watch(
    model: nn.Module,
    *,
    every: int = 100,
    log: str | Path | None = None,
    optimizer: torch.optim.Optimizer | None = None,
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
        every: steps between two looks. Where modules inside are compiled, the first pass is looked at, too.
        log: JSONL file; each look appends a line: step, clock, ``attention`` (numerics of ``replace_sdpa``, ``register`` or our function,
            where all calls have one and none is hidden), ``softcap`` (where a layer has one: by layer, 0 for none; logits are those after
            it), and ``COLUMNS`` by layer and head. From records before ``start`` the alarm takes growth, and which layers were flagged;
            of those from ``start`` on the next record says that they count no more.
        optimizer: counts the steps, those that a ``GradScaler`` skips, too, and its largest learning rate is the alarm's clock. Without
            it a training forward pass is a step.
        wandb: a W&B run; a look adds a table to the row that the loop logs next (after two looks, the later one's).
        warm_up: steps at the start that the alarm ignores: the learning rate's warm-up.
        sequences: how many of the batch are looked at, from the first.
        start: number of the first step, of a resumed run. Without a log of the steps before, the clock takes the first pass's learning
            rate for them, and until about 1.3 times ``start`` the alarm sees sudden growth only.
        rule: the alarm's thresholds.
        say: called with each line: when a logit first passes 1,000 or the FMA threshold, a layer is flagged or a kernel made a NaN, on
            what is not seen or not judged, and at the end with the largest logit.

    Layers are numbered by their calls in a forward pass. Raises ``ValueError`` for bad arguments, and in the first pass that makes no call.
    Warns where the model made no training pass: in eval mode, as ``from_pretrained`` gives it, it looks at nothing.
    """
    counts = ("every", every, 1), ("sequences", sequences, 1), ("warm_up", warm_up, 0), ("start", start, 0)
    for name, value, least in counts:
        _require(type(value) is int and value >= least, name, value, f"a whole number of {least} or more")
    _require(isinstance(model, nn.Module), "model", model, "a torch.nn.Module")
    _require(callable(say), "say", say, "a function of one line")
    _require(isinstance(log, str | Path | None), "log", log, "a path or None")
    _require(isinstance(optimizer, torch.optim.Optimizer | None), "optimizer", optimizer, "an optimizer or None")
    given, optimizer = optimizer, _innermost(optimizer)
    expected = "one of torch, or of Accelerate around one"
    _require((given is None) == (optimizer is None), "optimizer", type(given).__name__, expected)
    rated = optimizer is None or all(group.get("lr") is not None for group in optimizer.param_groups)
    _require(rated, "optimizer", type(optimizer).__name__, "one whose groups all have a learning rate, or None")
    _require(isinstance(rule, GrowthRule | None), "rule", rule, "a GrowthRule or None")
    _require(wandb is None or callable(getattr(wandb, "log", None)), "wandb", wandb, "a W&B run or None")
    processes = torch.distributed.is_available() and torch.distributed.is_initialized()
    if processes and torch.distributed.get_rank():
        log = wandb = None
        say, warm_up = (lambda line: None), sys.maxsize  # it never judges
    earlier, back_to = [] if log is None else read_log(Path(log)), None
    if earlier:
        last = earlier[-1]["step"]
        goes_on = f"a new file, as this one has steps to {last}; or start=, the step of the checkpoint that its run goes on from"
        _require(start > 0, "log", str(log), goes_on)
        back_to = start if last >= start else None
        earlier = [record for record in earlier if record["step"] < start]
    if earlier:
        by = earlier[-1].get("clock_is")
        by_rate = "the optimizer, or a new log: the clock of this one is its summed learning rate"
        _require(optimizer is not None or by != RATE, "optimizer", optimizer, by_rate)
        by_steps = "None, or a new log: the clock of this one counts steps"
        _require(optimizer is None or by != STEPS, "optimizer", type(optimizer).__name__, by_steps)
    chosen = {"every": every, "log": log, "optimizer": optimizer, "wandb": wandb, "warm_up": warm_up}
    more = {"sequences": sequences, "start": start, "earlier": earlier, "back_to": back_to, "say": say}
    return Watch(model, **chosen, **more, rule=rule)
