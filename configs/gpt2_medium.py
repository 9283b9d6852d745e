"""The paper's recipe on GPT-2 medium (24 layers, 16 heads, width 1024)."""

from dataclasses import replace

from configs.gpt2_paper import config as paper
from model import ModelConfig

config = replace(
    paper,
    run=replace(paper.run, name="gpt2_medium"),
    model=ModelConfig(n_layer=24, n_head=16, n_embd=1024),
    # Half the micro-batch for the memory of the larger model; still 512 sequences a step.
    data=replace(paper.data, micro_batch=16, global_batch=4 * 16 * 8),
)
