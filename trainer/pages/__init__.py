"""Pages to look at: a run, two runs beside each other, a schedule. Each is one HTML file with nothing from elsewhere, and no script."""
