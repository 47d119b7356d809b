"""A trainer of a run: its part of each term, and what it does at the coordinator's command."""
