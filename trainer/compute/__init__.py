"""Arithmetic: kernels, optimizers, losses, metrics and numerics.

It accesses no files and no sockets. Begin with `kernels`, then `compiled_kernels` and
`torch_kernels`, which give the same bits.
"""
