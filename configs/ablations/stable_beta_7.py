"""Algorithm 3, first version: beta 7, exact ties.

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/stable_beta_7.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionSpec

attention = AttentionConfig(default=AttentionSpec(preset="flash_stable_exact_ties", numerics="rounded_forward"))
