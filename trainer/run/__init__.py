"""A run: its folder, the files in the folder, and the reports about its training."""
