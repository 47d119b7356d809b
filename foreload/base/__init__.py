"""What all packages stand on: files, memory, signals, progress, hashing, kernels' building blocks. Knows nothing of samples or rows."""
