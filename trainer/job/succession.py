"""Who hosts which lane, and who holds its copies, once trainers are gone, come or leave. Pure: no clock, no messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

ONE_MACHINE: Mapping[int, str] = MappingProxyType({})
"""The machines of trainers that are all on the same."""


def next_hosts(hosts: Sequence[int], complete: Sequence[Collection[int]], there: Sequence[int]) -> tuple[int | None, ...]:
    """Of each lane the trainer that hosts it next: who did, or of those that hold a complete copy the one with the fewest lanes; None without any.

    hosts: lane -> its trainer so far; complete: lane -> the trainers with complete copies; there: the trainers that are left.
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
    """Of each lane the trainers that hold copies next, so that `copies` have it with its host, or all where there are fewer.

    Complete copies stay where they are; of too many, and for further ones, those trainers are taken that are on another machine than the host, and
    of these those that hold the fewest. there: the trainers that may hold copies. machines: which machine each trainer is on.
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
        choose(lane, complete[lane])
    for lane in range(len(hosts)):
        choose(lane, there)
    return tuple(map(tuple, chosen))


def balanced_hosts(hosts: Sequence[int], held: Sequence[Collection[int]], stay: Sequence[int]) -> tuple[int, ...]:
    """Of each lane the trainer that is to host it, so that those that stay have equally many, or one more, by as few moves as there can be.

    hosts: lane -> its trainer so far; held: lane -> the trainers that have copies of it, to which it goes rather than to others; stay: at least one,
    at most as many as lanes.
    """
    counts = {trainer: sum(host == trainer for host in hosts) for trainer in stay}
    least, more = divmod(len(hosts), len(stay))
    # Those that have most keep one more.
    by_count = sorted(stay, key=lambda trainer: -counts[trainer])
    wanted = {trainer: least + (place < more) for place, trainer in enumerate(by_count)}
    targets = list(hosts)
    while receivers := [trainer for trainer in stay if counts[trainer] < wanted[trainer]]:
        free = [lane for lane, host in enumerate(targets) if host not in counts or counts[host] > wanted[host]]
        # The last lanes go first: who has lane 0 leads, and had better stay.
        lane, receiver = min(
            ((lane, trainer) for lane in free for trainer in receivers),
            key=lambda move: (move[1] not in held[move[0]], -move[0], counts[move[1]], stay.index(move[1])),
        )
        if targets[lane] in counts:
            counts[targets[lane]] -= 1
        counts[receiver] += 1
        targets[lane] = receiver
    return tuple(targets)
