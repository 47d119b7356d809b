"""Messages between trainers and their coordinator.

They are: what a trainer begins with and how it ended, events to the coordinator, and the
coordinator's plan for the trainers. What trainers and coordinator agree on is in `facts`; what a
user's command asks is in `control`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foreload.base.memory import ProcessUse
from foreload.cache.client.load import ShardLoad
from foreload.cache.protocol.shards.shard_status import Lag, ServerUnreachable, ShardSnapshot
from foreload.cache.repair.findings import Scrubbed
from foreload.trainer.checkpoints.files import PartFiles
from foreload.trainer.cluster.messages.faults import Fault, TrainerFault
from foreload.trainer.compute.reports import EvaluationReport, StepReport, Totals
from foreload.trainer.job.metric_choice import Watched
from foreload.trainer.run.manifest import Stage
from foreload.trainer.saved.kept_manifest import KeptFile


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a trainer without the run's folder needs of it.

    Attributes:
        identity: Identity of the run, as in the manifest.
        stage: Last stage in the manifest.
    """

    identity: dict[str, Any]
    stage: Stage


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What the coordinator sends to every trainer of one call of `foreload train`.

    Attributes:
        job: `TrainJob.to_dict`, without passwords.
        first_term: Number of the term with which the call begins.
        start_step: The last step trained before this call.
        last_batches: For each lane, the number of its last write-back batch.
        fingerprint: Numerics fingerprint that each trainer must have. If None, that of the first
            trainer.
        resumes: Whether the run continues from a dense part and a prefix of the schedule.
        servers_return: Whether servers of lost shards are started again or replaced.
        faults: As in `RunObserver`.
        totals: Totals of the run before this call.
        hosts: Facts about the run, if trainers are on several hosts and only some have its folder.
        watched: As in `Manifest`.
        code: Checksums of the model's files by name, which each trainer's files must have.
    """

    job: dict[str, Any]
    first_term: int
    start_step: int
    last_batches: tuple[int, ...]
    fingerprint: dict[str, str] | None
    resumes: bool
    servers_return: bool
    faults: tuple[Fault | TrainerFault, ...] = ()
    totals: Totals = field(default_factory=Totals)
    hosts: RunFacts | None = None
    watched: Watched | None = None
    code: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How a trainer ended, at (term, trainer) in the rendezvous store.

    Attributes:
        step: The last step trained.
        stopped: Whether training stopped before the schedule's end.
        failure: What went wrong, if training stopped because of that.
        flushed: Number of rows written beyond the schedule.
        last_batches: Number of the last write-back batch of each of the trainer's lanes.
        traffic: `cache.traffic.Counters`, times in seconds.
        lost: Store shards that are not whole.
        segments: Number of segments of the schedule that were begun.
        prefix: Checksum that identifies these segments.
        totals: Totals of the trainer's steps in this call.
        use: Resource use of the trainer's process.
        loads: Load of the store shards, by number.
        watched: As in `Manifest`.
        kept: Files with rows of the trainer's lanes that the store lacks.
    """

    step: int
    stopped: bool
    failure: str | None
    flushed: int
    last_batches: dict[int, int]
    traffic: dict[str, int | float]
    lost: tuple[int, ...]
    segments: int
    prefix: str
    totals: Totals
    use: ProcessUse = ProcessUse()
    loads: dict[int, ShardLoad] = field(default_factory=dict)
    watched: Watched | None = None
    kept: tuple[KeptFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """The trainer is ready to begin a term.

    Attributes:
        term: Number of the term.
        fingerprint: Fingerprint of the trainer's numerics.
    """

    term: int
    fingerprint: dict[str, str]


@dataclass(frozen=True, slots=True)
class TermLeft:
    """The trainer has left a term, which is over.

    Attributes:
        term: Number of the term.
        step: The last step that the trainer applied and all its replicas have received.
        copies: Lanes whose replicas on this trainer are complete.
        stopping: Whether training was about to end after that step.
        why: Why the term ended, as this trainer noticed. None if the end was planned; then all
            members leave at this step.
        joins: The trainer does not yet have the state that the others hold in memory, so it stands
            at no step.
        keeps: The trainer cannot go on, so the next term keeps what the store lacks.
        closed: A trainer whose connection this one found closed. None if it found none.
    """

    term: int
    step: int
    copies: tuple[int, ...]
    stopping: bool
    why: str | None
    joins: bool = False
    keeps: bool = False
    closed: int | None = None


@dataclass(frozen=True, slots=True)
class CanJoin:
    """The trainer, which was started while others train, can be a member of the next term.

    It lacks only the state that the others hold in memory.
    """


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """The trainer was asked to leave by SIGTERM, so other trainers must host its lanes."""


@dataclass(frozen=True, slots=True)
class Departed:
    """What a trainer did that has left in order, at (trainer).

    Attributes:
        totals: Totals of its steps in this call.
        traffic, use, loads: As in `TrainerEnd`.
    """

    totals: Totals
    traffic: dict[str, int | float]
    use: ProcessUse = ProcessUse()
    loads: dict[int, ShardLoad] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A training step has ended.

    Attributes:
        report: Report of the step.
        at: When it ended, time.monotonic() of the trainer's machine. Every `at` of an event is such
            a time.
    """

    report: StepReport
    at: float


@dataclass(frozen=True, slots=True)
class EvaluationEnded:
    """An evaluation pass has ended.

    Attributes:
        report: Metrics of one evaluation set.
        waits_in: The term in which training waits after the evaluation, because no copy of its step
            was taken. It waits until one is taken for a checkpoint, or until the coordinator wants
            none (`GoOnAfter`). If None, training goes on.
    """

    report: EvaluationReport
    waits_in: int | None = None


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """A fault was injected into a store shard's server, or the trainer is about to signal itself.

    The trainer's main thread alone reports the second kind, so faults at STORE_POINTS or during a
    takeover are not reported.
    """

    fault: Fault | TrainerFault
    at: float


@dataclass(frozen=True, slots=True)
class ShardsReport:
    """The state of the store shards for the trainer's lanes from now on.

    The trainer reports it when the state of a shard changes, and repeatedly during a rebuild.
    """

    shards: ShardSnapshot
    at: float


@dataclass(frozen=True, slots=True)
class SeededCopy:
    """The progress of a lane's replica.

    Attributes:
        slots: Number of slots that the replica holds.
        of: Number of slots in all.
        complete: Whether the lane can be taken over from the replica.
    """

    slots: int
    of: int
    complete: bool


@dataclass(frozen=True, slots=True)
class CopiesReport:
    """The progress of the replicas that the trainer holds in a term, by lane.

    The trainer reports changes, but not each one.
    """

    term: int
    copies: dict[int, SeededCopy]


@dataclass(frozen=True, slots=True)
class HeldRows:
    """What each store shard holds of a trainer's lanes.

    Attributes:
        rows: Number of rows, [shards].
        parity_rows: Number of parity rows, [shards].
        row_bytes: Bytes of both, [shards].
        lag: What is on its way to the store.
        loads: Load of the shards, by number.
    """

    rows: tuple[int, ...]
    parity_rows: tuple[int, ...]
    row_bytes: tuple[int, ...]
    lag: Lag
    loads: dict[int, ShardLoad] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadsReport:
    """The load of the store shards so far, by number. With --auto the trainer reports it often."""

    loads: dict[int, ShardLoad]


@dataclass(frozen=True, slots=True)
class RequestReport:
    """The progress of a request, a scrub or a row count, in the trainer's lanes.

    Attributes:
        number: Number of the request.
        scrubbed: Progress of a scrub.
        held: Result of a row count.
        failed: Why the request cannot be served, or None.
    """

    number: int
    scrubbed: Scrubbed | None = None
    held: HeldRows | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class LostRows:
    """Rows that were lost. The fields are as in `cache.errors.RowsLost`."""

    shards: tuple[int, ...]
    covered: int
    rows: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The trainer ends because of an error.

    Attributes:
        code: Code of the error.
        message: Message of the error.
        lost: The rows that were lost, if the error is RowsLost.
    """

    code: str
    message: str
    lost: LostRows | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The trainer has ended; its TrainerEnd is in the rendezvous store."""


@dataclass(frozen=True, slots=True)
class CopyTaken:
    """The copy that a trainer has taken for a checkpoint, in memory.

    Attributes:
        step: Step of the checkpoint.
        seconds: How long training was stopped for the copy.
        segments, prefix: As in `TrainerEnd`, for a stop after this step.
        given: For each of the trainer's lanes, the number of ordinals of each table.
        dense: Checksums of the dense part by name, which must be the same on all trainers.
        watched: As in `Manifest`.
    """

    step: int
    seconds: float
    segments: int
    prefix: str
    given: dict[int, tuple[int, ...]]
    dense: dict[str, str]
    watched: Watched | None = None


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The progress of a checkpoint on a trainer.

    With the first report, which has only the number, the trainer says that it knows of the
    checkpoint, and polls for its step from then on.

    Attributes:
        number: Number of the checkpoint.
        taken: The copy in memory, once it is taken.
        files: Files of the trainer's part, once they are on disk.
        failed: Why the trainer cannot write its part, or None.
    """

    number: int
    taken: CopyTaken | None = None
    files: PartFiles | None = None
    failed: str | None = None


TrainerEvent = (
    Ready
    | TermLeft
    | CanJoin
    | LeaveWanted
    | StepEnded
    | EvaluationEnded
    | FaultInjected
    | ShardsReport
    | CopiesReport
    | ServerUnreachable
    | LoadsReport
    | RequestReport
    | CheckpointReport
    | Failed
    | Ended
)


@dataclass(frozen=True, slots=True)
class Events:
    """Some events of a trainer, at (trainer, number of Events before these)."""

    events: tuple[TrainerEvent, ...]


@dataclass(frozen=True, slots=True)
class ScrubPlan:
    """A scrub: check every stripe of the lanes.

    Attributes:
        number: Number of the scrub.
        rows: Folder in RUN/scrub that lists the rows that exist.
    """

    number: int
    rows: str


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Where and how each trainer writes its part of the checkpoint that was taken.

    Attributes:
        folder: Folder of the checkpoint, which has no manifest yet.
        since: Step of the checkpoint's base. If -1, the checkpoint holds all rows.
        known: Number of ordinals that the base has, by lane and table.
        bits: Bits of a weight.
    """

    folder: str
    since: int
    known: tuple[tuple[int, ...], ...]
    bits: int


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """A checkpoint to take after a step on which all trainers agree.

    The step is the next one that is in `steps`, or after which the number of steps is a multiple of
    `every`.

    Attributes:
        number: Number of the checkpoint.
        every: Interval in steps. If None, only `steps` counts.
        steps: Steps after which the checkpoint may be taken.
        behind: The step after which all trainers wait now, if the checkpoint is of that step.
        ready: Whether the leader may name the step, because every trainer knows of the checkpoint:
            it has reported so, or it reads this plan before the first step of its term.
        part: What the trainers write. None while it is not known.
    """

    number: int
    every: int | None
    steps: tuple[int, ...] = ()
    behind: int | None = None
    ready: bool = False
    part: PartPlan | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator wants of all trainers, at (version).

    Each version is the whole plan, and no version number is left out.

    Attributes:
        version: Number of this version.
        placement: Number of the PlacementText that says where rows are and where they migrate to.
        servers: URLs of the store shards by number, without passwords, "" for a removed shard.
        checkpoint: The checkpoint to save, if any.
        scrub: The scrub under way, if any.
        count: Number of the last requested count of the rows in the store.
        stop_by: The step after which training must stop at the latest, because a store shard would
            be full later. None if there is no such step.
        hurried: Whether rows migrate in a hurry, because trainers wait for the store.
    """

    version: int
    placement: int
    servers: tuple[str, ...]
    checkpoint: CheckpointPlan | None = None
    scrub: ScrubPlan | None = None
    count: int = 0
    stop_by: int | None = None
    hurried: bool = False


@dataclass(frozen=True, slots=True)
class PlacementText:
    """A placement as text, at (its number)."""

    text: str
