"""Who owns a lane: terms, the log of its batches, and the end of what an owner left under way."""
