"""How a training stops, and what is reported if it does not stop cleanly.

The launcher does this or, if it was killed, the trainer that hosts lane 0.
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

# Counters that have another name in summary.json, the one that they had there from the beginning.
_IN_SUMMARY = {"rows_written_at_stop": "rows_written_beyond"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call of `foreload train` ended.

    Attributes:
        summary: The contents of summary.json.
        step: The last step trained.
        stopped: Whether training stopped before the schedule's end.
        signal_number: The signal that stopped it, if one did.
        ends: The reports of all trainers at their end.
        full: Why training stopped before a store shard was full. None if it did not.
        no_digest: Why the requested digest could not be computed. None if it was, or was not
            requested.
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
        """Why evaluations stopped training early, or None if they did not."""
        stop = self.summary["stopped_early"]
        return None if stop is None else stop["why"]

    @property
    def uses(self) -> list[ProcessUse]:
        """The resource use of each trainer."""
        return [end.use for end in self.ends]


def ending_before(run: Run, why: str) -> Ending | None:
    """Return how the last call of a run ended that has no step left to train.

    It comes from the run's summary, and is None if that cannot be read. The user gets a message.

    Args:
        why: Why there is no step left, as `why_ended` says it.
    """
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
    """Return the status of a run whose trainers have all ended.

    Args:
        totals: The totals of the run's steps. The rows written at the end are added here.
        term: The term in which the trainers ended.
        removed: The store shards that were removed.
    """
    first = first_of(ended)
    written = sum(one.flushed for one in ended.values())
    if first.stopped:
        totals.rows_flushed += written
    else:
        # At the end of the schedule every residency ends, so these are ordinary write-backs.
        totals.rows_written_back += written
    batches = {str(lane): number for one in ended.values() for lane, number in one.last_batches.items()}
    lost = sorted({shard for one in ended.values() for shard in one.lost} - {*removed})
    return Status("stopped" if first.stopped else "ended", first.step, batches, asdict(totals), lost, term)


def keep_run(run: Run, manifest: Manifest, status: Status, ended: Mapping[int, TrainerEnd]) -> bool:
    """Publish the files of rows that trainers kept because the store lacks them.

    Returns:
        Whether there were such files.

    Raises:
        OSError: The files cannot be published.
    """
    files = [
        (lane, file) for one in ended.values() if one.kept for lane, file in zip(sorted(one.last_batches), one.kept, strict=True)
    ]
    if files:
        why = first_of(ended).failure or ""
        write_kept_lanes(run.path, why, manifest, status, [file for _, file in sorted(files, key=itemgetter(0))])
    return bool(files)


def first_of(ended: Mapping[int, TrainerEnd]) -> TrainerEnd:
    """Return the end of the trainer with the lowest number, for the values on which all agree."""
    return ended[min(ended)]


def call_figures(ends: Sequence[TrainerEnd | Departed], steps: int, slots: int, columns: int, protected: bool) -> dict[str, Any]:
    """Return the combined figures of a call's trainers for the summary.

    They are `store_traffic`, `store_shards` and `memory` (docs/run-files.md, summary.json).

    Args:
        ends: The reports of all trainers at their end.
        steps: The number of steps of the call.
        slots: The number of slots of a lane.
        columns: The number of columns of a slot.
        protected: Whether the run has parity.
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
    """Return the manifest of a run whose trainers have all ended."""
    first = first_of(ended)
    stage = replace(Stage.of(schedule), segments=first.segments, prefix=first.prefix)
    return replace(manifest, stages=(*manifest.stages[:-1], stage), watched=first.watched)


def early_stop(manifest: Manifest, stopped: bool) -> dict[str, Any] | None:
    """Return the summary's entry about an early stop, or None if evaluations did not stop the run.

    Args:
        manifest: The manifest, as `manifest_of` returns it.
        stopped: Whether training stopped before the schedule's end.
    """
    watched = manifest.watched if stopped else None
    return watched.summary() if watched is not None and watched.ends(manifest.training_job.stop_early) else None


def counters_of(traffic: Traffic) -> dict[str, int | float]:
    """Return the counters of the traffic with the store, by their names in the summary.

    Times are in seconds.
    """
    return {
        _IN_SUMMARY.get(name, name): value.total_seconds() if isinstance(value, timedelta) else int(value)
        for name, value in asdict(traffic.counters()).items()
    }


def end_alone(run: Run, schedule: Schedule, ended: Mapping[int, TrainerEnd], left: Sequence[Departed], before: Totals) -> None:
    """End a run in place of its launcher, which was killed.

    It publishes the manifest and the status, and saves local stores. Times in the totals are those
    of the trainer with the lowest number.

    Args:
        left: The reports of the trainers that left as planned.
        before: The totals when the call began.
    """
    totals, first, rows = replace(before), first_of(ended), Counter[str]()
    if _lost_a_trainer(run):
        # Only the launcher knew the reports of the lost trainer. The row counts of all trainers
        # together follow from the schedule; the other figures of these steps are incomplete.
        for of_step in rows_of_steps(schedule, first.step - first.totals.steps + 1, first.step).values():
            rows.update(of_step)
        totals.steps_incomplete += first.totals.steps
    totals.add_call([*(one.totals for one in ended.values()), *(one.totals for one in left)], first.totals, rows)
    status = status_of(ended, totals, run.saved_status().term, run.placement.removed)
    manifest = manifest_of(run.manifest, schedule, ended)
    if keep_run(run, manifest, status, ended):
        return
    run.record_stop(manifest, status)
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
    """Return whether a trainer was lost in the last call."""
    lost = False
    for event in read_events(run.path):
        lost = event["kind"] == TrainerLost.kind or (lost and event["kind"] != CallBegan.kind)
    return lost


def ended_how(status: int) -> str:
    """Describe how a process ended that did not report why."""
    # foreload's own code reports a reason before it ends a process. So an exit status here does not
    # mean what it means for a command: other code exited.
    if status == HOST_GONE:
        return "its host can no longer be reached"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status} without a message: the model's code, or a library, called exit"
