"""Stopped runs and their models: rows, digest, and what a run keeps of its schedule.

It imports `assembly`, `run` and the layers below them. Begin with `stopped_stores`, then
`stopped_run`.
"""
