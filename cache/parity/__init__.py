"""Stripes: where their rows are, the erasure code, and decoding lost and finding wrong rows.

Pure functions on arrays.
"""
