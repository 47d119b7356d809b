"""The commands that read a run which was stopped or has ended."""
