"""Pure functions that look at weights, attention and finished runs. Nothing here is needed to train."""
