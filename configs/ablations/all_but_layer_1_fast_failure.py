"""All layers but the paper's layer 2 (index 1) make delta from the rounded O; that one makes delta from P.

For configs/fast_failure.py: see only_layer_1_fast_failure.py.
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash"),
    rules=(AttentionRule(layers=(1,), attention=AttentionSpec(preset="flash_delta_from_p")),),
)
