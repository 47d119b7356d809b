"""From ordered samples to a schedule: the serial pass, placement of samples, the oracles of the lanes, and the segments."""
