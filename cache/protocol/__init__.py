"""The protocol with the store (docs/protocol.md): who may write what, in which order, and recovery.

From the bottom up: `shards`, `ownership`, `rounds`, `handover`; each imports only those before it.
Begin with `rounds/rounds`.
"""
