"""How a training comes to rest, whoever sees to that: the launcher, or, where that was killed, the trainer that hosts lane 0. And what is reported
of one that does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from operator import itemgetter
from typing import Any

from foreload.base.codec import of_json, parse_json
from foreload.base.errors import ForeloadError
from foreload.base.memory import ProcessUse
from foreload.cache.client.load import together
from foreload.cache.client.local import LocalStores
from foreload.cache.errors import CacheError
from foreload.cache.traffic import Traffic
from foreload.pipelines.planning.sizing import lane_bytes
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.host_messages import HOST_GONE
from foreload.trainer.cluster.messages.trainers import Departed, TrainerEnd
from foreload.trainer.compute.reports import Totals
from foreload.trainer.errors import after_step
from foreload.trainer.run import shard_loads
from foreload.trainer.run.directory import CONTROL, STORES, SUMMARY, Run
from foreload.trainer.run.event_log import CallBegan, CallEnded, EventLog, TrainerLost, read_events
from foreload.trainer.run.manifest import Manifest, Stage, Status
from foreload.trainer.run.report import rows_of_steps
from foreload.trainer.saved.kept import keep_schedule
from foreload.trainer.saved.kept_lanes import write_kept_lanes

_IN_SUMMARY = {"rows_written_at_stop": "rows_written_beyond"}  # names that summary.json has had from the beginning


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call of `foreload train` ended: its summary, the last step, the signal or request that stopped it early, if any, and what each trainer
    reported at its end. full: why it stopped before a store shard was full; None where it did not. no_digest: why the digest that was asked for could
    not be computed.
    """

    summary: dict[str, Any]
    step: int
    stopped: bool
    signal_number: int | None
    ends: tuple[TrainerEnd | Departed, ...] = ()
    full: str | None = None
    no_digest: ForeloadError | None = None

    @property
    def early(self) -> str | None:
        """Why evaluations stopped it early; None where they did not."""
        stop = self.summary["stopped_early"]
        return None if stop is None else stop["why"]

    @property
    def uses(self) -> list[ProcessUse]:
        """What each trainer used."""
        return [end.use for end in self.ends]


def ending_before(run: Run, why: str) -> Ending | None:
    """How the last call of a run ended that has no step left to train, by its summary; None where that is gone. why: as `why_ended` says it."""
    status = run.saved_status()
    sys.stderr.write(f"run {run.path}: there is nothing to train; it {why}\n")
    if status.lost:
        sys.stderr.write(
            f"store shard {', '.join(map(str, status.lost))}: is lost; foreload train --run {run.path} --resume rebuilds it\n"
        )
    try:
        summary = of_json(parse_json((run.path / SUMMARY).read_bytes()), dict[str, Any])
    except (OSError, ValueError):
        return None
    return Ending(summary, status.step, status.state == "stopped", None)


def status_of(ended: Mapping[int, TrainerEnd], totals: Totals, term: int, removed: Sequence[int] = ()) -> Status:
    """The status of a run whose trainers have all ended, in this term. totals: of its steps; what was written at the end is added. removed: store
    shards that there are no more.
    """
    first = first_of(ended)
    written = sum(one.flushed for one in ended.values())
    if first.stopped:
        totals.rows_flushed += written
    else:
        # The end of a schedule ends every residency.
        totals.rows_written_back += written
    batches = {str(lane): number for one in ended.values() for lane, number in one.last_batches.items()}
    lost = sorted({shard for one in ended.values() for shard in one.lost} - {*removed})
    return Status("stopped" if first.stopped else "ended", first.step, batches, asdict(totals), lost, term)


def keep_run(run: Run, manifest: Manifest, status: Status, ended: Mapping[int, TrainerEnd]) -> bool:
    """Publish what trainers have kept that the store lacks of their lanes; returns whether there was anything. Raises OSError."""
    files = [
        (lane, file) for one in ended.values() if one.kept for lane, file in zip(sorted(one.last_batches), one.kept, strict=True)
    ]
    if files:
        why = first_of(ended).failure or ""
        write_kept_lanes(run.path, why, manifest, status, [file for _, file in sorted(files, key=itemgetter(0))])
    return bool(files)


def first_of(ended: Mapping[int, TrainerEnd]) -> TrainerEnd:
    """Of the trainer with the least number: in what all agree on it stands for all."""
    return ended[min(ended)]


def call_figures(ends: Sequence[TrainerEnd | Departed], steps: int, slots: int, columns: int, protected: bool) -> dict[str, Any]:
    """For the summary, what all trainers of a call come to: `store_traffic`, `store_shards` and `memory` (docs/operations.md, summary.json).

    steps: of the call; slots: of a lane; columns: of a slot; protected: there is parity.
    """
    return {
        "store_traffic": {name: sum(end.traffic[name] for end in ends) for name in ends[0].traffic},
        "store_shards": shard_loads.reports(together(end.loads for end in ends), steps),
        "memory": {
            "lane_bytes": lane_bytes(slots, columns, with_base=protected),
            "trainers_peak_bytes": [end.use.peak_bytes for end in ends],
        },
    }


def manifest_of(manifest: Manifest, schedule: Schedule, ended: Mapping[int, TrainerEnd]) -> Manifest:
    """The manifest of a run whose trainers have all ended."""
    first = first_of(ended)
    stage = replace(Stage.of(schedule), segments=first.segments, prefix=first.prefix)
    return replace(manifest, stages=(*manifest.stages[:-1], stage), watched=first.watched)


def early_stop(manifest: Manifest, stopped: bool) -> dict[str, Any] | None:
    """For the summary, where evaluations are why a run stopped. manifest: as `manifest_of` gives it."""
    watched = manifest.watched if stopped else None
    return watched.summary() if watched is not None and watched.ends(manifest.training_job.stop_early) else None


def counters_of(traffic: Traffic) -> dict[str, int | float]:
    """What the traffic with the store has counted, by the names of the summary."""
    return {
        _IN_SUMMARY.get(name, name): value.total_seconds() if isinstance(value, timedelta) else int(value)
        for name, value in asdict(traffic.counters()).items()
    }


def end_alone(run: Run, schedule: Schedule, ended: Mapping[int, TrainerEnd], left: Sequence[Departed], before: Totals) -> None:
    """Do what the launcher, which was killed, would have done: publish manifest and status, save local stores. left: of trainers that left in order;
    before: totals when the call began.

    Times are those of the first trainer.
    """
    totals, first, rows = replace(before), first_of(ended), Counter[str]()
    if _lost_a_trainer(run):
        # Only the launcher knew what that one reported; what all reported about rows is known from the schedule.
        for of_step in rows_of_steps(schedule, first.step - first.totals.steps + 1, first.step).values():
            rows.update(of_step)
        totals.steps_incomplete += first.totals.steps
    totals.add_call([*(one.totals for one in ended.values()), *(one.totals for one in left)], first.totals, rows)
    status = status_of(ended, totals, run.saved_status().term, run.placement.removed)
    manifest = manifest_of(run.manifest, schedule, ended)
    if keep_run(run, manifest, status, ended):
        return
    run.come_to_rest(manifest, status)
    EventLog(run.path, status.step, status.term).note(CallEnded(state=status.state, cause="its launcher was killed"))
    keep_schedule(run, schedule, status.step)
    outcome = f"its launcher was killed; {status.state} {after_step(status.step)}, with everything saved"
    local = LocalStores.find(run.path / STORES)
    if local is not None:
        try:
            local.stop(save=True, lost=status.lost)
        except CacheError as error:
            outcome = str(error)
    with contextlib.suppress(OSError):
        # A link leads to the socket where the run's own path is too long for one.
        for path in (os.path.realpath(run.path / CONTROL), run.path / CONTROL):
            os.unlink(path)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"foreload: run {run.path}: {outcome}\n")


def _lost_a_trainer(run: Run) -> bool:
    """Whether a trainer was lost in the last call."""
    lost = False
    for event in read_events(run.path):
        lost = event["kind"] == TrainerLost.kind or (lost and event["kind"] != CallBegan.kind)
    return lost


def ended_how(status: int) -> str:
    """How a process ended that had not said why: foreload's own code says so before it ends one, so no status means what it does of a command."""
    if status == HOST_GONE:
        return "its host is not reached any more"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status} without a word: the model's code, or a library, called exit"
