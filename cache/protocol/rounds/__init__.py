"""The rounds of an owner: its reads and writes, and its work while store shards fail.

It imports `ownership` and `shards`. Begin with `rounds`, then `lanes` and `failover`.
"""
