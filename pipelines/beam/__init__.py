"""The Beam pipeline: its stages, and running it.

It imports all of pipelines below `prepare`; only here is Beam imported. Begin with `pipeline`, then
`read` and `order`.
"""
