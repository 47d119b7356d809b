"""The state of a run's store shards, and how rows are read from them."""
