"""Arithmetic: kernels, optimizers, losses, metrics, numerics. Knows no files."""
