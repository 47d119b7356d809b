"""The store client beside a raw socket that replays the identical bytes, and beside redis-py with hiredis.

    python benchmarks/bench_store.py [--quick] [--out DIR]

One repetition gathers 20,000 rows of 144 bytes (HMGET) and scatters them (HSET), in commands of at most 2,048 rows. The bytes to replay are
captured by a relay between the client and its servers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import redis

from comparison import Claim, Ratio, Results, Table, alternate, arguments, ratio, save, tell
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import (
    COMMAND_ROWS,
    Read,
    Store,
    Write,
)
from foreload.cache.client.url import parse_url
from raw_sockets import RawSockets, trace

ROWS = 20_000
ROW_BYTES = 144
FEW = 24_000  # rows in a store that is so small that a core's caches hold most of it
# The hash that the rows stand in, and the marker that goes with each write; only their sizes matter.
KEY, MARKER = b"{bench:1}:0:0:1", b"00000001"
OURS, RAW, LIBRARY, THREADS = "client", "raw socket", "redis-py", "redis-py, a thread a shard"
GATHER, SCATTER = "gather", "scatter"


def commands_of(count: int) -> list[slice]:
    """The rows of each command."""
    return [slice(start, min(start + COMMAND_ROWS, count)) for start in range(0, count, COMMAND_ROWS)]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one repetition touches: per shard fields uint64 [n] and rows uint8 [n, 144]."""

    fields: list[np.ndarray]
    rows: list[np.ndarray]

    def reads(self, into: list[np.ndarray]) -> list[Read]:
        """The gather."""
        return [Read(shard, KEY, fields, into[shard]) for shard, fields in enumerate(self.fields)]

    def writes(self) -> list[Write]:
        """The scatter."""
        return [
            Write(shard, KEY, fields[part], self.rows[shard][part], MARKER)
            for shard, fields in enumerate(self.fields)
            for part in commands_of(len(fields))
        ]


class Library:
    """redis-py with hiredis: one pipeline a shard without MULTI, and rows to and from arrays in as few operations as NumPy allows."""

    def __init__(self, servers: Sequence[str], threads: int) -> None:
        self._clients = [redis.Redis(unix_socket_path=server) for server in servers]
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def _each_shard(self, work: Callable[[int], None]) -> None:
        if self._pool is not None:
            list(self._pool.map(work, range(len(self._clients))))
            return
        for shard in range(len(self._clients)):
            work(shard)

    def gather(self, batch: Batch, into: list[np.ndarray]) -> None:
        """Read the batch's rows into arrays."""
        self._each_shard(partial(self._gather, batch, into))

    def _gather(self, batch: Batch, into: list[np.ndarray], shard: int) -> None:
        fields = batch.fields[shard].astype(">u8").view("V8").tolist()
        pipeline = self._clients[shard].pipeline(transaction=False)
        parts = commands_of(len(fields))
        for part in parts:
            pipeline.execute_command("HMGET", KEY, b"m", *fields[part])
        for part, values in zip(parts, pipeline.execute(), strict=True):
            into[shard][part] = np.frombuffer(b"".join(values[1:]), np.uint8).reshape(-1, ROW_BYTES)

    def scatter(self, batch: Batch) -> None:
        """Write the batch's rows."""
        self._each_shard(partial(self._scatter, batch))

    def _scatter(self, batch: Batch, shard: int) -> None:
        fields = batch.fields[shard].astype(">u8").view("V8").tolist()
        values = batch.rows[shard].view(f"V{ROW_BYTES}").ravel().tolist()
        pipeline = self._clients[shard].pipeline(transaction=False)
        for part in commands_of(len(fields)):
            words: list[bytes] = [b""] * (2 * len(fields[part]))
            words[::2], words[1::2] = fields[part], values[part]
            pipeline.execute_command("HSET", KEY, b"m", MARKER, *words)
        pipeline.execute()

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()
        if self._pool is not None:
            self._pool.shutdown()


class Clocks:
    """Wall time, and CPU time of this process and of the servers, in seconds."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._servers = [Path(f"/proc/{pid}/schedstat") for pid in pids]

    def read(self) -> np.ndarray:
        """float64 [3]: wall, this process, servers."""
        servers = sum(int(path.read_text().split()[0]) for path in self._servers) * 1e-9
        return np.array([time.perf_counter(), time.process_time(), servers])


def fill(store: Store, rows_per_shard: int) -> None:
    """Write rows 0 .. rows_per_shard - 1 of every shard."""
    values = np.random.default_rng(0).integers(0, 256, (COMMAND_ROWS, ROW_BYTES)).astype(np.uint8)
    for start in range(0, rows_per_shard, 8 * COMMAND_ROWS):
        writes = []
        for part in commands_of(min(8 * COMMAND_ROWS, rows_per_shard - start)):
            fields = np.arange(start + part.start, start + part.stop, dtype=np.uint64)
            writes += [Write(shard, KEY, fields, values[: len(fields)], MARKER) for shard in range(store.shards)]
        store.exchange([], writes)


class Setting:
    """Servers that hold rows, the batches of all repetitions with their bytes, and every contender connected."""

    def __init__(self, folder: Path, stores: LocalStores, store: Store, total_rows: int, repetitions: int) -> None:
        servers = [str(parse_url(url).path) for url in stores.urls]
        self.store = store
        shards, per_shard = stores.count, total_rows // stores.count
        counts = [len(part) for part in np.array_split(np.arange(ROWS), shards)]
        fill(store, per_shard)
        rng = np.random.default_rng(1)
        self.batches = [
            Batch(
                [rng.choice(per_shard, count, replace=False).astype(np.uint64) for count in counts],
                [rng.integers(0, 256, (count, ROW_BYTES)).astype(np.uint8) for count in counts],
            )
            for _ in range(repetitions)
        ]
        self.into = [np.zeros((count, ROW_BYTES), np.uint8) for count in counts]
        scatters = [lambda to, batch=batch: to.exchange([], batch.writes()) for batch in self.batches]
        gathers = [lambda to, batch=batch: to.exchange(batch.reads(self.into), []) for batch in self.batches]
        self.traces = {SCATTER: trace(folder, servers, scatters), GATHER: trace(folder, servers, gathers)}
        self.raw = RawSockets(servers, max(sum(traced.received_bytes) for traced in self.traces[GATHER]))
        self.libraries = {LIBRARY: Library(servers, 1)}
        if shards > 1:
            self.libraries[THREADS] = Library(servers, shards)
        assert all(pid is not None for pid in stores.pids)
        self._clocks = Clocks([pid for pid in stores.pids if pid is not None])
        self._check()

    def _check(self) -> None:
        """Every contender must read what was written."""
        for place, batch in enumerate(self.batches[:2]):
            for name in (OURS, *self.libraries):
                for into in self.into:
                    into[:] = 0
                self._operation(name, SCATTER, place)()
                self._operation(name, GATHER, place)()
                if not all(np.array_equal(a, b) for a, b in zip(batch.rows, self.into, strict=True)):
                    raise SystemExit(f"{name}: other rows were read than written")

    def _operation(self, contender: str, kind: str, place: int) -> Callable[[], None]:
        batch = self.batches[place]
        if contender == RAW:
            return partial(self.raw.replay, self.traces[kind][place])
        if contender == OURS:
            reads, writes = (batch.reads(self.into), []) if kind == GATHER else ([], batch.writes())
            return partial(self.store.exchange, reads, writes)
        library = self.libraries[contender]
        return partial(library.gather, batch, self.into) if kind == GATHER else partial(library.scatter, batch)

    def run(self, contender: str) -> dict[str, float]:
        """Every batch gathered and scattered once; medians in milliseconds by name: gather, gather cpu, gather server, ..., both, both cpu."""
        milliseconds: dict[str, float] = {}
        for kind in (GATHER, SCATTER):
            spans = []
            for place in range(len(self.batches)):
                operation = self._operation(contender, kind, place)
                before = self._clocks.read()
                operation()
                spans.append(self._clocks.read() - before)
            for name, value in zip(("", " cpu", " server"), np.median(spans, axis=0) * 1e3, strict=True):
                milliseconds[kind + name] = float(value)
        for name in ("", " cpu", " server"):
            milliseconds["both" + name] = milliseconds[GATHER + name] + milliseconds[SCATTER + name]
        return milliseconds

    def close(self) -> None:
        """Close the contenders' connections."""
        self.raw.close()
        for library in self.libraries.values():
            library.close()


@contextmanager
def setting(shards: int, total_rows: int, repetitions: int) -> Iterator[Setting]:
    """Servers of their own, for as long as they are measured."""
    with (
        tempfile.TemporaryDirectory() as name,
        LocalStores(shards, Path(name) / "stores") as stores,
        Store(stores.urls) as store,
    ):
        made = Setting(Path(name), stores, store, total_rows, repetitions)
        try:
            yield made
        finally:
            made.close()


def _table(title: str, measured: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    columns = ["contender", *(f"{kind}{name}, ms" for kind in (GATHER, SCATTER) for name in ("", " CPU", " server CPU"))]
    rows = []
    for contender, results in measured.items():
        figures = [
            float(np.median([result[k + n] for result in results])) for k in (GATHER, SCATTER) for n in ("", " cpu", " server")
        ]
        rows.append([contender, *(f"{figure:.2f}" for figure in figures)])
    return Table(
        title, columns, rows, "Medians. CPU is that of the client's process; the servers work at the same time on the other core."
    )


def _against(measured: Mapping[str, Sequence[Mapping[str, float]]], over: str, under: str, name: str) -> Ratio:
    return ratio([result[name] for result in measured[over]], [result[name] for result in measured[under]])


def _claims(where: str, measured: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Claim]:
    fastest = min(
        (name for name in measured if name.startswith(LIBRARY)), key=lambda name: np.median([r["both"] for r in measured[name]])
    )
    claims = [
        Claim(f"gather and scatter, {where}", RAW, "<= 1.15 x its time", _against(measured, OURS, RAW, "both"), most=1.15),
        Claim(f"gather and scatter, {where}", fastest, ">= 3 x faster", _against(measured, fastest, OURS, "both"), least=3),
        Claim(f"client's CPU time, {where}", LIBRARY, ">= 3 x less", _against(measured, LIBRARY, OURS, "both cpu"), least=3),
    ]
    return claims


def main() -> None:
    """Measure, print, save."""
    given = arguments(__doc__)
    repetitions = 6 if given.quick else 20
    held = 1_000_000 if given.quick else 5_000_000
    claims: list[Claim] = []
    tables, counts = [], []
    for shards, total, share in ((1, FEW, 0.15), (3, FEW, 0.3), (1, held, 0.65), (3, held, 1.0)):
        where = f"{shards} shard{'s' if shards > 1 else ''} with {total:,} rows"
        tell(where)
        with setting(shards, total, repetitions) as made:
            measured = alternate(
                {contender: partial(made.run, contender) for contender in (OURS, RAW, *made.libraries)},
                given.pairs,
                given.budget.until(share),
            )
        counts.append(len(measured[OURS]))
        tables.append(_table(f"20,000 rows of {ROW_BYTES} bytes: {where}", measured))
        claims += _claims(where, measured)
    notes = [
        "Time of one gather (HMGET) and one scatter (HSET) of 20,000 random rows from NumPy arrays to NumPy arrays, over Unix sockets, in "
        f"commands of at most {COMMAND_ROWS:,} rows. The raw socket replays the bytes that the client sent, captured by a relay, and receives "
        "as many as came back then. redis-py uses hiredis, one pipeline a shard; of it alone and with a thread a shard the faster is compared.",
        "The servers' own time bounds what any client can gain: where it is the longest, only the client's CPU time tells clients apart.",
    ]
    settings: dict[str, str | int | float | bool] = {
        "rows": ROWS,
        "row_bytes": ROW_BYTES,
        "repetitions": repetitions,
        "pairs": " / ".join(map(str, counts)),
        "command_rows": COMMAND_ROWS,
    }
    save(Results("store", "Store client", claims, tables, settings=settings, notes=notes), given.out)


if __name__ == "__main__":
    main()
