"""Where rows live: placement, the store client, partitions, local redis-servers. Knows no Beam."""
