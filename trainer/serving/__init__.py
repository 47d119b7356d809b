"""Exports: what leaves training for serving, in full or as increments, and what brings them to where they are served (docs/serving.md)."""
