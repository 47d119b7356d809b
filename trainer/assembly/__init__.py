"""From settings to a trainer: its parts, its lanes, and the state that terms pass on.

It imports `run`, `job`, `step` and `compute`. Begin with `assembly`.
"""
