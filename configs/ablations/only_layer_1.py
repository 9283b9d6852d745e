"""Only the paper's layer 2 (index 1) uses flash attention; all others use standard attention.

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/only_layer_1.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="standard"),
    rules=(AttentionRule(layers=(1,), attention=AttentionSpec(preset="flash", numerics="published")),),
)
