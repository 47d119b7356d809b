"""On real clicks, arrivals are Belady's minimum, of an independent simulation, and far fewer than an LRU cache needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from belady import belady_arrivals, lru_arrivals
from memory_source import MemorySource
from reference_data import Feature, Label, Log, Table, load

from foreload.pipelines.compiler.compile import Compilation, CompileSettings
from foreload.pipelines.samples import features as spec
from foreload.pipelines.samples.pieces import Samples

NAMES = ("ip", "app", "device", "os", "channel")
COLUMN_OF = {"ip": "..ip"}  # the sample's header, where it is not the name
BATCH_SIZE = 256


@pytest.fixture(scope="module")
def clicks(data: Path) -> tuple[np.ndarray, tuple[int, ...]]:
    """Ids of the 100,000 clicks by click_time, int64 [clicks, 5], and the tables' rows."""
    log = Log(
        (Label("is_attributed", "is_attributed"),),
        (),
        tuple(Feature(name, table, COLUMN_OF.get(name, name), "vocabulary") for table, name in enumerate(NAMES)),
        tuple(Table(name, None) for name in NAMES),
        "click_time",
    )
    found = load(log, [data / "talkingdata" / "train_sample.csv"])
    return np.array([[bag[0] for bag in bags] for bags in found.training.bags]), found.rows


@pytest.mark.parametrize("slots", [3_000, *(pytest.param(slots, marks=pytest.mark.full) for slots in (1_000, 8_000))])
def test_arrivals_are_beladys_minimum(clicks: tuple[np.ndarray, tuple[int, ...]], slots: int, tmp_path: Path) -> None:
    ids, rows = clicks
    features = spec.FeatureSpec(
        labels=(spec.Label("is_attributed", "is_attributed"),),
        dense=(),
        features=tuple(spec.Feature(name, table, name, "id") for table, name in enumerate(NAMES)),
        tables=tuple(spec.Table(name, count) for name, count in zip(NAMES, rows, strict=True)),
    )
    nothing = np.zeros((len(ids), 0), np.float32)
    source = MemorySource(
        train=Samples(np.zeros((len(ids), 1), np.float32), nothing, ids.reshape(-1)),
        held_out=Samples(np.zeros((0, 1), np.float32), nothing[:0], np.zeros(0, np.int64)),
        chunk=8192,
        shuffle_seed=None,
    )
    settings = CompileSettings(features, BATCH_SIZE, lanes=1, slots=slots)
    manifest = Compilation(settings, tmp_path).compile(source, tmp_path)
    steps = [
        [(table, row) for sample in ids[first : first + BATCH_SIZE].tolist() for table, row in enumerate(sample)]
        for first in range(0, len(ids), BATCH_SIZE)
    ]
    arrivals, fewest, lru = manifest["counts"]["arrivals"], belady_arrivals(steps, slots), lru_arrivals(steps, slots)
    print(f"{slots} slots: {arrivals} arrivals, {arrivals / fewest:.6f} of Belady's {fewest}; LRU {lru}, {lru / fewest:.3f}")
    # With the lookahead that schedules have by default.
    assert arrivals == fewest
    assert lru > 1.05 * fewest
