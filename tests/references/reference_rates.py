"""Learning rates of the plain trainer: their schedules, with powers and cosines in a fixed order of operations."""

from __future__ import annotations

import itertools
import math


def rate_factor(schedule: str, step: int) -> float:
    """What a learning rate is multiplied by at a training step."""
    words = [word.split(":") for word in schedule.split(",")]
    if words[0][0].isdigit():
        points = [(int(at), float(value)) for at, value in words]
        if step < points[0][0]:
            return points[0][1]
        for (a, x), (b, y) in itertools.pairwise(points):
            if a <= step < b:
                return x + (y - x) * ((step - a) / (b - a))
        return points[-1][1]
    n = int(words.pop(0)[1]) if words[0][0] == "warmup" else 0
    if step < n:
        return (step + 1) / n
    if not words:
        return 1.0
    kind, end, x = words[0][0], int(words[0][1]), float(words[0][2])
    if kind == "step":
        return power(x, (step - n) // end)
    t = min(step - n, end - n) / (end - n)
    return 1 + (x - 1) * t if kind == "linear" else x + (1 - x) * ((1 + cosine(t)) / 2)


def power(base: float, exponent: int) -> float:
    """By squaring from the lowest bit up."""
    product = 1.0
    while exponent:
        product = product * base if exponent % 2 else product
        exponent, base = exponent // 2, base * base
    return product


def cosine(t: float) -> float:
    """cos(pi t), 0 <= t <= 1."""
    if t > 0.5:
        return -cosine(1 - t)
    q, total = (math.pi * t) * (math.pi * t), 1.0
    for k in range(11, 0, -1):
        total = 1 - q / ((2 * k - 1) * (2 * k)) * total
    return total
