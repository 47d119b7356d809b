"""The schedule on disk: its format, reading it by memory map, and replaying its moves."""
