"""Operators that stand for several of torch's, because autograd or the compiler would move more memory than the maths needs.

Each is a switch of ``training.speed``, off unless asked for, and opaque to torch.compile.
"""
