"""Who hosts which lane, and who has copies of it, in the first term of a job and in the one after another. Pure: no clock, no messages.

A term ends for one of two reasons. A member is lost: then its lanes go to trainers that have complete copies, and nothing else moves. Or it was
planned, all members are at the same step, and then trainers join, lanes go where they are to be, and trainers that have none left leave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from foreload.trainer.cluster.messages.facts import Term, contiguous_lanes
from foreload.trainer.cluster.messages.trainers import TermLeft
from foreload.trainer.errors import LanesLost
from foreload.trainer.job.succession import ONE_MACHINE, balanced_hosts, next_copies, next_hosts


@dataclass(frozen=True, slots=True)
class Change:
    """What is to become of the members: joining, those that can join; leaving, those that are to leave once they host no lane.

    targets: of each lane the trainer that is to host it, where that is planned elsewhere, for the members as they are.
    """

    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    targets: tuple[int, ...] | None = None


NO_CHANGE = Change()


def first_term(
    number: int, members: Sequence[int], lanes: int, copies: int, step: int, machines: Mapping[int, str] = ONE_MACHINE
) -> Term:
    """The term that a call of `foreload train` begins with. copies: how many trainers have each lane, its owner included; step: the last trained."""
    hosts = tuple(members[rank] for rank in contiguous_lanes(lanes, len(members)))
    none: tuple[tuple[int, ...], ...] = ((),) * lanes
    return Term(number, tuple(members), hosts, next_copies(hosts, none, members, copies, machines), none, step, targets=hosts)


def next_term(
    before: Term,
    positions: Mapping[int, TermLeft],
    copies: int,
    dead: bool = True,
    machines: Mapping[int, str] = ONE_MACHINE,
    leaving: Collection[int] = (),
) -> Term:
    """The term after one in which members were lost: their lanes go to trainers that have complete copies, all others stay where they are.

    positions: of the members that are there, by number. It goes on from the least step that any of them stands at: what others did beyond is undone.
    dead: whether those that are lost are known to be dead. leaving: those that are to leave: others get copies of what they have, so that they can.
    Raises LanesLost for lanes that neither their owner nor a complete copy is left of.
    """
    members, complete, hosts = _left_of(before, positions)
    keeps = next((position.why for position in positions.values() if position.keeps), None)
    # A copy that was made since a lane is to move to it is still made.
    pending = [target if target in members else host for target, host in zip(before.targets, hosts, strict=True)]
    stay = [trainer for trainer in members if trainer not in leaving] or members
    kept = _only_copies(hosts, complete, stay, leaving) if copies > 1 else {}
    return Term(
        before.number + 1,
        members,
        hosts,
        _with_targets(_copied(hosts, complete, stay, kept, copies, machines), hosts, pending),
        complete,
        _least_step(before, positions),
        any(position.stopping for position in positions.values()),
        dead,
        tuple(pending),
        joined=_without_state(members, positions),
        left=before.left,
        keeps=keeps,
    )


def changed_term(
    before: Term, positions: Mapping[int, TermLeft], copies: int, change: Change, machines: Mapping[int, str] = ONE_MACHINE
) -> Term:
    """The term after one that all members have left at the same step, as was planned.

    Lanes go where they are to be if a complete copy is there; where there is none, one is made, so that they can go in a later term. Where they are
    to be is planned anew where somebody joins, or is to leave, or hosts nothing. A trainer that is to leave does so as soon as it hosts no lane, and
    others have all copies that it alone had.
    """
    members, complete, before_hosts = _left_of(before, positions)
    there = (*members, *change.joining)
    stay = [trainer for trainer in there if trainer not in change.leaving]
    held = [{*complete[lane], *before.copies[lane]} for lane in range(len(before_hosts))]
    targets = before.targets if change.targets is None else change.targets
    if set(targets) != set(stay):
        targets = balanced_hosts(before_hosts, held, stay)
    hosts = tuple(
        target if target in complete[lane] else host
        for lane, (host, target) in enumerate(zip(before_hosts, targets, strict=True))
    )
    # Who hosted a lane and goes on without it has a copy that lacks nothing.
    complete = tuple(
        holders if hosts[lane] == before_hosts[lane] else (*holders, before_hosts[lane]) for lane, holders in enumerate(complete)
    )
    kept = _only_copies(hosts, complete, stay, change.leaving) if copies > 1 and len(stay) > 1 else {}
    remain = tuple(trainer for trainer in there if trainer in stay or trainer in hosts or trainer in kept.values())
    copied = _copied(hosts, complete, stay, kept, copies, machines)
    return Term(
        before.number + 1,
        remain,
        hosts,
        _with_targets(copied, hosts, targets),
        tuple(tuple(trainer for trainer in holders if trainer in remain) for holders in complete),
        _least_step(before, positions),
        targets=targets,
        former=tuple(None if was == host else was for was, host in zip(before_hosts, hosts, strict=True)),
        joined=(*_without_state(remain, positions), *change.joining),
        left=(*before.left, *(trainer for trainer in members if trainer not in remain)),
    )


def wants_change(term: Term, complete: Sequence[Collection[int]], change: Change) -> bool:
    """Whether a term is to end so that members or lanes change. complete: lane -> the trainers with complete copies by now."""
    stay = {trainer for trainer in term.members if trainer not in change.leaving}
    if change.joining or set(term.targets) != stay:
        return True
    if change.targets is not None and change.targets != term.targets:
        return True
    moves = [lane for lane, host in enumerate(term.hosts) if term.targets[lane] != host]
    if moves:
        return all(term.targets[lane] in complete[lane] for lane in moves)
    leaving = [trainer for trainer in term.members if trainer in change.leaving]
    return bool(leaving) and not (
        set(_only_copies(term.hosts, complete, stay, leaving).values()) if len(stay) > 1 and any(term.copies) else ()
    )


def _left_of(
    before: Term, positions: Mapping[int, TermLeft]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Of a term that is over: the members that are there, of each lane the complete copies that they have, and who of them can host it."""
    members = tuple(trainer for trainer in before.members if trainer in positions)
    lanes = range(len(before.hosts))
    complete = tuple(tuple(trainer for trainer in members if lane in positions[trainer].copies) for lane in lanes)
    found = next_hosts(before.hosts, complete, members)
    hosts = tuple(host for host in found if host is not None)
    if len(hosts) < len(found):
        lost = [lane for lane, host in enumerate(found) if host is None]
        raise LanesLost(lost, [trainer for trainer in before.members if trainer not in positions])
    return members, complete, hosts


def _least_step(before: Term, positions: Mapping[int, TermLeft]) -> int:
    """The step that everyone can go on from; who has no state yet can from any."""
    return min((position.step for position in positions.values() if not position.joins), default=before.committed)


def _without_state(members: Sequence[int], positions: Mapping[int, TermLeft]) -> tuple[int, ...]:
    """The members that have not yet got what the others have in memory."""
    return tuple(trainer for trainer in members if trainer in positions and positions[trainer].joins)


def _copied(
    hosts: Sequence[int],
    complete: Sequence[Collection[int]],
    stay: Sequence[int],
    kept: Mapping[int, int],
    copies: int,
    machines: Mapping[int, str],
) -> list[tuple[int, ...]]:
    """Who holds copies of each lane: those that stay, and until they are complete there, whom `_only_copies` names."""
    return [
        (*holders, kept[lane]) if lane in kept and kept[lane] not in holders else holders
        for lane, holders in enumerate(next_copies(hosts, complete, stay, copies, machines))
    ]


def _only_copies(
    hosts: Sequence[int], complete: Sequence[Collection[int]], stay: Collection[int], leaving: Collection[int]
) -> dict[int, int]:
    """Lanes of which only a trainer that is to leave has a complete copy, and that trainer: it stays until another one has."""
    kept = {}
    for lane, holders in enumerate(complete):
        others = [holder for holder in holders if holder != hosts[lane]]
        if others and not any(holder in stay for holder in others):
            kept[lane] = next(holder for holder in others if holder in leaving)
    return kept


def _with_targets(copies: Sequence[Sequence[int]], hosts: Sequence[int], targets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Further copies, where lanes are to go to a trainer that would have none."""
    return tuple(
        tuple(holders) if targets[lane] in (hosts[lane], *holders) else (*holders, targets[lane])
        for lane, holders in enumerate(copies)
    )
