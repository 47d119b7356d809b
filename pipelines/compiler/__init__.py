"""The compiler, from ordered samples to a schedule: serial pass, placement, oracles, segments."""
