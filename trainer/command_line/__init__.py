"""The commands as the command line has them: what they take, and how what they found is told."""
