"""Only the paper's layer 2 (index 1) makes delta from the rounded O; all others take delta from P.

For configs/fast_failure.py: `flash_delta_from_p` is stable there, and nearly as fast as `flash` (`standard`, in only_layer_1.py, is not).
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash_delta_from_p"),
    rules=(AttentionRule(layers=(1,), attention=AttentionSpec(preset="flash")),),
)
