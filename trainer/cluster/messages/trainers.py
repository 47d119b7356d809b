"""What trainers and their coordinator send each other: how a trainer begins and ends, events to the coordinator, its plan for the trainers.

What they agree on is in `facts`, what a user's command asks in `control`.
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
    """What of a run's folder a trainer without it needs. identity: as the manifest has it; stage: its last."""

    identity: dict[str, Any]
    stage: Stage


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What the coordinator tells every trainer of one call of `foreload train`. job: TrainJob.to_dict, without passwords.

    first_term: the one that it begins with. start_step: the last step trained before; last_batches: of each lane, the number of its last write-back
    batch. fingerprint: what each trainer's numerics must be; None: those of the first trainer. resumes: there is a dense part, and a schedule's
    prefix, to go on from. faults: as RunObserver has them. totals: of the run before this call. hosts: where trainers are on several
    hosts, and only some have the run's folder. watched: as in Manifest. code: of the model, the checksums of the files by name, which each trainer's
    must have.
    """

    job: dict[str, Any]
    first_term: int
    start_step: int
    last_batches: tuple[int, ...]
    fingerprint: dict[str, str] | None
    resumes: bool
    servers_return: bool  # servers of lost shards are started again, or others take their place
    faults: tuple[Fault | TrainerFault, ...] = ()
    totals: Totals = field(default_factory=Totals)
    hosts: RunFacts | None = None
    watched: Watched | None = None
    code: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How a trainer ended, at (term, trainer) in the rendezvous store.

    step: the last one; stopped: before the schedule's end; failure: what went wrong, where that is why; flushed: rows written beyond the schedule.
    last_batches: of each of its lanes, the number of the last write-back batch. traffic: cache.traffic.Counters, times in seconds. lost: store
    shards that are not whole. segments: of the schedule, how many were begun; prefix: what identifies these. totals: of its steps in this call.
    use: of its process. loads: of the store shards, by number. watched: as in Manifest. kept: files of rows of its lanes that the store lacks.
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
    """The trainer has all that it needs to begin a term. fingerprint: of its numerics."""

    term: int
    fingerprint: dict[str, str]


@dataclass(frozen=True, slots=True)
class TermLeft:
    """The trainer has left a term, which is over. step: the last one that it and its copies have all of; copies: lanes whose copies here are
    complete; stopping: whether training was to end behind that step; why: what it noticed, None where the end was planned, and
    all leave at this step. joins: it has not yet got what the others have in memory, and stands nowhere. keeps: it cannot go on, so the next term
    is to keep what the store lacks.
    """

    term: int
    step: int
    copies: tuple[int, ...]
    stopping: bool
    why: str | None
    joins: bool = False
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class CanJoin:
    """The trainer, which was started while others train, has all that it needs to be a member of the next term but what they have in memory."""


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """The trainer was asked to leave (SIGTERM): others are to host its lanes."""


@dataclass(frozen=True, slots=True)
class Departed:
    """What a trainer did that has left in order, at (trainer). totals: of its steps in this call; traffic, use, loads: as in TrainerEnd."""

    totals: Totals
    traffic: dict[str, int | float]
    use: ProcessUse = ProcessUse()
    loads: dict[int, ShardLoad] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A training step, and when it ended: time.monotonic() of the trainer's machine, as all that is called `at`."""

    report: StepReport
    at: float


@dataclass(frozen=True, slots=True)
class EvaluationEnded:
    """An evaluation pass. waits_in: the term in which training waits behind it, as its step is in no copy: until one is taken for a checkpoint, or
    the coordinator says that none is to be (`GoOnAfter`). None: it goes on.
    """

    report: EvaluationReport
    waits_in: int | None = None


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """A fault is put in: at the server of a store shard, or now, by a signal that the trainer sends itself. The latter is reported by its own thread
    alone, so not at STORE_POINTS or while it takes lanes over.
    """

    fault: Fault | TrainerFault
    at: float


@dataclass(frozen=True, slots=True)
class ShardsTold:
    """How the store shards are for the trainer's lanes from now on: reported when the state of one changes, and now and then while one is rebuilt."""

    shards: ShardSnapshot
    at: float


@dataclass(frozen=True, slots=True)
class SeededCopy:
    """How far a copy of a lane is: slots that it holds, of how many; complete: the lane can be taken over from it."""

    slots: int
    of: int
    complete: bool


@dataclass(frozen=True, slots=True)
class CopiesTold:
    """How the copies are that the trainer holds in a term, by lane: reported when that changes, now and then."""

    term: int
    copies: dict[int, SeededCopy]


@dataclass(frozen=True, slots=True)
class HeldRows:
    """What each store shard holds of a trainer's lanes: rows, parity rows and their bytes, [shards] each; and what is on its way there. loads: of the
    shards, by their numbers.
    """

    rows: tuple[int, ...]
    parity_rows: tuple[int, ...]
    row_bytes: tuple[int, ...]
    lag: Lag
    loads: dict[int, ShardLoad] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestReport:
    """How far the request of that number is in the trainer's lanes: a scrub, or a count. failed: why it cannot be done."""

    number: int
    scrubbed: Scrubbed | None = None
    held: HeldRows | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class LostRows:
    """Rows that are gone, as cache.errors.RowsLost has them."""

    shards: tuple[int, ...]
    covered: int
    rows: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The trainer ends for a reason: the code and the message of the error; lost: where rows are."""

    code: str
    message: str
    lost: LostRows | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The trainer is at its end; its TrainerEnd is in the rendezvous store."""


@dataclass(frozen=True, slots=True)
class CopyTaken:
    """What a trainer has in memory for a checkpoint. seconds: how long training stood still for that; step: of which it is; segments, prefix: as in
    TrainerEnd, of a stop behind it; given: of each of its lanes, how many ordinals each table has; dense: the checksums of its dense part by name,
    which must be those of all other trainers; watched: as in Manifest.
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
    """How far the checkpoint of that number is on a trainer. At first it knows that it is wanted, and looks for its step from then on. files: of its
    part, which are on the disk; failed: why it cannot write that.
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
    | ShardsTold
    | CopiesTold
    | ServerUnreachable
    | RequestReport
    | CheckpointReport
    | Failed
    | Ended
)


@dataclass(frozen=True, slots=True)
class Events:
    """A trainer's events, at (trainer, number of these)."""

    events: tuple[TrainerEvent, ...]


@dataclass(frozen=True, slots=True)
class ScrubPlan:
    """Check every stripe of the lanes. number: which scrub it is; rows: the folder in RUN/scrub that says which rows there are."""

    number: int
    rows: str


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Write this trainer's part of the checkpoint that was taken. folder: where, without a manifest yet; since: the step of its base, -1: it holds
    all rows; known: by lane and table, how many ordinals the base has; bits: of a weight.
    """

    folder: str
    since: int
    known: tuple[tuple[int, ...], ...]
    bits: int


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Have in memory what a checkpoint needs, behind a step that all agree on: the first one to come that is one of `steps`, or until which there are
    a multiple of `every` steps; None: none such. behind: the step behind which all wait, if that is the one.

    number: which checkpoint it is. ready: every trainer has reported that it knows of it, so who leads may name the step. part: what is to be written
    of it; None: that is not known yet.
    """

    number: int
    every: int | None
    steps: tuple[int, ...] = ()
    behind: int | None = None
    ready: bool = False
    part: PartPlan | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator wants of all trainers, at (version): each version is all of it, and none is left out.

    placement: where rows live, and move to, the place of its PlacementText; servers: the URLs of the store shards by number, without passwords, ""
    for those removed. checkpoint: the one that is to be saved, if any; scrub: the one that is under way; count: the number of the last count of what
    the store holds of the lanes. stop_by: the step after which training must stop at the latest, since a store shard would be full later.
    """

    version: int
    placement: int
    servers: tuple[str, ...]
    checkpoint: CheckpointPlan | None = None
    scrub: ScrubPlan | None = None
    count: int = 0
    stop_by: int | None = None


@dataclass(frozen=True, slots=True)
class PlacementText:
    """A placement as text, at (number of this)."""

    text: str
