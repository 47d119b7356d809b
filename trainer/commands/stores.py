"""`foreload stores status`: report on the store shards of a run, and forecast what they will need.

The run may train, be stopped, or have crashed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from foreload.base.errors import SettingError
from foreload.cache.client.load import together
from foreload.cache.client.local import LocalStores
from foreload.cache.parity.placement import Placement
from foreload.cache.parity.shard_contents import RowCounts
from foreload.cache.protocol.shards.marker import Marker
from foreload.cache.protocol.shards.shard_status import REBUILDING, Lag, ShardSnapshot, ShardStatus
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.control import AskRowCounts, RowCountsAnswer, ask, training_status
from foreload.trainer.errors import TrainerError
from foreload.trainer.job.job import layouts_of
from foreload.trainer.memory.row_timeline import RowTimeline, counts_of, row_counts, sizes_of
from foreload.trainer.memory.seen_servers import ShardReport, ask_servers, server_seen
from foreload.trainer.memory.store_memory import ShardServer, Shortage, StoreMemory, hash_bytes, shortage_text
from foreload.trainer.run import shard_loads
from foreload.trainer.run.directory import STORES, Run
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.servers import servers_of
from foreload.trainer.run.shard_loads import LoadReport
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.model_rows import given_ordinals

Counted = Literal["rows", "parity_rows", "row_bytes"]
COUNTED: tuple[Counted, ...] = get_args(Counted)
"""The counts in the report on each shard."""


@dataclass(frozen=True, slots=True)
class Parity:
    """A run's erasure code, and whether its rows are protected.

    Attributes:
        code: "K+R" or "off".
        state: None without parity; otherwise one of:
            "ok": as many losses as the code covers would do no harm.
            "rebuilding": all shards have a server, and at least one is being rebuilt.
            "degraded": shards are down, lost or lack rows, and the code covers that.
            "lost": so many shards are affected that the code does not cover it.
    """

    code: str
    state: str | None


@dataclass(frozen=True, slots=True)
class Move:
    """A migration of rows to other shards.

    Attributes:
        moved: the share of rows that have moved, 0 to 1. If None, it is not known.
        joining: the numbers of the shards that are added.
        leaving: the numbers of the shards that are removed.
    """

    moved: float | None
    joining: list[int]
    leaving: list[int]

    def text(self) -> str:
        """Return the migration as one line."""
        joins, leaves = (", ".join(map(str, which)) for which in (self.joining, self.leaving))
        said = [f"to shard {joins}"] * bool(joins) + [f"from shard {leaves}, which is to be removed"] * bool(leaves)
        return (
            f"rows are moving {', '.join(said)}: {'not all have moved yet' if self.moved is None else f'{self.moved:.0%} moved'}"
        )


@dataclass(frozen=True, slots=True)
class ShardForecast:
    """The memory that a shard's server will use at the end of the schedule.

    Attributes:
        memory_bytes: what the server will use.
        limit_bytes: what the server may use. If None, it has no limit.
    """

    shard: int
    memory_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The rows and the memory of all shards at the end of the schedule.

    Attributes:
        overhead_bytes_a_row: what the servers use for a row beyond the row's own bytes.
        overhead_measured: whether the overhead was measured on rows that the servers hold now.
        full: the servers that will be full before the end.
    """

    rows: int
    parity_rows: int
    row_bytes: int
    overhead_bytes_a_row: float
    overhead_measured: bool
    memory_bytes: int
    shards: list[ShardForecast]
    full: list[Shortage]

    def lines(self) -> list[str]:
        """Return the forecast as lines for the terminal."""
        measured = ", measured" if self.overhead_measured else ""
        return [
            f"at the end of the schedule: {self.rows:,} rows and {self.parity_rows:,} parity rows, {self.memory_bytes / 2**20:,.1f} MiB in all "
            f"shards ({self.overhead_bytes_a_row:.0f} bytes of overhead a row{measured})",
            *map(shortage_text, self.full),
        ]


@dataclass(frozen=True, slots=True)
class StoresStatus:
    """The store shards of a run. A server that does not answer is reported as down.

    Attributes:
        state: the state of the run.
        move: the migration under way. If None, there is none.
        lag: the rows on their way to the store. If None, the run does not train, or did not answer.
        loads: the loads of the shards, for a run that trains; otherwise empty.
        forecast: if None, the schedule or the model of the run cannot be read.
    """

    run: str
    namespace: str
    state: str
    parity: Parity
    move: Move | None
    shards: list[ShardReport]
    lag: Lag | None
    loads: list[LoadReport]
    forecast: Forecast | None

    def text(self) -> str:
        """Return the report for the terminal."""
        code = f"parity {self.parity.code} {self.parity.state or ''}".rstrip()
        lines = [f"run {self.run}: {self.state}, namespace {self.namespace}, {code}"]
        lines += [] if self.move is None else [self.move.text()]
        lines += map(_line, self.shards)
        if (lag := self.lag) is not None:
            lines.append(
                f"on the way to the store: {lag.rows:,} rows of {lag.boundaries:,} boundaries between steps, "
                f"{lag.batches:,} write-back batches that not all shards have acknowledged"
            )
        return "\n".join(lines + shard_loads.lines(self.loads) + ([] if self.forecast is None else self.forecast.lines()))


def _line(shard: ShardReport) -> str:
    """Return the line on a shard for the terminal."""
    counted = {name: shard.get(name) for name in (*COUNTED, "memory_bytes", "saved_bytes")}
    facts = [f"{count:,} {name.replace('_', ' ')}" for name, count in counted.items() if count is not None]
    if "rebuilt" in shard:
        facts.insert(0, f"{shard['rebuilt']:.0%} rebuilt")
    return "  ".join([f"shard {shard['shard']}", shard["state"], *facts, shard.get("why") or shard["url"]])


def run(path: str, store: str | None) -> StoresStatus:
    """Ask every shard of a run.

    Args:
        path: the folder of the run.
        store: the URLs of the run's servers. If None, the run's own.

    Raises:
        RunError: there is no run at `path`, or it does not answer.
        MessageError: the run's answer is malformed.
    """
    asked_run = Run.open(path)
    manifest, status, placement = asked_run.manifest, asked_run.status, asked_run.placement
    training = training_status(asked_run.path)
    # While a run trains, the status in its folder is that of the call's start, so it says nothing
    # about the rows now.
    shards = _shards(
        asked_run, store, status if training is None else None, {} if training is None else training.shards.changes_since(None)
    )
    plan = _plan(asked_run)
    lag = forecast = None
    loads: list[LoadReport] = []
    if training is not None:
        answer = ask(asked_run.path, AskRowCounts())
        counted = answer.trainers if isinstance(answer, RowCountsAnswer) else ()
        for name in COUNTED:
            _set_count(shards, name, np.sum([getattr(part, name) for part in counted], axis=0) if counted else None)
        if counted:
            lag = Lag(*(sum(getattr(part.lag, name) for part in counted) for name in Lag.__slots__))
            before = manifest.stages[0].first_step - 1 if status is None else status.step
            # Without parity no trainer counts the rows that were written. The servers hold nothing
            # else, so their numbers of entries are the counts.
            if not placement.r:
                _set_count(shards, "rows", _entries(shards, placement.shard_count))
                _set_count(shards, "row_bytes", None)
            # During a migration, shards hold rows that they will not keep.
            if not placement.migrating:
                loads = shard_loads.reports(together(part.loads for part in counted), training.step - before)
    elif placement.migrating:
        # The counts depend on how far each lane has migrated, which only the servers know.
        for name in COUNTED:
            _set_count(shards, name, None)
    elif plan is not None and status is not None and status.state != "training":
        schedule, rows = plan
        held = _arithmetic(placement, given_ordinals(schedule, status.step), len(rows))
        _set_count(shards, "rows", held.rows.sum(axis=0))
        _set_count(shards, "parity_rows", held.parity_rows.sum(axis=0))
        _set_count(shards, "row_bytes", held.row_bytes(rows))
    if plan is not None:
        schedule, rows = plan
        # A migration that is under way will be complete by the end of the schedule.
        forecast = _forecast(asked_run, placement.completed(), schedule, rows, shards)
    return StoresStatus(
        path,
        manifest.namespace,
        status.state if status else "never trained",
        Parity(f"{placement.k}+{placement.r}" if placement.r else "off", _parity_state(placement, shards)),
        _move(placement, None if training is None else training.shards),
        shards,
        lag,
        loads,
        forecast,
    )


def _move(placement: Placement, snapshot: ShardSnapshot | None) -> Move | None:
    """Return the progress of the migration under way, or None if there is none.

    Args:
        snapshot: the shards as the trainers of a run that trains report them.
    """
    if not placement.migrating:
        return None
    # If the trainers' snapshot is of an older placement, no row has moved yet.
    moved = (
        None if snapshot is None or not snapshot.shards else snapshot.migrated if snapshot.version == placement.version else 0.0
    )
    return Move(moved, list(placement.joining), list(placement.leaving))


def _plan(run: Run) -> tuple[Schedule, list[RowLayout]] | None:
    """Return the run's schedule, or what the run keeps of it, and the layout of its rows.

    Returns None if the schedule is not known yet, or the model cannot be loaded.
    """
    if not run.manifest.stages:
        return None
    try:
        schedule = schedule_of(run)
        return schedule, layouts_of(run.manifest.training_job, schedule.header.features)
    except (ScheduleError, SettingError, TrainerError):
        return None


def _arithmetic(placement: Placement, ordinals: np.ndarray, tables: int) -> RowCounts:
    """Count what every shard holds when all ordinals are written.

    Args:
        ordinals: the number of ordinals, int64 [lanes, tables].
    """
    counts_by_shard = RowCounts.none(tables, placement.shard_count)
    for lane, given in enumerate(ordinals):
        counts_by_shard += row_counts(placement, lane, given)
    return counts_by_shard


def _set_count(shards: list[ShardReport], name: Counted, values: np.ndarray | None) -> None:
    """Set a count in the report on every shard.

    The count is None if `values` (int [shards]) is None, or if the shard does not hold all of its
    rows.
    """
    for report in shards:
        there = values is not None and report["state"] not in ("down", "lost", "degraded")
        report[name] = int(values[report["shard"]]) if there and values is not None else None


def _entries(shards: list[ShardReport], count: int) -> np.ndarray:
    """Return the number of rows that each server reports, int64 [shards]."""
    entries = np.zeros(count, np.int64)
    for report in shards:
        entries[report["shard"]] = report.get("entries", 0)
    return entries


def _parity_state(placement: Placement, shards: list[ShardReport]) -> str | None:
    """Return the state for `Parity`."""
    if not placement.r:
        return None
    gone = sum(report["state"] in ("down", "lost", "degraded") for report in shards)
    rebuilding = sum(report["state"] == "rebuilding" for report in shards)
    if gone + rebuilding > placement.r:
        return "lost"
    return "degraded" if gone else "rebuilding" if rebuilding else "ok"


def _forecast(run: Run, placement: Placement, schedule: Schedule, rows: list[RowLayout], shards: list[ShardReport]) -> Forecast:
    """Forecast the rows and the memory at the end of the schedule.

    If a server reports the memory of the rows that it holds, the forecast uses its memory a row.
    """
    ordinals = given_ordinals(schedule, None)
    at_end, counts = _arithmetic(placement, ordinals, len(rows)), counts_of(placement, ordinals, rows)
    servers = [server_seen(report, counts[:, report["shard"]], sizes_of(rows)) for report in shards]
    of_rows = [float(hash_bytes(server.hashes, counts[:, server.shard]).sum()) for server in servers]
    count, parity, size = int(at_end.rows.sum()), int(at_end.parity_rows.sum()), int(at_end.row_bytes(rows).sum())
    short = any(
        server.limit_bytes and server.used_bytes + own > server.limit_bytes for server, own in zip(servers, of_rows, strict=True)
    )
    return Forecast(
        count,
        parity,
        size,
        overhead_bytes_a_row=(sum(of_rows) - size) / max(count + parity, 1),
        overhead_measured=any(server.hashes.measured for server in servers),
        memory_bytes=round(sum(of_rows)),
        shards=[
            ShardForecast(server.shard, round(server.used_bytes + own), server.limit_bytes)
            for server, own in zip(servers, of_rows, strict=True)
        ],
        full=_shortages(run, placement, rows, servers) if short else [],
    )


def _shortages(run: Run, placement: Placement, rows: list[RowLayout], servers: list[ShardServer]) -> list[Shortage]:
    """Return the servers that will be full, and when.

    Returns none if the schedule no longer exists, or the run is at its end.
    """
    with contextlib.suppress(ScheduleError):
        schedule, status = Schedule(run.manifest.stages[-1].path), run.status
        step = schedule.header.first_step - 1 if status is None else status.step
        timeline = RowTimeline(schedule, placement, rows, step, given_ordinals(schedule, step))
        memory = StoreMemory(timeline, servers, run.manifest.training_job.trainers)
        memory.advance()
        return memory.shortages()
    return []


def _shards(asked_run: Run, store: str | None, status: Status | None, seen: Mapping[int, ShardStatus]) -> list[ShardReport]:
    """Combine what each server reports of itself with what the trainers report of it.

    Args:
        status: the status of a run that does not train.
        seen: the shards that are not ok for the trainers of a run that trains.
    """
    manifest = asked_run.manifest
    lost = status.lost if status else []
    expected = None
    if status is not None and status.state != "training":
        numbers = (int(status.batches.get(str(lane), 0)) for lane in range(manifest.lanes))
        expected = [str(Marker(number, number)) for number in numbers]
    shards: list[ShardReport] = []
    live = asked_run.placement.live
    if manifest.local_stores is not None and LocalStores.find(asked_run.path / STORES) is None:
        for shard in live:
            saved = asked_run.path / STORES / f"shard-{shard}.rdb"
            size = saved.stat().st_size if saved.exists() else None
            shards.append(
                {"shard": shard, "url": str(saved), "state": "at rest" if saved.exists() else "lost", "saved_bytes": size}
            )
    else:
        urls = servers_of(asked_run, store)
        shards = ask_servers({shard: urls[shard] for shard in live if urls[shard]}, manifest.namespace, manifest.lanes)
    for report in shards:
        # A server that is up may still lack rows of a shard that the run had lost.
        if report["shard"] in lost and report["state"] in ("up", "at rest"):
            report["state"] = "degraded"
        # A server that rows migrate to may have no rows yet, so its markers are not checked.
        foreign = report.pop("foreign", None)
        whole = expected is None or report["shard"] in asked_run.placement.joining or report.get("markers") == expected
        whole = whole and foreign is None
        if report["state"] == "up" and not whole:
            report["state"] = "degraded" if asked_run.placement.r else "lost"
            report["why"] = foreign or f"{report['url']} lacks rows of the run"
        if report["state"] == "up" and (of_trainers := seen.get(report["shard"])) is not None:
            report["state"] = of_trainers.state
            if of_trainers.state == REBUILDING:
                report["rebuilt"] = of_trainers.rebuilt
    return shards
