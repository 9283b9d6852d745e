"""Batch sizes of the published code of arXiv 2510.04212: 16 x 20 sequences a step, so that it fits GPUs of 24 GB.

All else is gpt2_paper's. We have not run it.
"""

from dataclasses import replace

from configs.gpt2_paper import config as paper

config = replace(
    paper,
    run=replace(paper.run, name="gpt2_published_code"),
    # 20 sequences a micro-batch, 16 micro-batches over all GPUs: 320 sequences, 327,680 tokens a step.
    data=replace(paper.data, micro_batch=20, global_batch=20 * 16),
)
