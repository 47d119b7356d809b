"""What reads the future: sources, encoding, batching, the oracle, the schedule's format. Knows no torch."""
