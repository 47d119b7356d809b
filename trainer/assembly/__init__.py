"""From settings to a trainer: what it is made of, and what it hands on."""
