"""Stored rows and rows in slots: their layout, initial values, partitions and staging.

It accesses no store. Begin with `layout`, then `partition`.
"""
