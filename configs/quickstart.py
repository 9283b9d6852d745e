"""An explosion on a CPU: a byte-level GPT of 0.1M parameters whose attention output is rounded to one mantissa bit.

Only attention is rounded (numerics "microcosm"); all else is FP32. With delta = rowsum(dO * O) the loss explodes, with
delta = rowsum(P * dP) on the same batches it does not. The source of the error here is that dO is computed through O's own
rounding error; it shows the chain and the cure, not where BF16's bias comes from.
"""

from attention import AttentionConfig, AttentionSpec
from config import RunConfig, TrainConfig
from data.batches import DataConfig
from model import ModelConfig
from training.checkpoint import CheckpointConfig
from training.evaluate import EvaluationConfig
from training.optim import OptimConfig
from training.precision import PrecisionConfig
from training.telemetry import TelemetryConfig

config = TrainConfig(
    # A CPU even beside a GPU: one thread gives the same bits on every machine of a kind.
    run=RunConfig(name="quickstart", steps=1500, log_every=10, device="cpu"),
    model=ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=256),
    attention=AttentionConfig(
        flash_backend="flash_reference", default=AttentionSpec(preset="flash", numerics="microcosm")
    ),
    data=DataConfig(
        dataset="data/tokens/stdlib",
        sequence_length=64,
        global_batch=16,  # 1,024 bytes a step
        micro_batch=16,
        validation_sequences=160,
    ),
    optim=OptimConfig(
        lr=6e-3, warmup_steps=50, schedule="constant", beta1=0.9, beta2=0.95, weight_decay=0.0, grad_clip=1.0
    ),
    precision=PrecisionConfig(dtype="float32"),
    evaluation=EvaluationConfig(every=100),
    checkpoint=CheckpointConfig(every=0),
    telemetry=TelemetryConfig(every=10),
)
