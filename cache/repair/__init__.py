"""Work beside the traffic: rebuild of lost shards, scrubbing, and counting of rows."""
