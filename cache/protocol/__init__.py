"""The protocol with the store (docs/protocol.md): markers, fences, rounds, the batch log, the state of each shard, recovery."""
