"""The traffic of an owner: its rounds of reads and writes, and its work while store shards fail."""
