"""Runs that do not train, and their models: rows, digest, and what a run keeps of them."""
