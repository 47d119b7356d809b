"""`foreload drill lost-shard`: trains, kills a store shard on the way, and tells and draws what that did to the training."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.cache.client.local import LocalStores
from foreload.cache.protocol.shard_table import LOST, OK, REBUILDING, ShardSnapshot
from foreload.pipelines.base.files import write_json
from foreload.pipelines.errors import SettingError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.faults import Fault, RunObserver
from foreload.trainer.cluster.messages import EvaluationEnded, FaultInjected, ShardsTold, StepEnded, TrainerEvent
from foreload.trainer.cluster.processes import ChildProcess, StartProcess
from foreload.trainer.commands.train import train
from foreload.trainer.errors import TrainerError
from foreload.trainer.run.directory import DRILL, STORES, SUMMARY, check_free
from foreload.trainer.run.job import TrainJob
from foreload.trainer.run.job_values import Servers
from foreload.trainer.run.scheduler import under_scheduler
from foreload.trainer.run.timeline import Moments, StepTimes, Timeline, account

if TYPE_CHECKING:
    from foreload.trainer.cluster.ending import Ending

MOST_DOWN_SECONDS = 20.0  # a run that is over waits for a server no longer than 30
_LEGEND_COLUMNS = 4
_BINS = 120
MADE_UP = "--format synthetic --rows 200000 --values 10000 --epochs 3 --batch-size 1024 --slots 20000"
_WORDS = {"lost": "lost", "back": "server back", "whole": "rebuilt"}


@dataclass(frozen=True, slots=True)
class Drill:
    """What is done to the store: at: the step after which, None: drawn from the job's seed, as shard is.

    stop: the server is stopped and later continued, not killed; down_seconds: how long it stays away, None: a second, or when it is stopped,
    one more than it may be silent. check: train again, undisturbed, and compare the digests. make: the job's schedule is made up if it is not there.
    """

    at: int | None = None
    shard: int | None = None
    stop: bool = False
    down_seconds: float | None = None
    check: bool = False
    make: bool = False


class LostShard(RunObserver):
    """The fault, and all that is seen of it: steps and moments, in seconds of time.monotonic()."""

    def __init__(self, fault: Fault, stores: Path, down_seconds: float) -> None:
        self.faults = (fault,)
        self._shard, self._signal = fault.shard, fault.signal_number
        self._stores = stores
        self._steps = StepTimes()
        self._injected_at: float | None = None
        self._told: dict[int, ShardSnapshot] = {}  # by each trainer, the last
        self._lost: dict[int, float] = {}
        self._back: dict[int, float] = {}
        self._whole: dict[int, float] = {}
        self._return = threading.Timer(down_seconds, self._come_back)
        self._may_start = self._signal != signal.SIGKILL

    def see(self, trainer: int, event: TrainerEvent) -> None:
        """Note steps and what becomes of the shard; once the fault is in, see to its return."""
        match event:
            case StepEnded(report, at):
                self._steps.note(report, at)
            case EvaluationEnded(report):
                self._steps.note_evaluation(report.step)
            case FaultInjected(at=at):
                self._injected_at = at
                self._return.start()
            case ShardsTold(shards, at):
                changed = shards.changes_since(self._told.get(trainer)).get(self._shard)
                self._told[trainer] = shards
                if changed is not None:
                    {LOST: self._lost, REBUILDING: self._back, OK: self._whole}[changed.state][trainer] = at

    def may_start(self, shard: int) -> bool:
        """Not before the server was down for long enough."""
        return shard != self._shard or self._may_start

    def _come_back(self) -> None:
        self._may_start = True
        self.release()

    def release(self) -> None:
        """Whatever happened, no server stays stopped."""
        self._return.cancel()
        local = LocalStores.find(self._stores) if self._signal == signal.SIGSTOP else None
        pid = local.pids[self._shard] if local is not None else None
        if pid is not None:
            os.kill(pid, signal.SIGCONT)

    @property
    def timeline(self) -> Timeline:
        """All steps, one at least."""
        return self._steps.timeline

    @property
    def moments(self) -> Moments | None:
        """None where training ended before the fault. The shard is whole when it is for every trainer that had lost it."""
        if self._injected_at is None:
            return None
        whole = max(self._whole.values()) if self._lost and self._whole.keys() >= self._lost.keys() else None
        return Moments(self._injected_at, min(self._lost.values(), default=None), min(self._back.values(), default=None), whole)


def run(job: TrainJob, drill: Drill, start_process: StartProcess = ChildProcess) -> dict[str, Any]:
    """Train with the fault; returns the run's summary with the drill's figures in "drill".

    Raises SettingError for what cannot be drilled, TrainerError where the model is not the undisturbed one, and what training raises.
    """
    _check(job, drill)
    check_free(Path(job.run), job.overwrite)
    if drill.make:
        make_schedule(job)
    fault = choose_fault(job, drill, Schedule(job.schedule))
    down = drill.down_seconds
    if down is None:
        down = 1.0 + (job.store_silence.total_seconds() if drill.stop else 0.0)
    observer = LostShard(fault, Path(job.run) / STORES, down)
    try:
        ending = train(replace(job, digest=job.digest or drill.check), observer, start_process)
    finally:
        observer.release()
    assert ending is not None
    moments = observer.moments
    if moments is None:
        raise TrainerError(f"drill: training stopped after step {ending.step}, before the fault was to be injected")
    timeline = observer.timeline
    figures: dict[str, Any] = {
        "signal": signal.Signals(fault.signal_number).name,
        "shard": fault.shard,
        "step": fault.step,
        "down_seconds": down,
        "struck_at_seconds": moments.injected - timeline.begin,
        **account(timeline, moments),
        "rows_rebuilt": ending.summary["store_traffic"]["rows_rebuilt"],
    }
    summary = ending.summary | {"drill": figures}
    figures["picture"] = draw(Path(job.run) / DRILL, timeline, moments, figures)
    conclude(job, drill.check, ending, summary, start_process)
    return summary


def make_schedule(job: TrainJob, lanes: int = 2) -> None:
    """Make up the clicks of a drill and their schedule, if it is not there."""
    if not (Path(job.schedule) / "schedule.json").exists():
        from foreload.pipelines import prepare

        prepare.run([*MADE_UP.split(), "--lanes", str(lanes), "--seed", str(job.seed), "--out", job.schedule])


def conclude(job: TrainJob, check: bool, ending: Ending, summary: dict[str, Any], start_process: StartProcess) -> None:
    """Train again, undisturbed, where that is wanted, and write the summary with what came out. Raises TrainerError where the model is another one,
    KeyboardInterrupt where a signal stopped the drill.
    """
    figures = summary["drill"]
    if check and not ending.stopped:
        figures["digest_undisturbed"] = _undisturbed(job, start_process)
    write_json(Path(job.run) / SUMMARY, summary)
    if ending.signal_number is not None:
        raise KeyboardInterrupt
    if figures.get("digest_undisturbed", summary.get("digest")) != summary.get("digest"):
        raise TrainerError(
            f"drill: the model is not that of an undisturbed run: digest {summary['digest']}, undisturbed {figures['digest_undisturbed']}; "
            f"this must not be: please report it with {job.run}/{SUMMARY}"
        )


def _check(job: TrainJob, drill: Drill) -> None:
    count = job.store.local
    if count is None:
        raise SettingError("--store: a drill kills servers of its own only; give local:N")
    if not job.code(count)[1]:
        raise SettingError(
            f"--store: a drill needs parity, which {job.store} has not; give local:3 or more without --parity off, or --parity 1+1"
        )
    check_whole(job)
    if drill.shard is not None and not 0 <= drill.shard < count:
        raise SettingError(f"--shard: must be a store shard of {job.store}, 0 to {count - 1}; got {drill.shard}")
    if drill.down_seconds is not None and not 0 <= drill.down_seconds <= MOST_DOWN_SECONDS:
        raise SettingError(f"--down: must be 0 to {MOST_DOWN_SECONDS:g} seconds; got {drill.down_seconds:g}")


def check_whole(job: TrainJob) -> None:
    """Raise SettingError unless the job trains a whole schedule, in processes of its own."""
    for flag, given in (("--resume", job.resume), ("--follow", job.follow), ("--from", job.from_checkpoint)):
        if given:
            raise SettingError(
                f"{flag}: cannot be given to a drill, which trains a whole schedule from its beginning on local stores"
            )
    if under_scheduler():
        raise SettingError("drill: must be started by itself, not by torchrun or another scheduler")


def choose_step(job: TrainJob, at: int | None, schedule: Schedule, chance: random.Random) -> int:
    """The step after which a fault comes: the one given, else one of the second quarter. Raises SettingError."""
    first, end = schedule.header.first_step, schedule.header.end_step
    # Late enough to see what is normal, and early enough to see what follows.
    drawn = first + chance.randrange((end - first) // 4, (end - first) // 2 + 1)
    if at is not None and not first <= at < end:
        raise SettingError(f"--at: must be a step of {schedule.path}, {first} to {end - 1}; got {at}")
    return drawn if at is None else at


def choose_fault(job: TrainJob, drill: Drill, schedule: Schedule) -> Fault:
    """What is done, and when: as the drill says, else drawn from the job's seed. Raises SettingError."""
    chance = random.Random(job.seed)
    step, shard = choose_step(job, drill.at, schedule, chance), chance.randrange(job.store.count)
    if drill.shard is not None:
        shard = drill.shard
    return Fault(step, shard, signal.SIGSTOP if drill.stop else signal.SIGKILL)


def _undisturbed(job: TrainJob, start_process: StartProcess) -> str:
    """The digest of the same training without a fault."""
    sys.stderr.write("drill: training again, undisturbed\n")
    with tempfile.TemporaryDirectory(prefix="foreload-") as folder:
        plain = replace(job, run=str(Path(folder) / "run"), namespace=None, overwrite=False, digest=True)
        if job.store.local is None:
            # Nothing of it is left on servers that are not its own, and the model is the same with any store.
            plain = replace(plain, store=Servers.parse("--store", "local:1"), parity=None, spare=None)
        ending = train(plain, None, start_process)
        assert ending is not None
        if ending.stopped:
            raise KeyboardInterrupt
        return str(ending.summary["digest"])


def text(summary: Mapping[str, Any]) -> str:
    """What `run` found, for a person."""
    figures = summary["drill"]

    def after(name: str) -> str:
        seconds = figures[f"seconds_until_{name}"]
        return "never" if seconds is None else f"after {seconds:.3f} s"

    def of_normal(name: str) -> str:
        return "-" if figures[name] is None else f"{figures[name]:.1%}"

    fault = f"{figures['signal']} after step {figures['step']}, {figures['struck_at_seconds']:.2f} s into the training"
    lines = [
        f"store shard {figures['shard']}: {fault}; its server was away for {figures['down_seconds']:g} s",
        f"given up {after('lost')}, back {after('back')}, whole {after('whole')}: {figures['rows_rebuilt']:,} rows rebuilt",
        f"longest gap between steps {milliseconds(figures['longest_gap_seconds'])}, counted from the fault; "
        f"median step {milliseconds(figures['median_step_seconds'])}",
        f"throughput, of {figures['samples_per_second_normal'] or 0:,.0f} samples a second: {of_normal('throughput_degraded')} while the shard was "
        f"lost, {of_normal('throughput_rebuilding')} while it was rebuilt",
    ]
    if "digest_undisturbed" in figures:
        lines.append(f"the model is that of an undisturbed run: digest {summary['digest']}")
    if figures["picture"] is not None:
        lines.append(f"drawn in {figures['picture']}")
    return "\n".join(lines)


def milliseconds(seconds: float | None) -> str:
    """A time for a person; - where there is none."""
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"


def draw(path: Path, timeline: Timeline, moments: Moments, figures: Mapping[str, Any]) -> str | None:
    """Throughput over time with the moments; returns the file, None where there is nothing to draw with."""
    end = float(timeline.ended[-1])
    fault = "killed" if figures["signal"] == "SIGKILL" else "stopped"
    after = {"lost": moments.lost, "back": moments.back, "whole": moments.whole}
    shown = [(fault, moments.injected), *((_WORDS[name], at) for name, at in after.items() if at is not None)]
    spans = []
    if moments.lost is not None:
        spans.append((moments.lost, moments.back or end))
    if moments.back is not None:
        spans.append((moments.back, moments.whole or end))
    gap, median = (milliseconds(figures[name]) for name in ("longest_gap_seconds", "median_step_seconds"))
    title = f"Store shard {figures['shard']} {fault} after step {figures['step']}: longest gap {gap}, median step {median}"
    return plot(path, timeline, shown, spans, title)


def plot(
    path: Path, timeline: Timeline, moments: Sequence[tuple[str, float]], spans: Sequence[tuple[float, float]], title: str
) -> str | None:
    """Throughput over time, with moments (what, when) and spans of time; returns the file, None where there is nothing to draw with."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.stderr.write(
            "drill: no picture is drawn, since matplotlib is not installed; `pip install matplotlib` and drill again\n"
        )
        return None
    begin, end = timeline.begin, timeline.end
    edges, rates = timeline.bins(max((end - begin) / _BINS, 1e-3))
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(rates, edges - begin, baseline=0, fill=True, alpha=0.35, label="samples a second")
    for place, (word, at) in enumerate(moments):
        axes.axvline(at - begin, color=f"C{place + 1}", label=f"{word}, {at - begin:.2f} s")
    for place, (since, until) in enumerate(spans):
        axes.axvspan(since - begin, until - begin, color=("C3", "C2")[place % 2], alpha=0.08)
    axes.set_title(title)
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("samples a second")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=min(len(moments) + 1, _LEGEND_COLUMNS))
    figure.savefig(path, dpi=110)
    return str(path)
