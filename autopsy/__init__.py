"""Is a checkpoint dying of biased rounding in attention, and in which layer and head?"""
