"""Sums of the plain trainer, of float32 in a fixed order: a row's gradients of its lookups and of the lanes, and the norm that is clipped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch


def sum_in_order(groups: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Per group the sum of its values in their order, starting from the first. groups: int [n], each of 0..count-1 present; values [n, W]."""
    by_group = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[by_group], np.arange(count))
    occurrence = np.empty(len(groups), np.int64)
    occurrence[by_group] = np.arange(len(groups)) - starts[groups[by_group]]
    result = values[by_group[starts]]
    # All first values, then all second ones, ...: within one round no group comes twice.
    rounds = np.argsort(occurrence, kind="stable")
    bounds = np.searchsorted(occurrence[rounds], np.arange(1, occurrence.max(initial=0) + 2))
    for first, last in itertools.pairwise(bounds):
        chosen = rounds[first:last]
        result[groups[chosen]] = result[groups[chosen]] + values[chosen]
    return result


def add_lanes(lanes: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a step and their gradients: every lane's (distinct ids, gradients [ids, W]) added in lane order."""
    ids = np.unique(np.concatenate([lane_ids for lane_ids, _ in lanes]))
    total = np.zeros((len(ids), lanes[0][1].shape[1]), np.float32)
    begun = np.zeros(len(ids), bool)
    for lane_ids, gradients in lanes:
        at = np.searchsorted(ids, lane_ids)
        total[at] = np.where(begun[at][:, None], total[at] + gradients, gradients)
        begun[at] = True
    return ids, total


def clip(gradients: Sequence[torch.Tensor], most: float) -> None:
    """Scale gradients whose norm over all of them is larger."""
    total = 0.0
    for gradient in gradients:
        values = gradient.numpy().reshape(-1).astype(np.float64)
        sums = [0.0] * 8
        for place, value in enumerate(values.tolist()):
            sums[place % 8] += value * value
        sums = [a + b for a, b in zip(sums[:4], sums[4:], strict=True)]
        total += (sums[0] + sums[2]) + (sums[1] + sums[3])
    norm = math.sqrt(total)
    if norm > most:
        for gradient in gradients:
            gradient *= np.float32(most / norm).item()
