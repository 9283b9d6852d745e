"""Only layer 1 (the paper's layer 2) makes delta from the rounded O; all others take delta from P.

Put it after a recipe: python train.py configs/fast_failure.py configs/ablations/only_layer_1.py
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash_delta_from_p"),
    rules=(AttentionRule(layers=(1,), attention=AttentionSpec(preset="flash")),),
)
