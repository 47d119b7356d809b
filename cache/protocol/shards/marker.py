"""The marker of a lane on a store shard: 8 bytes that change atomically with its rows, in the same command."""

from __future__ import annotations

from dataclasses import dataclass

_AHEAD_BIT, _REBUILDING_BIT = 1 << 62, 1 << 63
_NUMBER = _AHEAD_BIT - 1
_COUNT_BITS = 40


def first_number(term: int) -> int:
    """The number with which an owner of this term begins, that of an empty batch: two owners never give one number to two contents."""
    return term << _COUNT_BITS


def term_of(number: int) -> int:
    """The term whose owner gave a batch its number."""
    return number >> _COUNT_BITS


@dataclass(frozen=True, slots=True)
class Marker:
    """Which write-back batches a store shard has: parity of all up to `parity`, data of all up to `data`, which is the same or one less.

    rebuilding: the shard does not have all of its rows yet. Without parity the two numbers are one. A number is the term of the owner that wrote
    the batch, times 2^40, plus a count; batch n follows n - 1, but for the first of an owner (`first_number`), which follows what it found.
    """

    parity: int
    data: int
    rebuilding: bool = False

    @classmethod
    def parse(cls, stored: bytes | None) -> Marker:
        """The marker that a shard answered with; None, that it has none, stands for batch 0."""
        word = 0 if stored is None else int.from_bytes(stored, "little")
        data = word & _NUMBER
        return cls(data + bool(word & _AHEAD_BIT), data, bool(word & _REBUILDING_BIT))

    def stored(self) -> bytes:
        """The marker as it is stored: data as an integer of 62 bits, whether parity is one ahead, whether the shard is being rebuilt."""
        ahead = _AHEAD_BIT if self.parity > self.data else 0
        return (self.data | ahead | (_REBUILDING_BIT if self.rebuilding else 0)).to_bytes(8, "little")

    def __str__(self) -> str:
        numbers = f"{self.data}" if self.parity == self.data else f"{self.data}, with the parity of {self.parity}"
        return numbers + (", being rebuilt" if self.rebuilding else "")
