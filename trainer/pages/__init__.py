"""Pages about a run, two runs side by side, or a schedule.

Each page is one HTML file that loads nothing from elsewhere and has no script.
"""
