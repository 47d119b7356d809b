"""Who hosts which lane, and who holds its copies, once trainers are gone."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
    hosts: Sequence[int], complete: Sequence[Collection[int]], there: Sequence[int], copies: int
) -> tuple[tuple[int, ...], ...]:
    """Of each lane the trainers that hold copies next, so that `copies` have it with its host, or all where there are fewer.

    A complete copy stays where it is; further ones go to those that hold the fewest.
    """
    chosen = [[t for t in there if t in complete[lane] and t != host][: copies - 1] for lane, host in enumerate(hosts)]
    for lane, host in enumerate(hosts):
        while len(chosen[lane]) < min(copies, len(there)) - 1:
            others = [trainer for trainer in there if trainer != host and trainer not in chosen[lane]]
            chosen[lane].append(min(others, key=lambda trainer: (sum(trainer in holders for holders in chosen), trainer)))
    return tuple(map(tuple, chosen))
