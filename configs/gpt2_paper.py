"""The recipe of arXiv 2510.04212, section 3.1: GPT-2 124M on OpenWebText, BF16, flash attention; 4 GPUs. We have not run it.

The numerics are the base `published`, our closest emulation of the published code (attention/README.md).

torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_paper.py --data.record replay_batches/paper --run.name failing
"""

from attention import AttentionConfig, AttentionSpec
from config import RunConfig, TrainConfig
from data.batches import DataConfig
from model import ModelConfig
from training.checkpoint import CheckpointConfig
from training.evaluate import EvaluationConfig
from training.optim import OptimConfig
from training.precision import PrecisionConfig

config = TrainConfig(
    run=RunConfig(name="gpt2_paper", steps=600_000),
    model=ModelConfig(),  # GPT-2 124M
    attention=AttentionConfig(default=AttentionSpec(preset="flash", numerics="published")),
    data=DataConfig(
        dataset="data/tokens/openwebtext",
        sequence_length=1024,
        micro_batch=32,
        global_batch=4 * 32 * 4,  # GPUs x sequences x accumulation = 512 sequences, 524,288 tokens a step
    ),
    optim=OptimConfig(
        lr=1e-3,
        min_lr=1e-5,
        warmup_steps=2000,
        decay_steps=600_000,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.0,
        grad_clip=1.0,
    ),
    precision=PrecisionConfig(dtype="bfloat16", compile=True),
    evaluation=EvaluationConfig(every=250),
    checkpoint=CheckpointConfig(every=1000, keep_last=3, keep_every=10_000),
)
