"""The row optimizers' updates as loops compiled by numba, for rows in CPU memory (`compiled_kernels`; docs/definitions.md, A step's arithmetic).

One function goes over the rows and calls the update of each row's table; branches are taken once a row, never in the loops over its columns.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from foreload.base.compiled import nb
from foreload.base.prefetch import prefetch
from foreload.base.simd import COLUMNS, copy, descend, eight_sums_of_squares
from foreload.trainer.compute.layouts import UpdateRules
from foreload.trainer.compute.row_optimizers import (
    ADAGRAD,
    ADAM,
    BETA,
    DECAY,
    EPSILON,
    FIRST,
    FTRL,
    L1,
    L2,
    ROOT,
    SECOND,
    SGD,
)

_AHEAD = 16  # rows that prefetching is ahead of their use
_LINE = 16  # float32 values in a cache line
# Division by zero gives inf or nan as in torch, instead of an exception that also keeps LLVM from vectorising.
_compile = nb.njit(nogil=True, cache=True, error_model="numpy")


@_compile
def _sum_of_squares(g: np.ndarray, i: int, start: int, end: int, p: np.ndarray) -> np.float32:
    """Q of docs/definitions.md over g[i, start:end]: eight sums, the c-th of these columns in sum c % 8, then added in pairs.

    Before: p is float32 [8] of scratch, holding anything. After: p may have changed, g has not. Where the columns are whole eights, the sums are the
    lanes of one vector: the same additions in the same order.
    """
    blocks = (end - start) // 8
    place = np.int64(i) * g.shape[1] + start
    if (end - start) % 8 == 0:
        return eight_sums_of_squares(g, place, blocks)
    p[:] = np.float32(0)
    for c in range(end - start):
        p[c % 8] = p[c % 8] + g[i, start + c] * g[i, start + c]
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


@_compile
def _keep(rows: np.ndarray, place: np.int64, kept: np.ndarray, at: int) -> None:
    """kept[at] = rows[place], where kept has as many rows; one without any keeps nothing."""
    if at < kept.shape[0]:
        for j in range(rows.shape[1]):
            kept[at, j] = rows[place, j]


@_compile
def _adam(
    weights: np.ndarray,
    state: np.ndarray,
    r: np.int64,
    gradient: np.ndarray,
    i: int,
    width: int,
    lr: np.float32,
    c: np.ndarray,
    k: int,
) -> None:
    """Adam: the first moments stand in the first `width` columns of the state, the second ones behind them. lr: corrected for the step."""
    epsilon, root = c[k, EPSILON], c[k, ROOT]
    first, less_first, second, less_second = c[k, FIRST], c[k, FIRST + 1], c[k, SECOND], c[k, SECOND + 1]
    for j in range(width):
        g = gradient[i, j]
        m = first * state[r, j] + less_first * g
        v = second * state[r, width + j] + less_second * (g * g)
        state[r, j], state[r, width + j] = m, v
        weights[r, j] = weights[r, j] - (lr * m) / (np.sqrt(v) * root + epsilon)


@_compile
def _ftrl(
    weights: np.ndarray,
    state: np.ndarray,
    r: np.int64,
    gradient: np.ndarray,
    i: int,
    width: int,
    lr: np.float32,
    c: np.ndarray,
    k: int,
) -> None:
    """FTRL-Proximal: z stands in the first `width` columns of the state, n behind it. Before: lr is above 0."""
    l1, l2, beta = c[k, L1], c[k, L2], c[k, BETA]
    for j in range(width):
        g, before = gradient[i, j], state[r, width + j]
        n = before + g * g
        root = np.sqrt(n)
        sigma = (root - np.sqrt(before)) / lr
        z = state[r, j] + (g - sigma * weights[r, j])
        state[r, j], state[r, width + j] = z, n
        moved = (np.copysign(l1, z) - z) / ((beta + root) / lr + l2)
        weights[r, j] = np.float32(0) if abs(z) <= l1 else moved


@_compile
def _two_a_weight(
    kind: int,
    weights: np.ndarray,
    state: np.ndarray,
    r: np.int64,
    gradient: np.ndarray,
    i: int,
    width: int,
    lr: np.float32,
    c: np.ndarray,
    k: int,
) -> bool:
    """Update a row that has two numbers of state a weight; whether its optimizer is such a one."""
    if kind == ADAM:
        _adam(weights, state, r, gradient, i, width, lr, c, k)
    elif kind == FTRL and lr > 0:
        _ftrl(weights, state, r, gradient, i, width, lr, c, k)
    return kind in (ADAM, FTRL)


@_compile
def update_rows(
    weights: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    tables: np.ndarray,
    gradient: np.ndarray,
    rules: UpdateRules,
    before: tuple[np.ndarray, np.ndarray],
    two_a_weight: Literal[True] | None,
) -> None:
    """One update of each row weights[slots[i]], state[slots[i]] by gradient[i], by the rule of tables[i].

    Before: slots are distinct, so the order of the rows does not matter. After: row-wise Adagrad divided all columns of a part by the root of the
    part's one number; the others went through the columns one by one. Columns beyond the table's width were neither read nor written. before: as
    `_keep` has it. two_a_weight: None where no table is under Adam or FTRL-Proximal, compiled on its own, without them in the others' way.
    """
    kinds, rates, constants, widths = rules.kinds, rules.rates, rules.constants, rules.widths
    parts, part_offsets = rules.parts, rules.part_offsets
    columns, state_columns, last = weights.shape[1], state.shape[1], slots.size - 1
    scratch = np.empty(8, np.float32)
    for i in range(slots.size):
        ahead = np.int64(slots[min(i + _AHEAD, last)])
        for j in range(0, columns, _LINE):
            prefetch(weights, ahead * columns + j)
        for j in range(0, state_columns, _LINE):
            prefetch(state, ahead * state_columns + j)
        r, k = np.int64(slots[i]), tables[i]
        _keep(weights, r, before[0], i)
        _keep(state, r, before[1], i)
        kind, lr, width = kinds[k], rates[k], np.int64(widths[k])
        if two_a_weight is not None and _two_a_weight(kind, weights, state, r, gradient, i, width, lr, constants, k):
            continue
        if kind == SGD:
            for j in range(width):
                weights[r, j] = weights[r, j] - lr * gradient[i, j]
        elif kind == ADAGRAD:
            epsilon, decay = constants[k, EPSILON], constants[k, DECAY]
            for j in range(width):
                g = gradient[i, j]
                s = decay * state[r, j] + g * g
                state[r, j] = s
                weights[r, j] = weights[r, j] - (lr * g) / (np.sqrt(s) + epsilon)
        elif part_offsets[k + 1] == part_offsets[k] + 1:
            s = constants[k, DECAY] * state[r, 0] + _sum_of_squares(gradient, i, 0, width, scratch) / np.float32(width)
            state[r, 0] = s
            root, vectors = np.sqrt(s) + constants[k, EPSILON], width // COLUMNS * COLUMNS
            for j in range(0, vectors, COLUMNS):
                descend(gradient, i * columns + j, lr, root, weights, r * columns + j)
            for j in range(vectors, width):
                weights[r, np.uint64(j)] = weights[r, np.uint64(j)] - (lr * gradient[i, np.uint64(j)]) / root
        else:
            start = 0
            for p in range(part_offsets[k], part_offsets[k + 1]):
                end, own = start + parts[p], p - part_offsets[k]
                s = constants[k, DECAY] * state[r, own] + _sum_of_squares(gradient, i, start, end, scratch) / np.float32(parts[p])
                state[r, own] = s
                root = np.sqrt(s) + constants[k, EPSILON]
                for j in range(start, end):
                    weights[r, j] = weights[r, j] - (lr * gradient[i, j]) / root
                start = end


@_compile
def update_rows_rowwise(
    weights: np.ndarray,
    state: np.ndarray,
    slots: np.ndarray,
    tables: np.ndarray,
    gradient: np.ndarray,
    rules: UpdateRules,
    before: tuple[np.ndarray, np.ndarray],
) -> None:
    """`update_rows` where every table has rows of one part, as wide as the partition and a multiple of COLUMNS, under row-wise Adagrad.

    Before and after are the same. Without the other cases in its way it takes less than half the time.
    """
    columns, last = weights.shape[1], slots.size - 1
    rates, constants = rules.rates, rules.constants
    keeps, (weights_before, state_before) = before[0].shape[0] == slots.size, before
    for i in range(slots.size):
        ahead = np.int64(slots[min(i + _AHEAD, last)])
        for j in range(0, columns, _LINE):
            prefetch(weights, ahead * columns + j)
        prefetch(state, ahead)
        r, k = np.int64(slots[i]), tables[i]
        if keeps:
            for j in range(0, columns, COLUMNS):
                copy(weights, r * columns + j, weights_before, i * columns + j)
            state_before[i, 0] = state[r, 0]
        s = constants[k, DECAY] * state[r, 0] + eight_sums_of_squares(gradient, i * columns, columns // 8) / np.float32(columns)
        state[r, 0] = s
        root = np.sqrt(s) + constants[k, EPSILON]
        for j in range(0, columns, COLUMNS):
            descend(gradient, i * columns + j, rates[k], root, weights, r * columns + j)
