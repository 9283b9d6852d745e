"""All layers but the paper's layer 2 (index 1) use flash attention.

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/all_but_layer_1.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash", numerics="published"),
    rules=(AttentionRule(layers=(1,), attention=AttentionSpec(preset="standard")),),
)
