"""Whole tables of the plain trainer: initial rows, and a step of each row optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from reference_data import key_array, mix_array
from reference_rates import power

DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {},
    "adagrad": {"epsilon": 1e-8, "decay": 1.0},
    "rowwise_adagrad": {"epsilon": 1e-8, "decay": 1.0},
    "adam": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "ftrl": {"l1": 0.0, "l2": 0.0, "beta": 1.0},
}
"""Options of the row optimizers."""


def initial_weights(seed: int, table: int, ids: np.ndarray, rows: int, dimension: int, rule: str = "uniform") -> np.ndarray:
    """Initial `weights` columns, float32 [len(ids), dimension]."""
    h = key_array((seed, table), ids)
    result = np.zeros((len(ids), dimension), np.float32)
    kind, _, given = rule.partition(":")
    if kind == "zeros":
        return result
    if kind == "normal":
        for column in range(dimension):
            words = np.stack([mix_array(h ^ np.uint64(3 * column + i)) for i in range(3)]).astype("<u8")
            total = np.ascontiguousarray(words.T).view("<u2").astype(np.int64).sum(axis=1)
            result[:, column] = np.float32(2.0**-16) * (total - 393210).astype(np.float32) * np.float32(float(given))
        return result
    bound = float(given) if given else np.sqrt(6.0 / (rows + dimension)) if kind == "xavier" else 1.0 / np.sqrt(float(rows))
    scale = np.float32(bound)
    for column in range(dimension):
        b = mix_array(h ^ np.uint64(column // 2))
        u = (b >> np.uint64(40)) if column % 2 == 0 else (b >> np.uint64(16)) & np.uint64(0xFFFFFF)
        result[:, column] = ((u.astype(np.float64) - 2.0**23) * 2.0**-23).astype(np.float32) * scale
    return result


class Table:
    """A whole table. weights: float32 [rows, W]; state: float32 [rows, S]; used: bool [rows], rows of training steps so far.

    Rows outside `touched` are never read, and keep zeros, so that a large table costs memory only for its touched pages.
    """

    def __init__(
        self,
        rows: int,
        parts: Sequence[int],
        optimizer: str,
        lr: float,
        options: Mapping[str, float] | None = None,
        initial: str = "uniform",
        penalties: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """penalties: (l1, l2) of the `weights` columns, before the optimizer."""
        self.initial, self.penalties = initial, penalties
        self.parts, self.optimizer, self.lr = list(parts), optimizer, lr
        self.options = DEFAULTS[optimizer] | dict(options or {})
        self.width = width = sum(parts)
        state_width = {"sgd": 0, "adagrad": width, "rowwise_adagrad": len(self.parts), "adam": 2 * width, "ftrl": 2 * width}[
            optimizer
        ]
        self.rows = rows
        self.weights = np.zeros((rows, self.width), np.float32)
        self.state = np.zeros((rows, state_width), np.float32)
        self.used = np.zeros(rows, bool)

    def initialise(self, seed: int, number: int, touched: np.ndarray) -> None:
        self.weights[touched, : self.parts[0]] = initial_weights(seed, number, touched, self.rows, self.parts[0], self.initial)

    def update(self, ids: np.ndarray, gradients: np.ndarray, number: int = 0) -> None:
        """A step of the row optimizer, of this number. ids: int64 [n], distinct; gradients: float32 [n, W]."""
        self.used[ids] = True
        if any(self.penalties):
            l1, l2 = map(np.float32, self.penalties)
            own = self.parts[0]
            w, gradients = self.weights[ids, :own], gradients.copy()
            gradients[:, :own] = (gradients[:, :own] + l2 * w) + l1 * np.sign(w)
        lr, option = np.float32(self.lr), {name: np.float32(value) for name, value in self.options.items()}
        if self.optimizer == "sgd":
            self.weights[ids] = self.weights[ids] - lr * gradients
        elif self.optimizer == "adagrad":
            state = option["decay"] * self.state[ids] + gradients * gradients
            self.state[ids] = state
            self.weights[ids] = self.weights[ids] - (lr * gradients) / (np.sqrt(state) + option["epsilon"])
        elif self.optimizer == "adam":
            self.adam(ids, gradients, number + 1, option)
        elif self.optimizer == "ftrl":
            if lr > 0:
                self.ftrl(ids, gradients, lr, option)
        else:
            start = 0
            for number, columns in enumerate(self.parts):
                g = gradients[:, start : start + columns]
                sums = option["decay"] * self.state[ids, number] + sum_of_squares(g) / np.float32(columns)
                self.state[ids, number] = sums
                step = (lr * g) / (np.sqrt(sums) + option["epsilon"])[:, None]
                self.weights[ids, start : start + columns] = self.weights[ids, start : start + columns] - step
                start += columns

    def adam(self, ids: np.ndarray, g: np.ndarray, t: int, option: Mapping[str, np.float32]) -> None:
        m, v = np.split(self.state[ids], 2, axis=1)
        first, second = self.options["beta1"], self.options["beta2"]
        m = option["beta1"] * m + np.float32(1 - first) * g
        v = option["beta2"] * v + np.float32(1 - second) * (g * g)
        rate, root = np.float32(self.lr / (1 - power(first, t))), np.float32(1 / math.sqrt(1 - power(second, t)))
        self.state[ids] = np.concatenate([m, v], axis=1)
        self.weights[ids] = self.weights[ids] - (rate * m) / (np.sqrt(v) * root + option["epsilon"])

    def ftrl(self, ids: np.ndarray, g: np.ndarray, lr: np.float32, option: Mapping[str, np.float32]) -> None:
        z, n = np.split(self.state[ids], 2, axis=1)
        total = n + g * g
        sigma = (np.sqrt(total) - np.sqrt(n)) / lr
        z = z + (g - sigma * self.weights[ids])
        self.state[ids] = np.concatenate([z, total], axis=1)
        changed = (np.where(z > 0, option["l1"], -option["l1"]) - z) / ((option["beta"] + np.sqrt(total)) / lr + option["l2"])
        self.weights[ids] = np.where(abs(z) <= option["l1"], np.float32(0), changed)


def sum_of_squares(g: np.ndarray) -> np.ndarray:
    """Q(g) of every row: float32 [n, columns] -> [n], eight running sums and then a tree."""
    p = np.zeros((len(g), 8), np.float32)
    for column in range(g.shape[1]):
        p[:, column % 8] = p[:, column % 8] + g[:, column] * g[:, column]
    for half in (4, 2):
        p[:, :half] = p[:, :half] + p[:, half : 2 * half]
    return p[:, 0] + p[:, 1]
