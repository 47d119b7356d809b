"""Arithmetic: kernels, optimizers, losses, metrics and numerics, without access to files."""
