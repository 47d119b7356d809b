"""The command line of each command: its arguments, and how its result is printed.

It imports torch and Beam only within the command that needs them. Begin with `shared`, then
`training`.
"""
