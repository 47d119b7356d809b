"""The erasure code over the bits of rows.

With one parity row it is XOR, with more it is a systematic Reed-Solomon code over GF(2^8). The
field is that of the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d).

Parity row i of a stripe is sum_j c_ij * member_j, byte by byte, where a sum is an XOR. So the
update is parity_i ^= c_ij * (new ^ old). c is a Cauchy matrix whose columns are scaled so that its
first row is all ones. Any k of the k + r rows of a stripe determine the others (Plank and Xu,
"Optimizing Cauchy Reed-Solomon Codes", 2006).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from foreload.base.compiled import nb
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import MOST_ROWS, Placement

_POLYNOMIAL = 0x11D
_LOW7, _LOW1 = np.uint32(0x7F7F7F7F), np.uint32(0x01010101)


def _tables() -> tuple[list[int], list[int]]:
    # Powers of the generator 2, twice in a row, so that a sum of two logarithms is an index.
    exponents, logarithms, value = [0] * 510, [0] * 256, 1
    for power in range(255):
        exponents[power] = exponents[power + 255] = value
        logarithms[value] = power
        value <<= 1
        if value & 256:
            value ^= _POLYNOMIAL
    return exponents, logarithms


_EXP, _LOG = _tables()


def multiply(a: int, b: int) -> int:
    """Multiply two elements of GF(2^8)."""
    return _EXP[_LOG[a] + _LOG[b]] if a and b else 0


def inverse(a: int) -> int:
    """Return 1 / a in GF(2^8). a must not be 0."""
    return _EXP[255 - _LOG[a]]


@nb.njit(nogil=True, cache=True)
def _accumulate(source, places, factors, target, targets):  # type: ignore[no-untyped-def]
    """Compute `accumulate` on uint32 words, each with four elements of the field."""
    words = target.shape[1]
    for i in range(targets.size):
        to, of = targets[i], places[i]
        if factors[i] == 0 or to < 0:
            continue
        if factors[i] == 1:
            for j in range(words):
                target[to, j] ^= source[of, j]
        else:
            _add_multiple(source, of, np.uint32(factors[i]), target, to, words)


@nb.njit(nogil=True, cache=True, inline="always")
def _mask(factor, bit):  # type: ignore[no-untyped-def]
    """Return all ones if the bit is set in factor, else 0."""
    return np.uint32(np.uint32(0) - ((factor >> np.uint32(bit)) & np.uint32(1)))


@nb.njit(nogil=True, cache=True, inline="always")
def _doubled(word):  # type: ignore[no-untyped-def]
    # Doubles the four bytes of a word at once, and reduces each byte whose highest bit was set.
    high = np.uint32((word >> np.uint32(7)) & _LOW1)
    reduced = np.uint32(high ^ (high << np.uint32(2)) ^ (high << np.uint32(3)) ^ (high << np.uint32(4)))
    return np.uint32(np.uint32((word & _LOW7) << np.uint32(1)) ^ reduced)


@nb.njit(nogil=True, cache=True)
def _add_multiple(source, of, factor, target, to, words):  # type: ignore[no-untyped-def]
    # target[to] ^= factor * source[of]. For each bit of factor that is set, the word is added,
    # doubled as often as the bit's number says. The masks are scalars and not an array, so that the
    # compiler vectorizes the loop.
    m0, m1, m2, m3 = _mask(factor, 0), _mask(factor, 1), _mask(factor, 2), _mask(factor, 3)
    m4, m5, m6, m7 = _mask(factor, 4), _mask(factor, 5), _mask(factor, 6), _mask(factor, 7)
    for j in range(words):
        w0 = source[of, j]
        w1 = _doubled(w0)
        w2 = _doubled(w1)
        w3 = _doubled(w2)
        w4 = _doubled(w3)
        w5 = _doubled(w4)
        w6 = _doubled(w5)
        w7 = _doubled(w6)
        low = (w0 & m0) ^ (w1 & m1) ^ (w2 & m2) ^ (w3 & m3)
        high = (w4 & m4) ^ (w5 & m5) ^ (w6 & m6) ^ (w7 & m7)
        target[to, j] ^= np.uint32(low ^ high)


def accumulate(source: np.ndarray, places: np.ndarray, factors: np.ndarray, target: np.ndarray, targets: np.ndarray) -> None:
    """Do target[targets[i]] ^= factors[i] * source[places[i]] for each i in turn.

    A target may occur more than once.

    Args:
        source: uint8 [., row_bytes], contiguous, row_bytes a multiple of 4.
        places: int64 [n].
        factors: uint8 [n], elements of GF(2^8).
        target: uint8 [., row_bytes], like source.
        targets: int64 [n]. A negative target is skipped.
    """
    _accumulate(source.view(np.uint32), places, factors, target.view(np.uint32), targets)


@nb.njit(nogil=True, cache=True)
def _difference(a, b, where, out):  # type: ignore[no-untyped-def]
    for i in range(a.shape[0]):
        if where[i]:
            for j in range(a.shape[1]):
                out[i, j] = a[i, j] ^ b[i, j]
        else:
            for j in range(a.shape[1]):
                out[i, j] = a[i, j]


def difference(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return a ^ b where `where` is set, and a elsewhere.

    Args:
        a: uint8 [n, row_bytes].
        b: uint8 [n, row_bytes].
        where: bool [n].

    Returns:
        uint8 [n, row_bytes].
    """
    out = np.empty_like(a)
    _difference(a.view(np.uint32), b.view(np.uint32), where, out.view(np.uint32))
    return out


@dataclass(frozen=True, slots=True)
class Code:
    """A code with k members and r parity rows.

    Attributes:
        coefficients: uint8 [r, k], the factors c_ij.
    """

    k: int
    r: int
    coefficients: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if self.k < 1 or self.r < 0 or self.k + self.r > MOST_ROWS:
            raise CacheError(f"code: k >= 1, r >= 0 and k + r <= {MOST_ROWS} must hold; got k={self.k}, r={self.r}")
        # A Cauchy matrix: 1 / (x_i + y_j) with x_i = i and y_j = r + j, which are all different.
        # Dividing each column by its first entry keeps the property that every square submatrix is
        # invertible.
        cauchy = [[inverse(i ^ (self.r + j)) for j in range(self.k)] for i in range(self.r)]
        scaled = [[multiply(entry, inverse(cauchy[0][j])) for j, entry in enumerate(row)] for row in cauchy]
        object.__setattr__(self, "coefficients", np.array(scaled, np.uint8).reshape(self.r, self.k))

    @classmethod
    def of(cls, placement: Placement) -> Code | None:
        """Return the code of a placement's stripes, or None without parity."""
        return cls(placement.k, placement.r) if placement.r else None

    def encode(self, members: np.ndarray) -> np.ndarray:
        """Compute the parity rows of one stripe, uint8 [r, row_bytes].

        Args:
            members: uint8 [k, row_bytes].
        """
        parity = np.zeros((self.r, members.shape[1]), np.uint8)
        places = np.tile(np.arange(self.k), self.r)
        accumulate(members, places, self.coefficients.reshape(-1), parity, np.repeat(np.arange(self.r), self.k))
        return parity

    def decoding(self, known: Sequence[int], wanted: int) -> np.ndarray:
        """Return the factors with which k known rows of a stripe add up to a wanted row: uint8 [k].

        Rows are named by their place in the stripe: 0 .. k-1 for the members, k .. k+r-1 for the
        parity rows.

        Raises:
            CacheError: `known` does not name k different rows.
        """
        return np.array(_decoding(self.k, self.r, tuple(known), wanted), np.uint8)

    def generator(self, place: int) -> list[int]:
        """Return the factors with which the members add up to the row at a place of the stripe."""
        if place >= self.k:
            return [int(c) for c in self.coefficients[place - self.k]]
        return [int(member == place) for member in range(self.k)]


@lru_cache(4096)
def _decoding(k: int, r: int, known: tuple[int, ...], wanted: int) -> tuple[int, ...]:
    if len(set(known)) != k or len(known) != k or not all(0 <= place < k + r for place in known):
        raise CacheError(f"code: needs {k} different rows of a stripe of {k} + {r} to decode another; got {known}")
    code = Code(k, r)
    # Solve x * A = g, where g is the wanted row's generator and A has the generators of the known
    # rows. By columns, this is A^T x = g^T. Gauss-Jordan elimination.
    system = [[code.generator(place)[member] for place in known] + [code.generator(wanted)[member]] for member in range(k)]
    for column in range(k):
        # A pivot always exists, because any k rows of the code are independent.
        pivot = next(row for row in range(column, k) if system[row][column])
        system[column], system[pivot] = system[pivot], system[column]
        scale = inverse(system[column][column])
        system[column] = [multiply(scale, entry) for entry in system[column]]
        for row in range(k):
            factor = system[row][column]
            if row != column and factor:
                system[row] = [entry ^ multiply(factor, own) for entry, own in zip(system[row], system[column], strict=True)]
    return tuple(row[k] for row in system)
