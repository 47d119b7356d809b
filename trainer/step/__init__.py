"""A training step: exchange, commits, undo, replicas of lanes."""
