"""What is done beside the traffic: rebuilding lost shards, scrubbing, counting."""
