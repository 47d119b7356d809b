"""What the rows of a run take on its store shards: over the steps of its schedule, and of the servers that there are."""
