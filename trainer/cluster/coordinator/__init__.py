"""The coordinator of a run: who trains which lanes, which checkpoint is saved, what becomes of store shards."""
