"""Checkpoints save all of a run after a step; new runs start from them (docs/checkpoints.md).

It imports `saved` and the layers below it. Begin with `contents` for the format, then `row_files`.
"""
