"""The coordinator of a run: it decides lanes, checkpoints, scaling and changes of store shards.

One thread decides everything. It knows trainers by their messages only. Begin with `coordinator`,
then `membership` and `terms`.
"""
