"""The owners of lanes: terms, the log of their batches, and recovery after an owner has died."""
