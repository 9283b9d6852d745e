"""Ways to a faster step that leave the maths alone; what each gains is measured in docs/performance.md."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import nn
from torch.torch_version import TorchVersion

from errors import UserError, invalid
from model import Operators
from training import distributed
from training.distributed import DEFAULT_BUCKET_MB, Distributed

if TYPE_CHECKING:
    from config import TrainConfig

Exchange = Literal["ddp", "in_place"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Switches of speed; all off is the plain path."""

    loss_chunk: int = 0
    """Tokens whose logits exist at once in training, the loss and its gradients made with them; 0 keeps all logits for autograd."""
    fused_norm: bool = False
    """Residual sums and layer norms in one operator, which stores no normalised copy for the backward pass."""
    fused_mlp: bool = False
    """GELU inside the products that make its input and read its gradient; exact GELU, no biases, 16-bit autocast."""
    float32_gradients: bool = False
    """Gradients of the blocks' weights leave their product in float32, not rounded to autocast's 16 bits and widened again."""
    sorted_embedding: bool = False
    """The token table's gradient summed over sorted tokens: a fixed order, without torch's one warp for all occurrences of a token."""
    late_values: bool = False
    """Read loss and gradient norm one step late: the device never waits, and it withholds a bad update by itself."""
    fused_clip: bool = False
    """Clip inside the fused AdamW, in place of a pass over all gradients before it."""
    fill_memory: bool = True
    """Deterministic mode only: fill new tensors with NaN, as torch does to show a read of what nothing has written."""
    compile_mode: CompileMode = "default"
    """Mode of torch.compile."""
    exchange: Exchange = "ddp"
    """Several processes: DDP copies gradients into buckets; in_place averages them where they lie, all by one call behind backward."""
    overlap: bool = False
    """Several processes: torch.compile around DDP, not inside it, so that gradients are exchanged while the backward pass goes on."""
    bucket_mb: int = DEFAULT_BUCKET_MB
    """Several processes: MiB of gradients that are exchanged at once; with overlap, torch.compile cuts the model's graph at as many."""
    coordinate_descent: bool = False
    """torch.compile tries neighbouring block sizes of its kernels."""

    def __post_init__(self) -> None:
        if self.loss_chunk < 0:
            raise invalid("speed.loss_chunk", self.loss_chunk, "0 or a positive number of tokens")
        if self.bucket_mb < 1:
            raise invalid("speed.bucket_mb", self.bucket_mb, "a whole number of 1 or more")
        for name, choices in (("compile_mode", CompileMode), ("exchange", Exchange)):
            if getattr(self, name) not in get_args(choices):
                raise invalid(f"speed.{name}", getattr(self, name), get_args(choices))
        if self.exchange == "in_place":
            for name, default in (("overlap", False), ("bucket_mb", DEFAULT_BUCKET_MB)):
                if getattr(self, name) != default:
                    raise invalid(f"speed.{name}", getattr(self, name), f"{default} with speed.exchange = 'in_place'")


def operators(config: SpeedConfig) -> Operators:
    """The switches that the model knows by the same names."""
    return Operators(**{field.name: getattr(config, field.name) for field in fields(Operators)})


def check(config: TrainConfig, device: torch.device) -> None:
    """Raise ``UserError`` for a switch that the rest of the config, or the device, cannot serve."""
    speed = config.speed
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        for name in ("loss_chunk", "fused_norm", "fused_mlp", "sorted_embedding"):
            if getattr(speed, name):
                raise UserError(f"speed.{name}: on CUDA it needs triton, which is not installed; switch it off")
    if speed.fused_mlp:
        _check_mlp(config, device)
    if speed.float32_gradients and config.precision.dtype == "float32":
        raise invalid("precision.dtype", "float32", "bfloat16 or float16 with speed.float32_gradients")
    of_compile = {name: getattr(speed, name) for name in ("compile_mode", "coordinate_descent", "overlap")}
    for name, value in of_compile.items():
        if value not in ("default", False) and not config.precision.compile:
            raise invalid("precision.compile", False, f"True with speed.{name} = {value!r}")
    fused = config.optim.fused == "on" or (config.optim.fused == "auto" and device.type == "cuda")
    guards: tuple[tuple[str, Any, bool, str], ...] = (
        ("optim.optimizer", config.optim.optimizer, config.optim.optimizer == "adamw", "adamw"),
        ("optim.fused", config.optim.fused, fused, "on (or auto on CUDA)"),
        ("precision.dtype", config.precision.dtype, config.precision.dtype != "float16", "bfloat16 or float32"),
    )
    for name, switch in (("late_values", speed.late_values), ("fused_clip", speed.fused_clip)):
        for field, value, fine, expected in guards:
            if switch and not fine:
                raise invalid(field, value, f"{expected} with speed.{name}")
    if speed.late_values and config.nonfinite.policy == "rollback":
        raise invalid("nonfinite.policy", "rollback", "stop, skip or continue with speed.late_values")
    if speed.late_values and config.model.qk_clip_tau:
        raise invalid("model.qk_clip_tau", config.model.qk_clip_tau, "0 with speed.late_values")


def _check_mlp(config: TrainConfig, device: torch.device) -> None:
    needs = (
        ("precision.dtype", config.precision.dtype, config.precision.dtype != "float32", "bfloat16 or float16"),
        ("model.bias", config.model.bias, not config.model.bias, "False"),
        ("model.activation", config.model.activation, config.model.activation == "gelu", "gelu"),
        ("model.n_embd", config.model.n_embd, config.model.n_embd % 8 == 0, "divisible by 8"),
    )
    for name, value, fine, expected in needs:
        if not fine:
            raise invalid(name, value, f"{expected} with speed.fused_mlp")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        raise UserError("speed.fused_mlp: it needs Hopper's copy engine (compute capability 9.0); switch it off")


def wrapped(model: nn.Module, config: TrainConfig, place: Distributed) -> tuple[nn.Module, nn.Module]:
    """``model`` compiled and given to DDP as the config says: (the one to train, the one to evaluate, which is outside DDP)."""
    bucket_mb, in_place = config.speed.bucket_mb, config.speed.exchange == "in_place"
    if in_place:
        distributed.equalise(model)
    if not config.precision.compile:
        return model if in_place else distributed.wrap(model, place, bucket_mb), model
    options = compile_options(config.speed) or None
    if TorchVersion(torch.__version__) < "2.13":
        announce_operators()
    compiled = cast(nn.Module, torch.compile(model, options=options))
    if config.speed.overlap and place.world_size > 1:
        # torch cuts the graph at DDP's buckets then; a compiled model inside DDP hands over all its gradients at the end.
        return cast(nn.Module, torch.compile(distributed.wrap(model, place, bucket_mb), options=options)), compiled
    return compiled if in_place else distributed.wrap(compiled, place, bucket_mb), compiled


def announce_operators() -> None:
    """Tell Inductor that it has nothing to put in place of this project's operators, as it finds out by itself when it meets one.

    Before torch 2.13 it then writes out the operator's arguments, for a log that nobody asked for, each with all that it was made from.
    Where residual sums are operators too (``fused_norm``), that is five times as much with every layer: 335 MB and 92 s for the loss
    behind six layers (torch 2.11), no end behind twelve.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace in ("attention", "fused"):
            overload = getattr(getattr(torch.ops, namespace), operator).default
            if overload not in lowerings:
                layout = tag_to_layout_constraint(get_layout_constraint_tag(overload, with_default=True))
                make_fallback(overload, layout_constraint=layout)


def compile_options(speed: SpeedConfig) -> dict[str, Any]:
    """``options`` of torch.compile: those of the mode (which cannot be given beside options) and the switches'."""
    options: dict[str, Any] = {}
    if speed.compile_mode != "default":
        from torch._inductor import list_mode_options  # loads the compiler, which most runs on a CPU never use

        options |= list_mode_options(speed.compile_mode)
    if speed.coordinate_descent:
        options["coordinate_descent_tuning"] = True
    return options
