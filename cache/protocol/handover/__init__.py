"""Lanes that change their owner, and rows that migrate to other store shards."""
