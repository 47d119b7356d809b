"""What is to be done, decided before any of it is: options, splits, sizes, disk space."""
