"""Samples without Beam: those of a split, and samples in memory as the source of a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from reference_data import shuffled

from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import Samples
from foreload.pipelines.sources import read_records
from foreload.pipelines.sources.splits import Piece, Split


def read_split(split: Split, spec: FeatureSpec) -> Iterator[Piece]:
    """Yield the samples of a split in order, encoded, with their order keys and the malformed records among them. Raises SourceError."""
    encoder = Encoder(spec)
    for records in read_records(split, spec, encoder.scales):
        yield Piece(encoder.encode(records), records.keys, records.rejects, records.rejected)


@dataclass(frozen=True)
class MemorySource:
    """An OrderedSource (pipelines/samples/pieces) of samples in memory, in chunks of `chunk` samples. shuffle_seed: None: no shuffle."""

    train: Samples
    held_out: Samples
    chunk: int
    shuffle_seed: int | None
    slices = None
    evaluation_sets = ()

    @property
    def expected_samples(self) -> int:
        return self.training_samples

    @property
    def training_samples(self) -> int:
        return len(self.train)

    @property
    def evaluation_samples(self) -> int:
        return len(self.held_out)

    @property
    def shuffled(self) -> bool:
        return self.shuffle_seed is not None

    def order(self, epoch: int) -> np.ndarray:
        if self.shuffle_seed is None:
            return np.arange(len(self.train))
        return shuffled(self.shuffle_seed, epoch, len(self.train))

    def training(self, epoch: int) -> Iterator[tuple[Samples, np.ndarray]]:
        order = self.order(epoch)
        yield from self._chunks(self.train.take(order), order)

    def evaluation(self) -> Iterator[tuple[Samples, np.ndarray]]:
        yield from self._chunks(self.held_out, np.arange(len(self.held_out)))

    def _chunks(self, samples: Samples, numbers: np.ndarray) -> Iterator[tuple[Samples, np.ndarray]]:
        for first in range(0, len(samples), self.chunk):
            last = min(first + self.chunk, len(samples))
            yield samples.slice(first, last), numbers[first:last]
