"""Decide how many trainers and store shards a run has while it trains (`train --auto`).

Predicting (`prediction`) and deciding (`decision`) are pure: a simulation runs the same code. Acting
is the coordinator's (`cluster.coordinator.adjustments`). Begin with `decision`. No module here
imports anything of the packages beside it.
"""
