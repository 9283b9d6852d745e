"""The paper's failing run with Muon for the blocks' matrices (lr 5e-4, weight decay 0.01).

Muon's iterations are replayed as a CUDA graph, with the bits of torch.optim.Muon. ``--optim.newton-schulz each`` runs them one by one,
on any device; a run begun so goes on so.
"""

from dataclasses import replace

from configs.gpt2_paper import config as paper

config = replace(
    paper,
    run=replace(paper.run, name="gpt2_muon"),
    optim=replace(paper.optim, optimizer="muon", newton_schulz="graph", lr=5e-4, weight_decay=0.01),
)
