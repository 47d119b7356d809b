"""A run: its folder, what stands in it, and what is reported of it."""
