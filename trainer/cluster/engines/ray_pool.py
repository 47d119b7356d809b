"""The pool of a Ray cluster: what the jobs with --auto share, and how a job takes part.

One actor, which is detached and takes no cores, divides the cluster (`adjusting.shares`). It keeps
only what the jobs report again and again: if the actor is lost, the next job starts another one.
Each version of foreload has a pool of its own, and treats jobs of other versions like other programs.
A job ends for the pool when its keeper reports that, or when its keeper is lost.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray

from foreload.trainer.adjusting.shares import Bid, PooledJob, PoolState, Resources, Share, Shares
from foreload.trainer.cluster.engines.ray_actors import KEEPER
from foreload.trainer.cluster.engines.ray_places import POLL_INTERVAL, WAIT_REPORT_INTERVAL
from foreload.trainer.cluster.messages.host_messages import program_version
from foreload.trainer.cluster.processes.joining_host import report

NAMESPACE = "foreload"
"""Ray's namespace of all drivers, and of the pool; a run's actors have one of their own."""
_INTERVAL = timedelta(seconds=2)  # between two bids of a job
# Actors take their resources a moment before or after a job says so. What others are seen to use
# counts only if it lasts so long.
_LASTS = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A job that takes part, as the pool knows it.

    Attributes:
        run: the run's folder.
        namespace: of the run's actors.
        call: the call that has the run's lease.
    """

    run: str
    namespace: str
    call: str

    @property
    def name(self) -> str:
        """Its name among the jobs."""
        return f"{self.namespace} {self.call}"


def _resources(of: dict[str, float]) -> Resources:
    return Resources(of.get("CPU", 0.0), of.get("memory", 0.0))


class Pool:
    """The actor."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._members: dict[PoolMember, Any] = {}  # each with a call of its keeper, which returns when the job ends
        self._seen: deque[tuple[float, Resources]] = deque()  # what others used, and when

    def bid(self, member: PoolMember, bid: Bid) -> Share:
        """Note what a job asks for, and return its share."""
        self._forget_ended()
        if member not in self._members:
            keeper: Any = ray.get_actor(KEEPER, namespace=member.namespace)
            self._members[member] = keeper.await_end.remote(member.call)
        return self._shares.bid(member.name, bid, self._room())

    def state(self) -> PoolState:
        """Return all jobs and their shares."""
        self._forget_ended()
        room = self._room()
        runs = {member.name: member.run for member in self._members}
        jobs = tuple(PooledJob(runs[name], bid, share) for name, bid, share in self._shares.all(room))
        cluster = _resources(ray.cluster_resources())
        return PoolState(cluster, cluster.less(room), jobs)

    def _forget_ended(self) -> None:
        for member, ended in list(self._members.items()):
            if ray.wait([ended], timeout=0)[0]:
                del self._members[member]
                self._shares.leave(member.name)
                # Its servers may stay, and serve others from now on.
                self._seen.clear()

    def _room(self) -> Resources:
        """Return what the cluster has for all jobs."""
        cluster = _resources(ray.cluster_resources())
        used = cluster.less(_resources(ray.available_resources()))
        now = time.monotonic()
        self._seen.append((now, used.less(self._shares.used)))
        while now - self._seen[0][0] > _LASTS.total_seconds():
            self._seen.popleft()
        others = self._seen[0][1]
        for _, seen in self._seen:
            others = others.least(seen)
        return cluster.less(others)


def _name() -> str:
    return f"pool-{program_version()}"


def pool_actor() -> Any:
    """Return the pool of the connected cluster, which is started if there is none."""
    kind: Any = ray.remote(Pool)
    return kind.options(name=_name(), namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0).remote()


def state() -> PoolState | None:
    """Return the state of the connected cluster's pool. None if no job has shared it yet."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        pool: Any = ray.get_actor(_name(), namespace=NAMESPACE)
        answer: PoolState = ray.get(pool.state.remote())
        return answer
    return None


class PoolClient:
    """What a job asks the pool."""

    def __init__(self, member: PoolMember) -> None:
        self._member = member
        self._pool: Any = None
        self._asked: Any = None
        self._asked_at = 0.0
        self._share: Share | None = None
        self._failed = ""  # why the last bid had no answer

    def ask(self, bid: Bid) -> Share | None:
        """Ask for a share, from time to time, and return the last one heard of. It does not wait."""
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            try:
                self._share, self._failed = ray.get(self._asked), ""
            except ray.exceptions.RayError as error:
                self._pool, self._failed = None, f"; the pool fails: {str(error).strip().splitlines()[-1]}"
            self._asked = None
        if self._asked is None and time.monotonic() - self._asked_at >= _INTERVAL.total_seconds():
            self._asked_at = time.monotonic()
            self._pool = self._pool or pool_actor()
            self._asked = self._pool.bid.remote(self._member, bid)
        return self._share

    def await_share(self, bid: Bid) -> None:
        """Wait until the pool has what a job needs to begin."""
        said = time.monotonic()
        while (share := self.ask(bid)) is None or share.granted is None:
            if time.monotonic() - said >= WAIT_REPORT_INTERVAL.total_seconds():
                said = time.monotonic()
                report(
                    f"--auto: waiting until the jobs that share the cluster leave {bid.least.cores:g} cores{self._failed}; Ctrl-C ends the wait"
                )
            time.sleep(POLL_INTERVAL.total_seconds())
