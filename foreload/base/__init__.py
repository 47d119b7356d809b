"""The foundation of all packages: files, memory, signals, progress, hashing and parts of kernels.

It knows nothing of samples or rows.
"""
