"""Rows at rest and in slots: their layout, their first values, partitions and staging. Asks no store."""
