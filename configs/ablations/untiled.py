"""One tile, the whole sequence: is tiling the cause?

Put it behind a recipe: train.py configs/gpt2_paper.py configs/ablations/untiled.py --data.replay RECORDING_OF_THE_FAILING_RUN
"""

from attention import AttentionConfig, AttentionSpec

attention = AttentionConfig(default=AttentionSpec(preset="flash_untiled", numerics="rounded_forward"))
