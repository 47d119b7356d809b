"""What a store shard holds of a run, in which state it is, and how its rows are read."""
