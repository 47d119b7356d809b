"""The commands as the command line has them: what they take, and how their results are printed."""
