"""Predict the memory that a run's rows take on its store shards, step by step.

It imports `saved` and the layers below it. Begin with `store_memory`.
"""
