"""The reference workload: synthetic Criteo-shaped rows, a first schedule whose rows fill a store, and the schedule after it that is timed.

The first schedule is not trained: every row of its row table is put into the store as it would be read there (initial values, its id and
tag, in its place), the store is saved, and whoever is timed starts from a copy. The second schedule is prepared `--after` the first from
the beginning of the same data, as a second epoch is, so that all its arrivals must be fetched.

What is made stays in a folder, and whoever asks for it next finds it there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numba as nb
import numpy as np
import redis

from comparison import tell
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import (
    COMMAND_ROWS,
    NO_ROWS,
    Store,
    Write,
)
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.stripes import LaneStripes, shards_of
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.namespace import claim, lane_key
from foreload.cache.rows.layout import RowLayout
from foreload.cache.rows.row_bytes import PARITY_BIT, encode_rows, fields, initial_weights
from foreload.pipelines.schedule.format import Event
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import state_after

ROOT = Path(__file__).resolve().parent.parent
BATCH = 2048
DIM = 32
SLOTS = 200_000
SHARDS = 3
SEED = 0
LR = 0.05
NAMESPACE = RUN_ID = "bench"
FILLED = 1  # the last write-back batch that each lane of a filled store is said to have had
PARITY = (2, 1)
# What a store holds: rows without parity, with parity, as a user would store them (one key a row), or nothing.
Filled = Literal["rows", "parity", "plain"]
Kind = Filled | Literal["empty"]
MODELS = {
    "small": {"bottom": "64-32", "top": "64-1"},
    "Bagpipe's": {"bottom": "512-256-64-32", "top": "1024-1024-1024-256-128-1"},
}
"""Options of foreload.trainer.models.dlrm.DLRM."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a workload is. samples: of the first schedule; steps: of the second one."""

    name: str
    samples: int
    steps: int


FULL = Size("full", 8_800_000, 1_500)
QUICK = Size("quick", 400_000, 195)


class Workload:
    """The workload in `folder`; its parts are made when they are first asked for."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.size = size
        self.folder = (folder / size.name).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def first(self) -> Schedule:
        """The schedule that fills the store."""
        return Schedule(self._prepare("first", self.size.samples, SLOTS))

    def second(self, slots: int = SLOTS, steps: int | None = None) -> Schedule:
        """A schedule after the first one: `steps` of the same data once more (default: as many as are timed)."""
        steps = self.size.steps if steps is None else steps
        after = ("--after", str(self.first.path))
        return Schedule(self._prepare(f"second-{slots}-{steps}", steps * BATCH, slots, *after))

    def _prepare(self, name: str, samples: int, slots: int, *more: str) -> Path:
        out = self.folder / name
        if not (out / "schedule.json").exists():
            tell(f"preparing {samples:,} samples, {slots:,} slots: {out}")
            given = ["--format", "synthetic", "--rows", str(samples), "--seed", str(SEED), "--batch-size", str(BATCH)]
            command = [
                sys.executable,
                "-m",
                "foreload.pipelines.prepare",
                *given,
                "--slots",
                str(slots),
                "--out",
                str(out),
                "--overwrite",
            ]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([*command, *more], env=environment, stdout=subprocess.DEVNULL, check=True)
        return out

    @cached_property
    def rows(self) -> int:
        """Rows in the store."""
        return sum(len(batch["id"]) for batch in self.first.rows())

    @cached_property
    def layouts(self) -> list[RowLayout]:
        """The layout of every table's rows: row-wise Adagrad, one state."""
        tables = self.first.header.features.tables
        return [
            RowLayout(k, table.name, table.rows or 0, (("weights", DIM),), "rowwise_adagrad") for k, table in enumerate(tables)
        ]

    @cached_property
    def bases(self) -> np.ndarray:
        """Where each table begins when all stand one after the other, and their total: int64 [tables + 1]."""
        return np.cumsum([0, *(layout.rows for layout in self.layouts)])

    def _filled(self) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        """The first schedule's row table, and each row as it is stored, uint8 [n, 144]."""
        for batch in self.first.rows(1 << 18):
            count = len(batch["id"])
            weights, rows = np.empty((count, DIM), np.float32), np.empty((count, self.layouts[0].row_bytes), np.uint8)
            for table in np.unique(batch["table"]):
                # Rows stand by table, so those of one table are a slice.
                start, end = np.searchsorted(batch["table"], (table, table + 1))
                initial_weights(SEED, self.layouts[table], batch["id"][start:end], weights[start:end])
            encode_rows(weights, np.zeros((count, 1), np.float32), batch["id"], batch["tag"], DIM, 1, rows)
            yield batch, rows

    def _saved(self, kind: Filled) -> Path:
        """A folder with what servers saved that were filled with all rows of the first schedule; filled where it is not there whole."""
        saved, fill = {
            "rows": (self.folder / "store", self._fill),
            "parity": (self.folder / "parity-store", self._fill_parity),
            "plain": (self.folder / "plain-store", self._fill_plain),
        }[kind]
        if not (saved / "whole").exists():
            shutil.rmtree(saved, ignore_errors=True)
            tell(f"filling the {saved.name}")
            with _running(saved, save=True) as stores:
                fill(stores)
            (saved / "whole").touch()
        return saved

    def _fill(self, stores: LocalStores) -> None:
        placement = Placement.spread(SHARDS)
        with Store(stores.urls, timedelta(seconds=60)) as store:
            self._claim(store)
            for batch, rows in self._filled():
                names = fields(batch["table"], batch["ordinal"])
                writes = []
                for lane in map(int, np.unique(batch["lane"])):
                    shards = shards_of(placement, lane, batch["table"], batch["ordinal"])
                    for shard in range(SHARDS):
                        places = np.flatnonzero((shards == shard) & (batch["lane"] == lane))
                        for start in range(0, len(places), COMMAND_ROWS):
                            some = places[start : start + COMMAND_ROWS]
                            writes.append(Write(shard, lane_key(NAMESPACE, lane, 0), names[some], rows[some]))
                store.exchange([], writes)
            self._mark(store)

    def _mark(self, store: Store) -> None:
        """Say that every lane has had its write-back batches, so that its next owner finds its rows and keeps them."""
        for lane in range(self.first.header.lanes):
            marker = Marker(FILLED, FILLED).stored()
            store.exchange([], [Write(shard, lane_key(NAMESPACE, lane, 0), *NO_ROWS, marker) for shard in range(SHARDS)])

    def _claim(self, store: Store) -> None:
        """What a run's beginning leaves on its store."""
        claim(store, NAMESPACE, {"run": RUN_ID, "lanes": self.first.header.lanes}, "new")

    def _by_table(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Each table, with lane, ordinal and stored bytes of all its rows."""
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        last = -1
        for batch, rows in self._filled():
            for table in map(int, np.unique(batch["table"])):
                if parts and table != last:
                    yield last, *_joined(parts)
                    parts = []
                start, end = np.searchsorted(batch["table"], (table, table + 1))
                parts.append((batch["lane"][start:end], batch["ordinal"][start:end], rows[start:end]))
                last = table
        yield last, *_joined(parts)

    def _fill_parity(self, stores: LocalStores) -> None:
        """With parity rows, 2+1."""
        placement = Placement.spread(SHARDS, *PARITY)
        with Store(stores.urls, timedelta(seconds=60)) as store:
            self._claim(store)
            for table, lanes, ordinals, rows in self._by_table():
                for lane in map(int, np.unique(lanes)):
                    of_lane = lanes == lane
                    _write_stripes(store, placement, lane, table, ordinals[of_lane], rows[of_lane])
            self._mark(store)

    def _fill_plain(self, stores: LocalStores) -> None:
        """As a user would store them: one key a row (8 bytes: table and id), MGET and MSET; the shard is id mod shards."""
        width = 4 * (DIM + 1)
        clients = [redis.Redis(unix_socket_path=url.removeprefix("unix://")) for url in stores.urls]
        for batch, rows in self._filled():
            numbers = self.bases[batch["table"]] + batch["id"]
            for shard, client in enumerate(clients):
                for places in np.array_split(np.flatnonzero(numbers % SHARDS == shard), 32):
                    keys, values = numbers[places].astype(">i8").tobytes(), rows[places, :width].tobytes()
                    if len(places):
                        client.mset({keys[8 * k : 8 * k + 8]: values[width * k : width * k + width] for k in range(len(places))})
        for client in clients:
            client.close()

    def copy_store(self, kind: Filled, folder: Path) -> None:
        """Copy a filled store, as its servers saved it, into the folder of servers that do not run."""
        for file in self._saved(kind).glob("*.rdb"):
            shutil.copy(file, folder)

    @contextmanager
    def stores(self, kind: Kind = "rows") -> Iterator[LocalStores]:
        """Servers of one's own with a copy of the filled store, or empty ones; they and their folder are gone afterwards."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="copy-") as name:
            if kind != "empty":
                self.copy_store(kind, Path(name))
            with _running(Path(name), save=False) as stores:
                yield stores

    def ids(self, schedule: Schedule, most: int | None = None) -> Path:
        """A NumPy file of what a trainer without a schedule reads: each lookup's row as table base + id, int64 [steps, 2,048 * 26].

        most: steps, where the schedule's first ones are enough.
        """
        header = schedule.header
        steps = min(header.training_samples // BATCH, most or header.training_samples)
        path = self.folder / f"ids-{steps}.npy"  # all schedules begin with the same data
        if not path.exists():
            tell(f"writing the ids of {steps:,} steps")
            shape = (steps, BATCH * len(header.features.features))
            temporary = path.with_suffix(".tmp.npy")
            out = np.lib.format.open_memmap(temporary, "w+", np.int64, shape)
            row_of_slot = np.zeros(header.slots[0], np.int64)
            entry = state_after(schedule, header.first_step - 1).lanes[0]
            row_of_slot[entry.slots] = self.bases[entry.occupants.table] + entry.occupants.id
            for event in schedule.events():
                if event.step - header.first_step >= steps:
                    break
                moves = schedule.lane(event, 0)
                row_of_slot[moves.arrivals.slot] = self.bases[moves.arrivals.table] + moves.arrivals.id
                _look_up(row_of_slot, moves.slots, moves.index, out[event.step - header.first_step])
            out.flush()
            temporary.rename(path)
        return path


@nb.njit(nogil=True, cache=True)
def _look_up(row_of_slot: np.ndarray, slots: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    for l in range(index.size):
        out[l] = row_of_slot[slots[index[l]]]


def _joined(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first, second, third = (np.concatenate(column) for column in zip(*parts, strict=True))
    return first, second, third


def _write_stripes(store: Store, placement: Placement, lane: int, table: int, ordinals: np.ndarray, rows: np.ndarray) -> None:
    """Write all rows of a table in a lane, and their parity rows: XOR, R being 1."""
    k, count = placement.k, len(ordinals)
    stripe = np.arange(-(-count // k))
    # A member that the last stripe may lack counts as zeros.
    members = np.zeros((len(stripe) * k, rows.shape[1]), np.uint8)
    members[ordinals] = rows
    parity = np.bitwise_xor.reduce(members.reshape(len(stripe), k, -1), axis=1)
    shards = LaneStripes.of(placement, lane, np.zeros(table + 1, np.int64)).shards(table, stripe)
    names = fields(np.full(count, table), np.arange(count))
    parity_names = fields(np.full(len(stripe), table), stripe) | PARITY_BIT
    key = lane_key(NAMESPACE, lane, 0)
    for shard in range(SHARDS):
        of_rows = _writes(shard, key, shards[:, :k].reshape(-1)[:count], names, members)
        store.exchange([], [*of_rows, *_writes(shard, key, shards[:, k], parity_names, parity)])


def _writes(shard: int, key: bytes, shards: np.ndarray, names: np.ndarray, rows: np.ndarray) -> Iterator[Write]:
    """The writes of those rows that belong to a shard."""
    places = np.flatnonzero(shards == shard)
    for start in range(0, len(places), COMMAND_ROWS):
        some = places[start : start + COMMAND_ROWS]
        yield Write(shard, key, names[some], rows[some])


@contextmanager
def _running(folder: Path, save: bool) -> Iterator[LocalStores]:
    stores = LocalStores(SHARDS, folder).start()
    try:
        yield stores
    except BaseException:
        stores.stop(save=False)
        raise
    stores.stop(save=save)


def prepare_first_steps(out: Path, steps: int) -> Schedule:
    """One epoch of the reference workload's first samples."""
    given = ["--format", "synthetic", "--rows", str(steps * BATCH), "--seed", "0", "--batch-size", str(BATCH)]
    command = [sys.executable, "-m", "foreload.pipelines.prepare", *given, "--slots", str(SLOTS), "--out", str(out)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True)
    return Schedule(out)


def job(schedule: Path, model: str, **settings: Any) -> dict[str, Any]:
    """The settings of foreload.trainer.job.job.TrainJob for this workload."""
    given = {"dim": DIM, "row_optimizer": "rowwise_adagrad", "lr": LR, "seed": SEED, "namespace": NAMESPACE, "history": "off"}
    return {"schedule": str(schedule), "run": "none", "store": "local:1", "model_options": MODELS[model], **given, **settings}


def events_of(schedule: Schedule) -> list[Event]:
    """The training steps of a schedule's first epoch, whole batches only."""
    return [event for event in schedule.events() if event.kind == "train" and event.epoch == 0 and event.samples == BATCH]


def shares(schedule: Schedule, begin: int, end: int) -> dict[str, float]:
    """Of steps begin .. end - 1 (0: the schedule's first): rows used, arrivals and ends a step, and the share of arrivals that is fetched.

    Of all lanes together.
    """
    used = arrived = fetched = ended = 0
    events = events_of(schedule)[begin:end]
    if len(events) < end - begin:
        raise ValueError(f"steps {begin} .. {end - 1}: must all be there; got {len(events)}")
    for event in events:
        for lane in range(schedule.header.lanes):
            moves = schedule.lane(event, lane)
            used, arrived = used + len(moves.slots), arrived + len(moves.arrivals)
            fetched += int(np.count_nonzero(moves.arrivals.tag))
            ended += len(moves.ends)
    steps = len(events)
    return {
        "rows_used": used / steps,
        "arrivals": arrived / steps,
        "ended": ended / steps,
        "fetched_share": fetched / max(arrived, 1),
    }


def last_batches(schedule: Schedule) -> tuple[int, ...]:
    """The last write-back batch of each lane before a training: of the first schedule, with an empty store, none; else those of a filled one."""
    return (FILLED if schedule.header.first_step else 0,) * schedule.header.lanes


def describe(work: Workload) -> str:
    """The workload in a sentence."""
    return (
        f"Synthetic Criteo-shaped rows, 26 tables of the Kaggle sizes, batch {BATCH:,}, dim {DIM}, row-wise Adagrad, one torch thread, one "
        f"lane, a store of {SHARDS} local redis-servers that holds {work.rows:,} rows (those of {work.size.samples:,} samples)."
    )
