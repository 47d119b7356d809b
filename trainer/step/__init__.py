"""A training step: exchange, commits, undo, replicas of lanes, and the links between trainers.

It imports `compute` and the cache's traffic. Begin with `step`, then `exchange` and `transport`.
"""
