"""All layers but the paper's layer 2 (index 1) use flash attention.

Put it behind a recipe, on the failing run's recording: train.py configs/gpt2_paper.py configs/ablations/all_but_layer_2.py --data.replay ...
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash", numerics="paper"),
    rules=(AttentionRule(layers=(1,), attention=AttentionSpec(preset="standard")),),
)
