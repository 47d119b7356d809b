"""Predict the memory that a run's rows take on its store shards over the steps of its schedule."""
