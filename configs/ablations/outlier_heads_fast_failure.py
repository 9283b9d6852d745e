"""The outlier heads that `flash` has in configs/fast_failure.py, of layer index 1: they alone take delta from an FP32 O.

Figure 3 at step 3,000 (seed 42): heads 1, 4, 8 and 11 have a W_Q of more than 1.5 times the median head's. Other heads than the
paper's (outlier_heads.py), and kernels' roundings.
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash"),
    rules=(AttentionRule(layers=(1,), heads=(1, 4, 8, 11), attention=AttentionSpec(preset="flash_fp32_o")),),
)
