"""Where a row lives: lane, table, ordinal -> stripe -> placement group -> store shard, by a table of the groups that the run keeps."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numba as nb
import numpy as np

from foreload.cache.errors import CacheError
from foreload.cache.parity.erasure import Code
from foreload.cache.parity.stripes import LaneStripes, Written, stripe_hash
from foreload.pipelines.base.files import replacing
from foreload.pipelines.base.hashing import key

GROUPS = 4096
FORMAT = 1


@nb.njit(nogil=True, cache=True)
def _shards(lane_prefix, table, ordinal, members, k, out):  # type: ignore[no-untyped-def]
    groups = np.uint64(members.shape[0])
    for i in range(out.size):
        stripe = ordinal[i] // k
        group = stripe_hash(lane_prefix, table[i], stripe) % groups
        out[i] = members[np.int64(group), ordinal[i] - stripe * k]


@dataclass(frozen=True, slots=True)
class Placement:
    """The map from a stripe's group to its ordered k + r store shards.

    A stripe is k consecutive ordinals of one table in one lane; its group is key(lane, table, stripe) mod 4096. members: int32
    [4096, k + r], the first k columns for the rows of a stripe in order, the others for its parity rows.
    """

    shard_count: int
    k: int
    r: int
    members: np.ndarray

    def __post_init__(self) -> None:
        if self.k < 1 or self.r < 0 or self.k + self.r > self.shard_count:
            raise CacheError(
                f"placement: k >= 1, r >= 0 and k + r <= store shards must hold; got k={self.k}, r={self.r} "
                f"and {self.shard_count} store shards"
            )
        low, high = (self.members.min(), self.members.max()) if self.members.size else (-1, -1)
        if self.members.shape != (GROUPS, self.k + self.r) or low < 0 or high >= self.shard_count:
            raise CacheError(f"placement: the groups do not fit k={self.k}, r={self.r} and {self.shard_count} store shards")
        ordered = np.sort(self.members, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise CacheError("placement: a group names one store shard twice")

    @classmethod
    def spread(cls, shard_count: int, k: int = 1, r: int = 0) -> Placement:
        """A balanced placement: first members in rotation, the others a rotation of the shards that remain."""
        if shard_count < 1:
            raise CacheError(f"placement: needs at least one store shard; got {shard_count}")
        group = np.arange(GROUPS)[:, None]
        place = np.arange(k + r)[None, :]
        others = max(shard_count - 1, 1)
        rotated = (group + 1 + (group // shard_count + place - 1) % others) % shard_count
        return cls(shard_count, k, r, np.where(place == 0, group % shard_count, rotated).astype(np.int32))

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Read a placement that `save` wrote; CacheError if it is not one."""
        try:
            return cls.of_text(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise CacheError(f"{path}: not a placement ({error}); it belongs to the run and cannot be made anew") from error

    @classmethod
    def of_text(cls, text: str, where: str) -> Placement:
        """The inverse of `text`; CacheError if it is none, which names where that was found."""
        try:
            stored = json.loads(text)
            if stored["format"] != FORMAT:
                raise CacheError(f"{where}: placement format must be {FORMAT}; got {stored['format']!r}")
            members = np.array(stored["members"], np.int32)
            return cls(int(stored["shards"]), int(stored["k"]), int(stored["r"]), members)
        except (ValueError, KeyError, TypeError) as error:
            raise CacheError(f"{where}: not a placement ({error}); it belongs to the run and cannot be made anew") from error

    def save(self, path: Path) -> None:
        """Write the placement as JSON, whole or not at all."""
        with replacing(path, durable=True) as temporary:
            temporary.write_text(self.text, encoding="utf-8")

    @property
    def text(self) -> str:
        """The placement as JSON."""
        stored = {"format": FORMAT, "shards": self.shard_count, "k": self.k, "r": self.r, "members": self.members.tolist()}
        return json.dumps(stored, separators=(",", ":"))

    def shards(self, lane: int, table: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
        """The store shard of each row of a lane. table: int16 [n]; ordinal: int64 [n], not negative. Returns int32 [n]."""
        out = np.empty(len(ordinal), np.int32)
        _shards(np.uint64(key(lane)), table, ordinal, self.members, self.k, out)
        return out

    def mask(self, shards: Collection[int]) -> np.ndarray:
        """Which of all store shards are among these: bool [shard_count]."""
        among = np.zeros(self.shard_count, bool)
        among[list(shards)] = True
        return among

    @property
    def code(self) -> Code | None:
        """The erasure code of a stripe; None without parity."""
        return Code(self.k, self.r) if self.r else None

    def stripes(self, lane: int, written: np.ndarray) -> LaneStripes:
        """The stripes of a lane. written: int64 [tables], all ordinals below which the store has."""
        return LaneStripes(lane, self.k, self.members, Written(written, self.k))
