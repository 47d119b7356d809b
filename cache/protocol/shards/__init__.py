"""The state of a run's store shards: fences, markers, namespaces, and reading rows with their checks.

The lowest layer of the protocol. Begin with `marker` and `fence`, then `reading`.
"""
