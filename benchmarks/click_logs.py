"""Click logs for benchmarks, made from the synthetic rows: as Parquet with ids, and as a Criteo file with hexadecimal texts and blanks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numba as nb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from foreload.base.hashing import mix
from foreload.pipelines.samples.features import CRITEO_CATEGORICAL, CRITEO_DENSE, KAGGLE_ROWS
from foreload.pipelines.sources.synthetic import Generator

CHUNK_ROWS = 1 << 18  # also of a row group
SEED = 0
_SPREADS = [1.5, 4, 3, 2, 8, 5, 3, 2.5, 4, 0.5, 1.5, 0.5, 2]  # logarithms of the largest integers of a Criteo column, about
_BLANK_SHARES = [0, 0, 0.03, 0.03, 0, 0.12]  # of the categorical columns in turn, in 1 / 256 where they are drawn


def write_features(path: Path) -> None:
    """The feature file of the Parquet file: ids and dense values as they are, Criteo's Kaggle tables."""
    lines = ['label = "label"']
    lines += [f'[[dense]]\nname = "{name}"\ntransform = "none"' for name in CRITEO_DENSE]
    for name, rows in zip(CRITEO_CATEGORICAL, KAGGLE_ROWS, strict=True):
        lines.append(f'[[feature]]\nname = "{name}"\nencoding = "id"\nrows = {rows}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(path: Path, rows: int) -> None:
    """label int8, I1 .. I13 float32 (one in sixteen missing), C1 .. C26 int32; PyArrow's own defaults otherwise."""
    writer = None
    for _, labels, dense, ids in _chunks(rows):
        columns = {"label": pa.array(labels.astype(np.int8))}
        columns |= {
            name: pa.array(values.astype(np.float32), from_pandas=True) for name, values in zip(CRITEO_DENSE, dense, strict=True)
        }
        columns |= {name: pa.array(values.astype(np.int32)) for name, values in zip(CRITEO_CATEGORICAL, ids, strict=True)}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def write_criteo(path: Path, rows: int) -> None:
    """A Criteo file: label, 13 integers, 26 texts of 8 hexadecimal digits, some of either blank; about 250 bytes a row."""
    with path.open("w", encoding="ascii") as file:
        for start, labels, dense, ids in _chunks(rows):
            columns = [pa.array(labels.astype(np.int8)).cast(pa.string())]
            for values, spread in zip(dense, _SPREADS, strict=True):
                counts = np.expm1(np.abs(np.nan_to_num(values)) * spread).astype(np.int64)
                columns.append(_blanked(pa.array(counts).cast(pa.string()), np.isnan(values)))
            for place, values in enumerate(ids):
                texts = pa.array(_hexadecimal(values, place).view("S8").reshape(-1)).cast(pa.string())
                blank = (
                    np.random.default_rng([SEED, start, place]).random(len(values)) < _BLANK_SHARES[place % len(_BLANK_SHARES)]
                )
                columns.append(_blanked(texts, blank))
            lines = pc.binary_join_element_wise(*columns, "\t")
            file.write("\n".join(lines.to_pylist()) + "\n")


def _chunks(rows: int) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """(first row, labels [n], dense [13, n], NaN where missing, ids [26, n]) of consecutive rows."""
    generator = Generator(SEED, tuple(KAGGLE_ROWS))
    for start in range(0, rows, CHUNK_ROWS):
        yield start, *generator.rows(start, min(start + CHUNK_ROWS, rows))


def _blanked(texts: pa.Array, blank: np.ndarray) -> pa.Array:
    return pc.if_else(pa.array(blank), pa.scalar(""), texts)


@nb.njit(cache=True)
def _hexadecimal(ids: np.ndarray, column: int) -> np.ndarray:
    """8 digits of a hash of each id: uint8 [n, 8]."""
    digits = np.empty((len(ids), 8), np.uint8)
    for i in range(len(ids)):
        h = mix(np.uint64(ids[i]) ^ (np.uint64(column) << np.uint64(56)))
        for j in range(8):
            digit = (h >> np.uint64(4 * j)) & np.uint64(15)
            digits[i, j] = digit + np.uint64(48 if digit < 10 else 87)
    return digits
