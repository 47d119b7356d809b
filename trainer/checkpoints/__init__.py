"""Checkpoints: all of a run after a step, in a folder of its own, and runs made of that (docs/checkpoints.md)."""
