"""The command line of each command: its arguments, and how its result is printed."""
