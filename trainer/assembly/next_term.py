"""Go on in a further term: as a trainer that stands at the last committed step, or as one that joins and gets the others' state."""

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
    """Where the program goes on after a training step that was trained: a segment, and the number of an event in it or right behind it."""
    if step < schedule.header.first_step:
        return 0, 0
    place = 0
    for segment in schedule.segments():
        if segment.kind == "train" and step < segment.first + len(segment.samples):
            return segment.index, place + step - segment.first + 1
        place += len(segment.samples)
    raise ValueError(f"step: must be one of the schedule, got {step}")


def segment_after(schedule: Schedule, step: int) -> int | None:
    """The segment that begins behind a training step, published or not; None where the step's own goes on."""
    segment, index = place_after(schedule, step)
    if not index:
        return segment
    known = [schedule.segment(number) for number in range(segment + 1)]
    return segment + 1 if index == sum(len(one.samples) for one in known if one is not None) else None


def _next_training_event(schedule: Schedule, segment: int, index: int) -> Event | None:
    """The first training event from event `index` on; None where there is none, or it is not known yet."""
    for event in schedule.known_events(segment):
        if event is None:
            return None
        if event.index >= index and event.kind == "train":
            return event
    return None


def _copied(copy: LaneReplica, step: int, ends: np.ndarray) -> CopiedLane:
    """What a copy tells of its lane after `step`. ends: the slots whose rows leave at the next boundary."""
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
    """Host the lanes of which these are copies of the state after `step`, whose owners are gone, or have handed them over. Raises CacheError, after
    which the traffic is over.

    stopping: the owners may have handed over all that sat in slots. last_owner_dead: as `take_over_lost` has it.
    """
    schedule = parts.schedule
    segment, index = place_after(schedule, step)
    following = None if stopping else _next_training_event(schedule, segment, index)
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
    """Who trains in a further term, and the program from there on. Lanes, copies and dense part are those after `step`, the last committed.

    Lanes that the trainer hosted stay as they are; those of which it has a copy, and which the term gives it, are taken over. Copies that the term
    asks for and that are not here are seeded while training goes on. seeded: (lane, rank) of the copies that are complete, on all trainers alike;
    stopping: whether any trainer's position said so; last_owner_dead: as `take_over_lost` has it. Raises CacheError.
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
    """What was counted so far."""

    totals: Totals
    watched: Watched | None


def send_state(
    transport: Transport, ranks: Sequence[int], parts: TrainerParts, step: int, totals: Totals, watched: Watched | None = None
) -> None:
    """Send trainers of the term the dense part as it is after `step`, totals, and what evaluations have been. Raises PeerLost."""
    head, data = json.dumps(to_stored(_Counted(totals, watched))).encode(), dense_bytes(parts.module, parts.optimizer, step)
    sizes = torch.tensor([len(head), len(data)], dtype=torch.int64, device=transport.device)
    message = torch.frombuffer(bytearray(head + data), dtype=torch.uint8).to(transport.device)
    transport.post(dict.fromkeys(ranks, sizes), {}, STATE).wait()
    transport.post(dict.fromkeys(ranks, message), {}, STATE).wait()


def receive_state(transport: Transport, rank: int, parts: TrainerParts) -> tuple[Totals, Watched | None]:
    """The other side of `send_state`; puts the dense part in its place. Raises PeerLost, after which nothing has changed."""
    sizes = torch.zeros(2, dtype=torch.int64, device=transport.device)
    transport.post({}, {rank: sizes}, STATE).wait()
    head, data = sizes.tolist()
    message = torch.empty(head + data, dtype=torch.uint8, device=transport.device)
    transport.post({}, {rank: message}, STATE).wait()
    received = message.cpu().numpy().tobytes()
    load_dense_bytes(received[head:], parts.module, parts.optimizer)
    counted = of_json(json.loads(received[:head]), _Counted)
    return counted.totals, counted.watched
