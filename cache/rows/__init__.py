"""Stored rows and rows in slots: their layout, initial values, partitions and staging.

Accesses no store.
"""
