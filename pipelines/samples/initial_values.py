"""The rules by which rows begin (docs/definitions.md, Rows)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

_RULE = "must be uniform, uniform:A, xavier, normal:S or zeros, A and S being numbers above 0, such as uniform:0.05"


@dataclass(frozen=True, slots=True)
class InitialValues:
    """How the embeddings of a table's rows begin. Further columns of a row always begin at 0.

    Attributes:
        kind: uniform draws from [-a, a). xavier does so with a = sqrt(6 / (rows + D)), where D is
            the embedding's dimension. normal draws from a normal distribution.
        amount: a of uniform, or the standard deviation of normal. If None, a is 1 / sqrt(rows of
            the table), or that of xavier.
    """

    kind: Literal["uniform", "xavier", "normal", "zeros"] = "uniform"
    amount: float | None = None

    @classmethod
    def parse(cls, text: object) -> InitialValues:
        """Parse a rule as it is written in a feature file or a setting.

        Raises:
            ValueError: the text is not a rule. The message is what it must be.
        """
        if text in ("uniform", "xavier", "zeros"):
            return cls(text)
        kind, _, number = str(text).partition(":")
        if not isinstance(text, str) or kind not in ("uniform", "normal"):
            raise ValueError(f"{_RULE}; got {text!r}")
        try:
            amount = float(number)
        except ValueError:
            raise ValueError(f"{_RULE}; got {text!r}") from None
        with np.errstate(over="ignore", under="ignore"):
            rounded = float(np.float32(amount))
        if not (math.isfinite(rounded) and rounded > 0):
            raise ValueError(f"{_RULE}, also as float32; got {text!r}")
        return cls("normal" if kind == "normal" else "uniform", amount)

    def __str__(self) -> str:
        return self.kind if self.amount is None else f"{self.kind}:{self.amount!r}"

    def scale(self, rows: int, dimension: int) -> np.float32:
        """Return the factor of a table's draws.

        Args:
            rows: of the table.
            dimension: D, the columns of the embedding.
        """
        if self.kind == "zeros":
            return np.float32(0)
        if self.kind == "xavier":
            return np.float32(math.sqrt(6.0 / (rows + dimension)))
        return np.float32(1.0 / math.sqrt(rows) if self.amount is None else self.amount)
