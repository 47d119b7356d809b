"""The Beam pipeline: its stages, and running it."""
