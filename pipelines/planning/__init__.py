"""What `prepare` decides before it starts work: options, splits, sizes, disk space."""
