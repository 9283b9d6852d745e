"""The paper's recipe with Muon for the blocks' matrices (lr 5e-4, weight decay 0.01)."""

from dataclasses import replace

from configs.gpt2_paper import config as paper

config = replace(
    paper,
    run=replace(paper.run, name="gpt2_muon"),
    optim=replace(paper.optim, optimizer="muon", lr=5e-4, weight_decay=0.01),
)
