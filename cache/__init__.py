"""The embedding cache: rows on store shards and in trainers' slots.

It imports pipelines and base, never trainer, and no Beam. Begin with `traffic`, the thread of a
trainer that fetches rows ahead and writes them back, then docs/internals/cache.md.
"""
