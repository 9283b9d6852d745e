"""The output head with its cross-entropy in one operator, because autograd would move more memory than the maths needs.

On by default where CUDA is; ``speed.reference`` leaves it out. Opaque to torch.compile.
"""
