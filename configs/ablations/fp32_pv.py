"""P V computed and accumulated in FP32; the O passed to the next layer still in BF16.

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/fp32_pv.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionSpec

attention = AttentionConfig(default=AttentionSpec(preset="flash_fp32_pv", numerics="rounded_forward"))
