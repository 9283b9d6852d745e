"""``watch``: attention measured in any training loop, the rule that warns, its file, and the verdict on that file."""
