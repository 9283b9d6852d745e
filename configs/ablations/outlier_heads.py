"""The outlier heads of layer 1 in the run `flash` of configs/fast_failure.py: they alone take delta from an FP32 O.

At step 3,000 (seed 42) heads 1, 4, 8 and 11 have a W_Q norm of more than 1.5 times the median head's.
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash"),
    rules=(AttentionRule(layers=(1,), heads=(1, 4, 8, 11), attention=AttentionSpec(preset="flash_fp32_o")),),
)
