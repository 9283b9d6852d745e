"""A short recipe for the failure of BF16 flash attention: GPT-2 124M, 32 sequences a step, lr 2e-3, one GPU.

The learning rate lies near plain instability: a failure counts only when its control (flash_fp32_o or flash_delta_from_p) is stable on the
same batches and data. It runs on any text. On the text below 3 of 6 runs failed by step 6,000 (experiments/one_wheel), on a
larger one later if at all (experiments/matched_pairs). With --model.activation swiglu it fails sooner (experiments/who_is_at_risk).

    pip download --no-deps --dest build ansible==10.7.0
    python scripts/make_text.py build/ansible-10.7.0-py3-none-any.whl --out build/ansible.txt
    python scripts/prepare_data.py text build/ansible.txt --val-fraction 0.01
    python train.py configs/fast_failure.py --model.activation swiglu --data.replay replay_batches/ansible --run.seed 22 --run.steps 2200

On another GPU, or with another torch, seed 22 may fail later or not. Other seeds that failed by 2,100 take, in place of recording and seed,
--run.seed N --data.seed N with N = 21, 24 or 25.
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
    run=RunConfig(name="fast_failure", steps=13_000),
    model=ModelConfig(),  # GPT-2 124M
    attention=AttentionConfig(default=AttentionSpec(preset="flash")),
    data=DataConfig(
        dataset="data/tokens/ansible",
        sequence_length=1024,
        global_batch=32,  # no accumulation: 32,768 tokens a step
        micro_batch=32,
    ),
    optim=OptimConfig(
        lr=2e-3,
        min_lr=1e-5,
        warmup_steps=1000,
        decay_steps=600_000,  # the paper's cosine, all but flat over this run
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.0,
        grad_clip=1.0,
    ),
    precision=PrecisionConfig(dtype="bfloat16", compile=True),
    evaluation=EvaluationConfig(every=500),
    checkpoint=CheckpointConfig(every=1000, keep_last=2),
    telemetry=TelemetryConfig(every=100),
)
