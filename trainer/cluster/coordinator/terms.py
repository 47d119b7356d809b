"""Compute the hosts and replicas of all lanes in a job's first term, and in each term after it.

The functions are pure: they read no clock and exchange no messages.

A term ends for one of two reasons. If a member was lost, its lanes go to trainers that have
complete replicas, and nothing else moves. If the end was planned, all members are at the same step;
then trainers join, lanes go to their targets, and leaving trainers without lanes leave.
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
    """A planned change of the members and of the lanes' hosts.

    Attributes:
        joining: The trainers that can join.
        leaving: The members that are to leave once they host no lane.
        targets: For each lane the trainer that is to host it, planned for the current members. If
            None, no such plan exists.
    """

    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    targets: tuple[int, ...] | None = None


NO_CHANGE = Change()


def first_term(
    number: int, members: Sequence[int], lanes: int, copies: int, step: int, machines: Mapping[int, str] = ONE_MACHINE
) -> Term:
    """Return the term with which a call of `foreload train` begins.

    Args:
        members: The trainers' numbers, in the order of their ranks.
        lanes: The number of lanes.
        copies: The number of trainers that have each lane, its owner included.
        step: The last step trained.
        machines: trainer -> its machine. A replica goes to another machine than its lane's host
            if possible.
    """
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
    """Return the term that follows one in which members were lost.

    The lanes of the lost members go to trainers that have complete replicas; all other lanes stay
    with their hosts. The new term begins after the lowest step in `positions`; members that are
    beyond it undo what they did since.

    Args:
        positions: The positions of the members that are left, by trainer number.
        copies: The number of trainers that have each lane, its owner included.
        dead: Whether all lost members are known to be dead.
        leaving: The members that are to leave. Other trainers get replicas of the lanes they hold,
            so that they can leave later.

    Raises:
        LanesLost: Neither the owner nor a complete replica of some lane is left.
    """
    members, complete, hosts = _left_of(before, positions)
    # If a member cannot go on, the new term trains no step and only keeps what the store lacks.
    keeps = next((position.why for position in positions.values() if position.keeps), None)
    # Planned moves stay planned: a lane whose target is still a member keeps that target, and the
    # replica that it needs there is still made.
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
    """Return the term that follows one which all members have left at the same step, as planned.

    A lane goes to its target if the target has a complete replica. If not, the target gets a
    replica in the new term, so that the lane can move in a later one. The targets are planned anew
    if a trainer joins, is to leave, or is the target of no lane. A leaving trainer leaves as soon
    as it hosts no lane and other trainers have every replica that it alone had.

    Args:
        positions: The positions of the members, by trainer number.
        copies: The number of trainers that have each lane, its owner included.

    Raises:
        LanesLost: Neither the owner nor a complete replica of some lane is left.
    """
    members, complete, before_hosts = _left_of(before, positions)
    there = (*members, *change.joining)
    stay = [trainer for trainer in there if trainer not in change.leaving]
    # A trainer that has a replica of a lane, or is getting one, is preferred as its target.
    held = [{*complete[lane], *before.copies[lane]} for lane in range(len(before_hosts))]
    targets = before.targets if change.targets is None else change.targets
    if set(targets) != set(stay):
        targets = balanced_hosts(before_hosts, held, stay)
    hosts = tuple(
        target if target in complete[lane] else host
        for lane, (host, target) in enumerate(zip(before_hosts, targets, strict=True))
    )
    # The former host of a lane that moves keeps its rows, so it has a complete replica.
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
    """Return whether a term should end so that members or lanes can change.

    Args:
        complete: lane -> the trainers that have a complete replica by now.
    """
    stay = {trainer for trainer in term.members if trainer not in change.leaving}
    if change.joining or set(term.targets) != stay:
        return True
    if change.targets is not None and change.targets != term.targets:
        return True
    # Lanes move together, once the targets of all of them have complete replicas.
    moves = [lane for lane, host in enumerate(term.hosts) if term.targets[lane] != host]
    if moves:
        return all(term.targets[lane] in complete[lane] for lane in moves)
    # All lanes are with their targets. A leaving trainer can leave, unless it has the only complete
    # replica of some lane.
    leaving = [trainer for trainer in term.members if trainer in change.leaving]
    return bool(leaving) and not (
        set(_only_copies(term.hosts, complete, stay, leaving).values()) if len(stay) > 1 and any(term.copies) else ()
    )


def _left_of(
    before: Term, positions: Mapping[int, TermLeft]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return what is left of a term that is over.

    Returns:
        The members that are left, for each lane those of them with a complete replica, and for each
        lane its next host among them.

    Raises:
        LanesLost: Neither the owner nor a complete replica of some lane is left.
    """
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
    """Return the step from which all members can go on. A member without state can from any."""
    return min((position.step for position in positions.values() if not position.joins), default=before.committed)


def _without_state(members: Sequence[int], positions: Mapping[int, TermLeft]) -> tuple[int, ...]:
    """Return the members that have not received the others' in-memory state yet."""
    return tuple(trainer for trainer in members if trainer in positions and positions[trainer].joins)


def _copied(
    hosts: Sequence[int],
    complete: Sequence[Collection[int]],
    stay: Sequence[int],
    kept: Mapping[int, int],
    copies: int,
    machines: Mapping[int, str],
) -> list[tuple[int, ...]]:
    """Return the holders of replicas of each lane: staying trainers, and those in `kept`."""
    return [
        (*holders, kept[lane]) if lane in kept and kept[lane] not in holders else holders
        for lane, holders in enumerate(next_copies(hosts, complete, stay, copies, machines))
    ]


def _only_copies(
    hosts: Sequence[int], complete: Sequence[Collection[int]], stay: Collection[int], leaving: Collection[int]
) -> dict[int, int]:
    """Map each lane whose complete replicas are all on leaving trainers to one of these.

    That trainer stays until another one has a complete replica.
    """
    kept = {}
    for lane, holders in enumerate(complete):
        others = [holder for holder in holders if holder != hosts[lane]]
        if others and not any(holder in stay for holder in others):
            kept[lane] = next(holder for holder in others if holder in leaving)
    return kept


def _with_targets(copies: Sequence[Sequence[int]], hosts: Sequence[int], targets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Add a replica of each lane on its target, if the target would have none."""
    return tuple(
        tuple(holders) if targets[lane] in (hosts[lane], *holders) else (*holders, targets[lane])
        for lane, holders in enumerate(copies)
    )
