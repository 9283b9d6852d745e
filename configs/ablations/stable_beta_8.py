"""Algorithm 3 with beta 8, ties within 1e-3.

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/stable_beta_8.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionSpec

attention = AttentionConfig(
    default=AttentionSpec(preset="flash_stable", numerics="rounded_forward", sites=("row_max_beta=8",))
)
