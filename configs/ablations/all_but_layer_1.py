"""All layers but layer 1 (the paper's layer 2) make delta from the rounded O; that one makes delta from P.

Put it after a recipe: python train.py configs/fast_failure.py configs/ablations/all_but_layer_1.py
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash"),
    rules=(AttentionRule(layers=(1,), attention=AttentionSpec(preset="flash_delta_from_p")),),
)
