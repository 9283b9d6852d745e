"""Optimizers, process groups, checkpoints, metrics: what train.py's loop calls, each module usable alone."""
