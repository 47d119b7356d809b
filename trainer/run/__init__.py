"""A run: its folder, its settings, its model at rest, its reports, and how a trainer is put together for it."""
