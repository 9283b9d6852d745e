"""delta from an O that the backward pass recomputes in FP32.

Put it behind a recipe, on the failing run's recording: train.py configs/gpt2_paper.py configs/ablations/recompute_o.py --data.replay ...
"""

from attention import AttentionConfig, AttentionSpec

attention = AttentionConfig(default=AttentionSpec(preset="flash_recompute_o", numerics="paper"))
