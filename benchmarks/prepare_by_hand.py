"""What `foreload prepare` does, written by hand for one case: PyArrow, NumPy and the project's own kernels, without Beam.

    python benchmarks/prepare_by_hand.py rows.parquet --features features.toml --slots 200000 --batch-size 2048 --out schedule

One Parquet file with ids and dense values as they are, one lane, no evaluation, no order, no malformed records: row group after row group
goes from the file into the compiler, in one process. The schedule is, byte for byte, the one that `prepare` writes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from foreload.pipelines.compiler.compile import Compilation, CompileSettings
from foreload.pipelines.samples.dense import rows_of
from foreload.pipelines.samples.feature_file import load_features
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import Samples

SEGMENT_BYTES = 64 << 20
ROW_BYTES = 4 * (32 + 1) + 12  # prepare's, where the tables name no dimension


class ParquetSource:
    """An OrderedSource of one Parquet file, read as it is asked for."""

    evaluation_samples = 0
    evaluation_sets = ()
    shuffled, slices = False, None

    def __init__(self, path: Path, spec: FeatureSpec) -> None:
        self._file = pq.ParquetFile(path, memory_map=True)
        self._spec = spec
        self.expected_samples: int = self._file.metadata.num_rows
        self.training_samples = self.expected_samples

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        """The file's rows by row group."""
        number = 0
        for group in range(self._file.num_row_groups):
            table = self._file.read_row_group(group, columns=list(self._spec.columns), use_threads=False)
            columns = {name: table[name].to_numpy() for name in table.column_names}  # NaN where a dense value is missing
            rows = table.num_rows
            dense = [columns[entry.column] for entry in self._spec.dense]
            dense = [np.where(np.isnan(values), 0.0, values) for values in dense]
            ids = rows_of([columns[feature.column] for feature in self._spec.features], rows, np.int64)
            labels = rows_of([columns[label.column] for label in self._spec.labels], rows, np.float32)
            samples = Samples(labels, rows_of(dense, rows, np.float32), ids.reshape(-1))
            yield samples, np.arange(number, number + rows)
            number += rows

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        """Nothing."""
        return iter(())


def main() -> None:
    """Compile one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    spec = load_features(given.features)
    settings = CompileSettings(
        features=spec,
        batch_size=given.batch_size,
        lanes=1,
        slots=given.slots,
        segment_bytes=SEGMENT_BYTES,
        settings={
            "slots": given.slots,
            "memory_bytes": None,
            "row_bytes": ROW_BYTES,
            "segment_bytes": SEGMENT_BYTES,
            "eval_fraction": 0.0,
            "eval_source": False,
            "encoding": None,
        },
    )
    given.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=given.out.parent) as work:
        Compilation(settings, given.out).compile(ParquetSource(given.source, spec), Path(work))


if __name__ == "__main__":
    main()
