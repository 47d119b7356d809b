"""Runs that do not train, and their models: rows, digest, what is kept of them."""
