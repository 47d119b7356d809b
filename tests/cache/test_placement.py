"""Placement: the definition in Python integers, balance, and a file that is whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foreload.base.hashing import key
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import GROUPS, Placement
from foreload.cache.parity.stripes import shards_of


@pytest.mark.parametrize(("shards", "k", "r"), [(1, 1, 0), (3, 1, 0), (5, 1, 0), (3, 2, 1), (7, 4, 2), (6, 4, 2)])
def test_a_row_lives_where_its_stripes_group_says(shards: int, k: int, r: int) -> None:
    placement = Placement.spread(shards, k, r)
    rng = np.random.default_rng(0)
    table, ordinal = rng.integers(0, 30, 500).astype(np.int16), rng.integers(0, 2**40, 500)
    for lane in (0, 3):
        got = shards_of(placement, lane, table, ordinal)
        for t, o, shard in zip(table.tolist(), ordinal.tolist(), got.tolist(), strict=True):
            assert shard == placement.members[key(lane, t, o // k) % GROUPS, o % k]


@pytest.mark.parametrize(("shards", "k", "r"), [(1, 1, 0), (2, 1, 1), (3, 1, 0), (5, 3, 1), (3, 2, 1), (9, 4, 2)])
def test_every_shard_gets_its_share_in_every_place(shards: int, k: int, r: int) -> None:
    members = Placement.spread(shards, k, r).members
    for place in range(k + r):
        counts = np.bincount(members[:, place], minlength=shards)
        # 4096 is no multiple of the shards, nor of the rotations of the others: what is left over of each.
        assert counts.max() - counts.min() <= shards
    rows = shards_of(Placement.spread(shards, k, r), 1, np.zeros(60_000, np.int16), np.arange(60_000))
    assert np.bincount(rows, minlength=shards).max() < 1.06 * 60_000 / shards


def test_a_saved_placement_is_read_back(tmp_path: Path) -> None:
    placement = Placement.spread(5, 2, 1)
    placement.save(tmp_path / "placement.json")
    again = Placement.load(tmp_path / "placement.json")
    assert (again.shard_count, again.k, again.r) == (5, 2, 1)
    assert np.array_equal(again.members, placement.members)
    assert [path.name for path in tmp_path.iterdir()] == ["placement.json"]


def test_a_damaged_placement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    with pytest.raises(CacheError, match="not a placement"):
        Placement.load(path)
    Placement.spread(2).save(path)
    good = path.read_text()
    path.write_text(good[: len(good) // 2])
    with pytest.raises(CacheError, match="not a placement"):
        Placement.load(path)
    path.write_text(json.dumps({**json.loads(good), "format": 99}))
    with pytest.raises(CacheError, match="format must be 1 or 2; got 99"):
        Placement.load(path)
    path.write_text(json.dumps({**json.loads(good), "shards": 1}))
    with pytest.raises(CacheError, match="do not fit"):
        Placement.load(path)


@pytest.mark.parametrize(
    ("shards", "k", "r", "message"),
    [(0, 1, 0, "at least one store shard"), (2, 2, 1, "got k=2, r=1 and 2 store shards"), (3, 0, 1, "got k=0")],
)
def test_a_placement_that_cannot_be_is_refused(shards: int, k: int, r: int, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        Placement.spread(shards, k, r)
