"""The coordinator of a run.

It decides which trainer hosts which lane, which checkpoint is saved, and how store shards change.
"""
