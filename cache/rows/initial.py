"""The value of a row that was never written: a pure function of (seed, table, id) (docs/definitions.md, Rows)."""

from __future__ import annotations

import numpy as np

from foreload.base.compiled import nb
from foreload.base.hashing import key, mix

_TWO23 = np.float32(2.0**23)
_INVERSE23 = np.float32(2.0**-23)
_S16, _S40, _MASK24 = np.uint64(16), np.uint64(40), np.uint64(0xFFFFFF)


@nb.njit(nogil=True, cache=True)
def _initial(prefix, ids, scale, out, D):  # type: ignore[no-untyped-def]
    for i in range(ids.shape[0]):
        h = mix(prefix ^ np.uint64(ids[i]))
        for pair in range((D + 1) // 2):
            b = mix(h ^ np.uint64(pair))  # two draws: bits 40 to 63 for the even column, 16 to 39 for the odd one
            # A 24-bit integer, its difference to 2^23 and the division by 2^23 are all exact: one rounding, in the last product.
            even = np.float32(np.int64(b >> _S40)) - _TWO23
            out[i, 2 * pair] = (even * _INVERSE23) * scale
            if 2 * pair + 1 < D:
                odd = np.float32(np.int64((b >> _S16) & _MASK24)) - _TWO23
                out[i, 2 * pair + 1] = (odd * _INVERSE23) * scale
        for j in range(D, out.shape[1]):
            out[i, j] = np.float32(0.0)


def initial_weights(seed: int, table: int, ids: np.ndarray, scale: np.float32, out: np.ndarray, D: int) -> None:
    """Write the initial weights of rows of one table.

    ids: int64 [n]; scale: float32(1 / sqrt(rows of the table)); out: float32 [n, >= D], columns below D drawn uniformly from
    [-scale, scale), the others set to 0.
    """
    _initial(np.uint64(key(seed, table)), ids, np.float32(scale), out, D)
