"""What PyArrow takes to parse a Criteo file, and the project's kernel to hash its strings: nothing is kept, ordered or written.

python benchmarks/parse_and_hash.py rows.tsv --threads 1
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.csv as arrow_csv

from foreload.pipelines.samples.encode import hashed_ids
from foreload.pipelines.samples.features import (
    CRITEO_CATEGORICAL,
    CRITEO_COLUMNS,
    CRITEO_DENSE,
    KAGGLE_ROWS,
)

BLOCK_BYTES = 4 << 20  # the fastest of 1, 4 and 16 MiB


def batches(path: str, threads: int) -> Iterator[pa.RecordBatch]:
    """The file's rows, typed: by PyArrow's streaming reader in one thread, as a whole table in several, whichever is faster."""
    types = {"label": pa.int8()} | dict.fromkeys(CRITEO_DENSE, pa.float32()) | dict.fromkeys(CRITEO_CATEGORICAL, pa.string())
    options = (
        arrow_csv.ReadOptions(use_threads=threads > 1, column_names=list(CRITEO_COLUMNS), block_size=BLOCK_BYTES),
        arrow_csv.ParseOptions(delimiter="\t", quote_char=False),
        arrow_csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    if threads == 1:
        yield from arrow_csv.open_csv(path, *options)
    else:
        yield from arrow_csv.read_csv(path, *options).to_batches()


def hash_strings(batch: pa.RecordBatch) -> None:
    """The ids of the categorical columns."""
    for name, rows in zip(CRITEO_CATEGORICAL, KAGGLE_ROWS, strict=True):
        hashed_ids(batch.column(name), rows)


def main() -> None:
    """Parse and hash one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    pa.set_cpu_count(given.threads)
    if given.threads == 1:
        for batch in batches(given.source, 1):
            hash_strings(batch)
    else:
        with ThreadPoolExecutor(given.threads) as pool:
            list(pool.map(hash_strings, batches(given.source, given.threads)))


if __name__ == "__main__":
    main()
