"""Stripes: where their rows live, the erasure code, decoding lost rows, finding wrong ones. Pure functions on arrays."""
