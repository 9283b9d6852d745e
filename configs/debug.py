"""A run of seconds on any machine: 0.1M parameters on the embedded data set, to try commands with."""

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
    run=RunConfig(name="debug", steps=30),
    model=ModelConfig(n_layer=2, n_head=4, n_embd=64, block_size=64, vocab_size=256),
    attention=AttentionConfig(flash_backend="flash_reference", default=AttentionSpec(preset="flash")),
    data=DataConfig(sequence_length=64, global_batch=8, micro_batch=4, validation_sequences=16),
    optim=OptimConfig(lr=1e-3, warmup_steps=10, decay_steps=1000),
    # BF16 as on a GPU, so that the roundings are there to be seen.
    precision=PrecisionConfig(dtype="bfloat16"),
    evaluation=EvaluationConfig(every=10),
    checkpoint=CheckpointConfig(every=10),
    telemetry=TelemetryConfig(every=10),
)
