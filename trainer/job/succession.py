"""Which trainer hosts each lane, and which hold its replicas, after trainers die, join or leave.

This module is pure: no clock, no messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

ONE_MACHINE: Mapping[int, str] = MappingProxyType({})
"""The machines of trainers that are all on the same one."""


def next_hosts(hosts: Sequence[int], complete: Sequence[Collection[int]], there: Sequence[int]) -> tuple[int | None, ...]:
    """Return, for each lane, the trainer that hosts it next.

    A lane stays with its trainer if that is left. Otherwise, of the trainers that hold a complete
    replica, the one with the fewest lanes takes it over.

    Args:
        hosts: lane -> its trainer so far.
        complete: lane -> the trainers with complete replicas.
        there: the trainers that are left.

    Returns:
        lane -> its trainer, or None if no complete replica is left.
    """
    lanes = {trainer: sum(host == trainer for host in hosts) for trainer in there}
    chosen: list[int | None] = []
    for lane, host in enumerate(hosts):
        if host not in lanes:
            holders = [trainer for trainer in there if trainer in complete[lane]]
            if not holders:
                chosen.append(None)
                continue
            host = min(holders, key=lambda trainer: (lanes[trainer], trainer))
            lanes[host] += 1
        chosen.append(host)
    return tuple(chosen)


def next_copies(
    hosts: Sequence[int],
    complete: Sequence[Collection[int]],
    there: Sequence[int],
    copies: int,
    machines: Mapping[int, str] = ONE_MACHINE,
) -> tuple[tuple[int, ...], ...]:
    """Return, for each lane, the trainers that hold its replicas next.

    Complete replicas stay where they are. The replicas to keep, if there are too many, and the
    trainers for further ones are chosen by the same rule: first trainers on another machine than
    the host, and among these the ones with the fewest replicas.

    Args:
        hosts: lane -> its trainer.
        complete: lane -> the trainers with complete replicas.
        there: the trainers that may hold replicas.
        copies: how many trainers are to hold each lane, its host included. With fewer trainers, all
            hold it.
        machines: trainer -> its machine.

    Returns:
        lane -> the trainers, without its host.
    """
    chosen: list[list[int]] = [[] for _ in hosts]

    def choose(lane: int, allowed: Collection[int]) -> None:
        while len(chosen[lane]) < copies - 1:
            free = [trainer for trainer in there if trainer in allowed and trainer not in (hosts[lane], *chosen[lane])]
            if not free:
                return
            near = machines.get(hosts[lane])
            chosen[lane].append(
                min(free, key=lambda one: (machines.get(one) == near, sum(one in holders for holders in chosen), one))
            )

    for lane in range(len(hosts)):
        # Complete replicas are chosen first, for all lanes, so that new ones go where the fewest
        # are.
        choose(lane, complete[lane])
    for lane in range(len(hosts)):
        choose(lane, there)
    return tuple(map(tuple, chosen))


def balanced_hosts(hosts: Sequence[int], held: Sequence[Collection[int]], stay: Sequence[int]) -> tuple[int, ...]:
    """Return, for each lane, the trainer that is to host it so that the load is balanced.

    The trainers that stay have equally many lanes, or one more, after as few moves as possible.

    Args:
        hosts: lane -> its trainer so far.
        held: lane -> the trainers that have replicas of it; these are preferred as its new host.
        stay: the trainers that stay: at least one, at most as many as there are lanes.
    """
    counts = {trainer: sum(host == trainer for host in hosts) for trainer in stay}
    least, more = divmod(len(hosts), len(stay))
    # The trainers with the most lanes keep one more, so that fewer lanes move.
    by_count = sorted(stay, key=lambda trainer: -counts[trainer])
    wanted = {trainer: least + (place < more) for place, trainer in enumerate(by_count)}
    targets = list(hosts)
    while receivers := [trainer for trainer in stay if counts[trainer] < wanted[trainer]]:
        free = [lane for lane, host in enumerate(targets) if host not in counts or counts[host] > wanted[host]]
        # The last lanes move first: the trainer with lane 0 leads, and should stay the leader.
        lane, receiver = min(
            ((lane, trainer) for lane in free for trainer in receivers),
            key=lambda move: (move[1] not in held[move[0]], -move[0], counts[move[1]], stay.index(move[1])),
        )
        if targets[lane] in counts:
            counts[targets[lane]] -= 1
        counts[receiver] += 1
        targets[lane] = receiver
    return tuple(targets)
