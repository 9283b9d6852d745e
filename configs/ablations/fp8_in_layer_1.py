"""FP8 in layer 1 (the paper's layer 2) alone, one tile a row; all other layers use flash_consistent in BF16.

The kernels emulate FP8 and are slow: one layer of GPT-2 costs a twelfth of all. The second command gives layer 1 one P and one O:

    python train.py configs/fast_failure.py configs/ablations/fp8_in_layer_1.py --run.steps 2400
    python train.py configs/fast_failure.py configs/ablations/fp8_in_layer_1.py --run.steps 2400 \
        --attention.rules.0.attention.preset fp8_consistent
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash_consistent"),
    rules=(
        AttentionRule(
            layers=(1,),
            attention=AttentionSpec(preset="fp8", backend="flash", sites=("tile_k=0", "score_gradients=e5m2_mx")),
        ),
    ),
)
