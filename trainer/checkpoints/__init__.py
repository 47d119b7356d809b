"""Checkpoints save all of a run after a step; new runs start from them (docs/checkpoints.md)."""
