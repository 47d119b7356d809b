"""The owners of lanes: terms, the log of their batches, and recovery after an owner has died.

It imports `shards`. Begin with `verdict`, which decides which shards can be trusted, then
`ownership` and `batch_log`.
"""
