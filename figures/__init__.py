"""The figures of arXiv 2510.04212 from runs and checkpoints of this project: for each a pure data function and a drawing."""
