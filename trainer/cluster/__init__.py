"""The processes of a run: the launcher, its coordinator, the trainers, and how they end.

`coordinator` and `member` import only `messages` and `processes` from each other's side. Begin with
`launcher`.
"""
