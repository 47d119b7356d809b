"""From logs to a schedule: sources, encoding, order, the oracle, and the schedule's format.

It imports base only, and no torch. Begin with `prepare`, then docs/internals/pipelines.md.
"""
