"""From settings to a trainer: its parts, its lanes, and the state that terms pass on."""
