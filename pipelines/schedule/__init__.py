"""The schedule on disk: its format, reading it by memory map, and walking through its steps.

Trainers and tools import it; it imports `samples` only. Begin with `format` and `reader`, then
docs/schedule.md.
"""
