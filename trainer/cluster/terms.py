"""Who hosts which lane, and who has copies of it, in the first term of a job and in the one after a loss. Pure: no clock, no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foreload.trainer.cluster.facts import Term, contiguous_lanes
from foreload.trainer.cluster.messages import TermLeft
from foreload.trainer.compute.succession import next_copies, next_hosts
from foreload.trainer.errors import LanesLost


def first_term(number: int, members: Sequence[int], lanes: int, copies: int, step: int) -> Term:
    """The term that a call of `foreload train` begins with. copies: how many trainers have each lane, its owner included; step: the last trained."""
    hosts = tuple(members[rank] for rank in contiguous_lanes(lanes, len(members)))
    none: tuple[tuple[int, ...], ...] = ((),) * lanes
    return Term(number, tuple(members), hosts, next_copies(hosts, none, members, copies), none, step)


def next_term(before: Term, standings: Mapping[int, TermLeft], copies: int, dead: bool = True) -> Term:
    """The term after one in which members were lost: their lanes go to trainers that have complete copies, all others stay where they are.

    standings: of the members that are there, by number. It goes on from the least step that any of them stands at: what others did beyond is undone.
    dead: whether those that are lost are known to be dead. Raises LanesLost for lanes that neither their owner nor a complete copy is left of.
    """
    members = tuple(trainer for trainer in before.members if trainer in standings)
    lanes = range(len(before.hosts))
    complete = tuple(tuple(trainer for trainer in members if lane in standings[trainer].copies) for lane in lanes)
    found = next_hosts(before.hosts, complete, members)
    hosts = tuple(host for host in found if host is not None)
    if len(hosts) < len(found):
        lost = [lane for lane, host in enumerate(found) if host is None]
        raise LanesLost(lost, [trainer for trainer in before.members if trainer not in standings])
    return Term(
        before.number + 1,
        members,
        hosts,
        next_copies(hosts, complete, members, copies),
        complete,
        min(standing.step for standing in standings.values()),
        any(standing.stopping for standing in standings.values()),
        dead,
    )
