"""Lanes that change their owner, and rows that migrate to other store shards.

It imports the rest of the protocol. Begin with `takeover`, then `migration`.
"""
