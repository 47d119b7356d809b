"""A training step: exchange, commits, undo, copies of lanes."""
