"""Is the gradient of a checkpoint made by attention's rounding, and in which layers and heads?"""
