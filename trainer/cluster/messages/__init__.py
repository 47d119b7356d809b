"""The messages between the processes of a run, and the store over which they are sent.

It imports no other part of cluster. Begin with `trainers` (events and the plan), `facts`, and
`control`.
"""
