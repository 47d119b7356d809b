"""A training step: kernels, exchange, optimizers, numerics. Knows no files."""
