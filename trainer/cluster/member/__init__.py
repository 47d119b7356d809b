"""A trainer of a run: its part in each term, and what it does at the coordinator's request."""
