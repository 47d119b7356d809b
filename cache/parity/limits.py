"""How large stripes and stores can be."""

from __future__ import annotations

GROUPS = 4096  # of a placement
MOST_ROWS = 256  # of a stripe: the elements of the field of the erasure code
MOST_SHARDS = 1 << 16
