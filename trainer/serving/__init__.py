"""Exports of models for serving (docs/serving.md): full, incremental, or to be called without foreload.

A tool: what trains does not import it. Begin with `format`, then `standalone`.
"""
