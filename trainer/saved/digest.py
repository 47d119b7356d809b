"""The digest of a trained model (docs/definitions.md, Digest): equal digests mean equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from foreload.trainer.saved.model_rows import ModelRows


class Digest:
    """SHA-256 of the dense part, and then of the tables in order, fed in pieces.

    Call model() once; or dense() once, and then for every table table() once and rows() any number of times, by ascending id.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"foreload digest 1\n")
        self._last: int | None = None

    def dense(self, parameters: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> None:
        """parameters: by name; state: by "<parameter>/<key>" (dense_optimizers.optimizer_state). All are hashed as float32."""
        for name in sorted(parameters):
            self._array(name, parameters[name])
        for name, key in sorted((path.rpartition("/")[0], path.rpartition("/")[2]) for path in state):
            self._array(f"{name}/{key}", state[f"{name}/{key}"])

    def _array(self, name: str, array: np.ndarray) -> None:
        shape = ",".join(str(size) for size in array.shape)
        self._hash.update(f"{name}\n{shape}\n".encode())
        self._hash.update(np.ascontiguousarray(array, "<f4").tobytes())

    def table(self, name: str) -> None:
        """Begin a table."""
        self._hash.update(f"table {name}\n".encode())
        self._last = None

    def rows(self, ids: np.ndarray, weights: np.ndarray, state: np.ndarray) -> None:
        """Rows of the table: ids int64 [n], ascending over all calls; weights float32 [n, W]; state float32 [n, S]. Raises ValueError."""
        if not len(ids):
            return
        if (self._last is not None and ids[0] <= self._last) or not (ids[1:] > ids[:-1]).all():
            raise ValueError("rows of a digest must come by ascending id, each once")
        self._last = int(ids[-1])
        pieces = [np.ascontiguousarray(ids, "<i8").view(np.uint8).reshape(len(ids), 8)]
        for values in (weights, state):
            if values.shape[1]:
                pieces.append(np.ascontiguousarray(values, "<f4").view(np.uint8))
        self._hash.update(np.hstack(pieces).data)

    def model(
        self, dense: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], tables: Sequence[str], rows: Iterator[ModelRows]
    ) -> str:
        """Hash a whole model: parameters and state, the tables' names, and every row by (table, id). Returns the digest, 64 hexadecimal digits."""
        self.dense(*dense)
        batch = next(rows, None)
        for table, name in enumerate(tables):
            self.table(name)
            while batch is not None and batch.table == table:
                self.rows(batch.ids, batch.weights, batch.state)
                batch = next(rows, None)
        return self.hexdigest()

    def hexdigest(self) -> str:
        """The digest of what was fed so far, 64 hexadecimal digits."""
        return self._hash.hexdigest()
