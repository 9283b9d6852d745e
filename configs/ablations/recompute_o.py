"""delta from an O that the backward pass recomputes in FP32.

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/recompute_o.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionSpec

attention = AttentionConfig(default=AttentionSpec(preset="flash_recompute_o", numerics="rounded_forward"))
