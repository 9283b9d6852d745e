"""delta from an O kept in FP32 by the forward pass.

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/fp32_o.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionSpec

attention = AttentionConfig(default=AttentionSpec(preset="flash_fp32_o", numerics="rounded_forward"))
