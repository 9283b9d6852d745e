"""The quickstart's model, whose layer 1 alone takes delta from an FP32 O. Its rule names the base, too: a rule inherits none.

It does not cure: either layer runs away alone. On the quickstart's batches (run seeds 42, 1, 2; one CPU) runs exploded at 540 to 630
with this rule, at 400 to 470 with layer 0 in its place, at 420 to 470 with neither.

Put it after the recipe; --attention.rules.0.heads 0 leaves layer 1's other head as it is:

    OMP_NUM_THREADS=1 python train.py configs/quickstart.py configs/ablations/tiny_layer_1.py --model.gated-attention \
        --run.steps 800 --data.replay runs/quickstart/quickstart --run.name layer_1
"""

from attention import AttentionConfig, AttentionRule, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash", numerics="microcosm"),
    rules=(AttentionRule(layers=(1,), attention=AttentionSpec(preset="flash_fp32_o", numerics="microcosm")),),
)
