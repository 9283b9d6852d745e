"""The outlier heads of layer index 1 alone take delta from an FP32 O (the paper's heads 1, 7, 8, 9, 11, 12, here from 0).

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/outlier_heads.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash", numerics="published"),
    rules=(
        AttentionRule(
            layers=(1,),
            heads=(0, 6, 7, 8, 10, 11),
            attention=AttentionSpec(preset="flash_fp32_o", numerics="published"),
        ),
    ),
)
