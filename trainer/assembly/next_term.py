"""Continue in a further term.

A trainer that stands at the last committed step goes on, and a trainer that joins gets the state of
the others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foreload.base.codec import of_json, to_stored
from foreload.cache.protocol.handover.takeover import CopiedLane, take_over_lost
from foreload.pipelines.schedule.format import Event, Occupants
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.assembly import StoreAccess, arrivals_from, events_from, free_partitions
from foreload.trainer.assembly.dense_file import dense_bytes, load_dense_bytes
from foreload.trainer.compute.reports import Totals
from foreload.trainer.job.metric_choice import Watched
from foreload.trainer.step.commits import Commits
from foreload.trainer.step.exchange import STATE
from foreload.trainer.step.hosted_lanes import HostedLanes, LaneReplica
from foreload.trainer.step.program import Trainer
from foreload.trainer.step.term_session import TermSession, TrainerParts
from foreload.trainer.step.transport import Transport


def place_after(schedule: Schedule, step: int) -> tuple[int, int]:
    """Return where the program goes on after a training step.

    Returns:
        A segment, and the number of the next event, which is in that segment or right behind it.

    Raises:
        ValueError: `step` is not in the schedule.
    """
    if step < schedule.header.first_step:
        return 0, 0
    place = 0
    for segment in schedule.segments():
        if segment.kind == "train" and step < segment.first + len(segment.samples):
            return segment.index, place + step - segment.first + 1
        place += len(segment.samples)
    raise ValueError(f"step: must be one of the schedule, got {step}")


def segment_after(schedule: Schedule, step: int) -> int | None:
    """Return the segment that begins right behind a training step, published or not.

    Returns None if the step's own segment goes on.
    """
    segment, index = place_after(schedule, step)
    if not index:
        return segment
    known = [schedule.segment(number) for number in range(segment + 1)]
    return segment + 1 if index == sum(len(one.samples) for one in known if one is not None) else None


def _next_training_event(schedule: Schedule, segment: int, index: int) -> Event | None:
    """Return the first training event from number `index` on.

    Returns None if there is none, or if it is not known yet.
    """
    for event in schedule.known_events(segment):
        if event is None:
            return None
        if event.index >= index and event.kind == "train":
            return event
    return None


def _copied(copy: LaneReplica, step: int, ends: np.ndarray) -> CopiedLane:
    """Return what a replica knows of its lane after `step`.

    Args:
        ends: the slots whose rows leave at the next boundary.
    """
    partition = copy.partition
    slots, here = partition.occupied(), partition.occupants
    nothing = partition.rows_in(slots[:0])
    owed = [(boundary, copy.owed.get(boundary, nothing)) for boundary in range(copy.released + 1, step + 1)]
    return CopiedLane(
        ordinals=copy.given,
        occupants=Occupants(*here.columns(slots), here.stored_tag[slots]),
        owed=owed,
        ending=partition.rows_in(ends),
        released=(copy.released, copy.batch),
    )


def take_over_copied(
    parts: TrainerParts,
    access: StoreAccess,
    hosted: HostedLanes,
    copies: Sequence[LaneReplica],
    step: int,
    stopping: bool,
    last_owner_dead: bool,
) -> None:
    """Host the lanes of these replicas, whose owners were lost or have handed them over.

    Args:
        copies: replicas in the state after `step`.
        stopping: whether the owners may have handed over all rows in their slots.
        last_owner_dead: as in `take_over_lost`.

    Raises:
        CacheError: the traffic has ended.
    """
    schedule = parts.schedule
    segment, index = place_after(schedule, step)
    following = None if stopping else _next_training_event(schedule, segment, index)
    # The rows that the former owner may have handed over: at a stop all rows in slots, otherwise
    # those that end at the next boundary. If that boundary is not known yet, all rows in slots
    # count.
    ends = {
        copy.lane: copy.partition.occupied() if following is None else schedule.lane(following, copy.lane).ends for copy in copies
    }
    copied = {copy.lane: _copied(copy, step, ends[copy.lane]) for copy in copies}
    taken = hosted.traffic.between_rounds(
        lambda: take_over_lost(
            hosted.stored, access.ownership, access.log, copied, last_owner_dead, access.on_action or (lambda action: None)
        )
    )
    for copy in copies:
        lane, partition, of_lane = copy.lane, copy.partition, taken[copy.lane]
        # The former owner has written these rows, so the store has them as they are in the slots.
        stored = ends[lane][of_lane.stored]
        partition.occupants.stored_tag[stored] = partition.occupants.tag[stored]
        if access.placement.r:
            partition.keep_base(ends[lane], of_lane.ending)
        hosted.add(partition, of_lane.plan(arrivals_from(schedule, segment, index, lane)), copy.given)
        hosted.hand_over_owed(lane, of_lane.to_write)


def continue_term(
    parts: TrainerParts,
    access: StoreAccess,
    session: TermSession,
    hosted: HostedLanes,
    copies: dict[int, LaneReplica],
    step: int,
    seeded: Collection[tuple[int, int]],
    stopping: bool,
    last_owner_dead: bool,
) -> tuple[Trainer, Iterator[Event]]:
    """Make the trainer of a further term, and the rest of the program.

    Lanes, replicas and the dense part must be in the state after `step`. Lanes that the trainer
    hosted stay as they are. Lanes that the term gives it, and of which it has a replica, are taken
    over. Replicas that the term needs and that are missing here are seeded while training goes on.

    Args:
        copies: the replicas held here, by lane.
        step: the last committed step.
        seeded: (lane, rank) of the replicas that are complete, the same on all trainers.
        stopping: whether any trainer's position said that training was to end.
        last_owner_dead: as in `take_over_lost`.

    Returns:
        The trainer for the term, and the events of the schedule after `step`.

    Raises:
        CacheError: a takeover failed.
    """
    schedule = parts.schedule
    segment, index = place_after(schedule, step)
    hosted.traffic.raise_term(access.ownership.term)
    for lane in hosted.numbers:
        hosted.traffic.replan(lane, arrivals_from(schedule, segment, index, lane))
    gained = [copies[lane] for lane in session.hosted if lane not in hosted.partitions]
    if gained:
        take_over_copied(parts, access, hosted, gained, step, stopping, last_owner_dead)
    kept = {lane: copies[lane] for lane in session.copied if (lane, session.transport.rank) in seeded}
    fresh = free_partitions(parts, [lane for lane in session.copied if lane not in kept], with_base=False)
    tables = len(schedule.header.features.tables)
    held = {lane: kept.get(lane) or LaneReplica(lane, fresh[lane], tables, empty=False) for lane in session.copied}
    commits = (
        Commits(parts, hosted, session, held, step, seeded, seeds_first=False, stopping=stopping) if session.has_copies else None
    )
    return Trainer(parts, hosted, session, step, commits), events_from(schedule, segment, index)


@dataclass(frozen=True, slots=True)
class _Counted:
    """What was counted so far.

    Attributes:
        totals: the totals of the steps.
        watched: the evaluations so far in the watched metric, or None.
    """

    totals: Totals
    watched: Watched | None


def send_state(
    transport: Transport, ranks: Sequence[int], parts: TrainerParts, step: int, totals: Totals, watched: Watched | None = None
) -> None:
    """Send joining trainers the dense part after `step` and what was counted so far.

    Args:
        ranks: the ranks of the joining trainers.
        totals: the totals of the steps so far.
        watched: the evaluations so far in the watched metric, or None.

    Raises:
        PeerLost: another trainer was lost.
    """
    head, data = json.dumps(to_stored(_Counted(totals, watched))).encode(), dense_bytes(parts.module, parts.optimizer, step)
    sizes = torch.tensor([len(head), len(data)], dtype=torch.int64, device=transport.device)
    message = torch.frombuffer(bytearray(head + data), dtype=torch.uint8).to(transport.device)
    transport.post(dict.fromkeys(ranks, sizes), {}, STATE).wait()
    transport.post(dict.fromkeys(ranks, message), {}, STATE).wait()


def receive_state(transport: Transport, rank: int, parts: TrainerParts) -> tuple[Totals, Watched | None]:
    """Receive what `send_state` sends, and load the dense part.

    Args:
        rank: the rank of the sender.

    Returns:
        The totals, and the evaluations so far in the watched metric, or None.

    Raises:
        PeerLost: the sender was lost. Nothing has changed then.
    """
    sizes = torch.zeros(2, dtype=torch.int64, device=transport.device)
    transport.post({}, {rank: sizes}, STATE).wait()
    head, data = sizes.tolist()
    message = torch.empty(head + data, dtype=torch.uint8, device=transport.device)
    transport.post({}, {rank: message}, STATE).wait()
    received = message.cpu().numpy().tobytes()
    load_dense_bytes(received[head:], parts.module, parts.optimizer)
    counted = of_json(json.loads(received[:head]), _Counted)
    return counted.totals, counted.watched
