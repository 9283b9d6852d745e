"""The paper's recipe on GPT-2 medium (24 layers, 16 heads, width 1024)."""

from dataclasses import replace

from configs.gpt2_paper import config as paper
from model import MODEL_PRESETS

config = replace(
    paper,
    run=replace(paper.run, name="gpt2_medium"),
    model=MODEL_PRESETS["gpt2_medium"],
    # Half the micro-batch for the memory of the larger model; still 512 sequences a step.
    data=replace(paper.data, micro_batch=16, global_batch=4 * 16 * 8),
)
