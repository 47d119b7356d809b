"""A traffic with its lanes, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards import reading
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.traffic import Traffic


def serving(stored: StoredRows, plans: Sequence[LanePlan], seed: int, **options: Any) -> Traffic:
    """The traffic of these lanes; options: as Traffic has them."""
    traffic = Traffic(stored, seed, **options)
    for plan in plans:
        traffic.add_lane(plan)
    return traffic


def take_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, owners and readers take rows whatever ids and tags these have."""
    monkeypatch.setattr(reading, "wrong_rows", lambda wanted, ids, tags: np.zeros(len(ids), bool))
