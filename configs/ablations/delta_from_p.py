"""delta = rowsum(P * dP) in place of rowsum(dO * O).

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/delta_from_p.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionSpec

attention = AttentionConfig(default=AttentionSpec(preset="flash_delta_from_p", numerics="rounded_forward"))
