"""A run: its folder, the files in the folder, and the reports about its training.

It imports `job` and the layers below it. Begin with `directory` and `manifest`.
"""
