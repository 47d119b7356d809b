"""Places on a Ray cluster, and the trainers and store servers in them.

An actor is placed where its resources are reserved. One whose node is lost before it runs is placed
elsewhere.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from foreload.base.errors import SettingError
from foreload.trainer.cluster.engines.ray_actors import Placed
from foreload.trainer.cluster.messages.host_messages import HOST_GONE
from foreload.trainer.cluster.processes.joining_host import report

WAIT_REPORT_INTERVAL = timedelta(seconds=15)  # between two lines that a place is waited for
PLACE_INTERVAL = timedelta(seconds=1)  # between two attempts to place an actor
CONCURRENT_METHODS = 8  # of an actor, that may run at once
POLL_INTERVAL = timedelta(milliseconds=50)
# How long a trainer may take to end when it is stopped. If its node is lost, it never reports that.
_END_PATIENCE = timedelta(seconds=0.5)


def _is_done(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Reserved cores and memory for one actor.

    Attributes:
        group: The placement group. None for a place that is not reserved.
        index: In the group.
    """

    group: Any
    index: int

    def options(self) -> dict[str, Any]:
        """Return what places an actor there."""
        if self.group is None:
            return {"scheduling_strategy": "SPREAD"}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.index)}


class Places:
    """The bundles of a placement group, and places beyond them, for actors of one kind.

    Args:
        avoid: Returns the nodes that are about to be taken away.
    """

    def __init__(self, group: Any, count: int, avoid: Callable[[], Collection[str]]) -> None:
        self.group, self._free, self._avoid = group, list(range(count)), avoid
        self._taking = threading.Lock()  # servers are added by a thread of their own

    def take(self) -> _Bundle:
        """Return a free bundle, or, if none is left, a place that is not reserved."""
        with self._taking:
            free = [*self._free]
            if free and (avoided := self._avoid()):
                nodes = placement_group_table(self.group)["bundles_to_node_id"]
                free = [index for index in free if nodes[index] not in avoided]
            if not free:
                return _Bundle(None, 0)
            self._free.remove(free[0])
            return _Bundle(self.group, free[0])

    def give_back(self, bundle: _Bundle) -> None:
        """Note that a bundle is free again. Ray moves a bundle whose node is lost to another one."""
        if bundle.group is not None:
            with self._taking:
                self._free.append(bundle.index)


class PlacedActor:
    """An actor that is being placed, or runs. It is started again until it has a place.

    Attributes:
        what: What it is, as messages call it.
        name: Its name on the cluster.
        placed: Where it is. None while it waits for a place.
        handle: Ray's handle.
    """

    def __init__(self, what: str, kind: type, options: Mapping[str, Any], places: Places, namespace: str, name: str) -> None:
        self.what, self._kind, self._options, self._places = what, kind, dict(options), places
        self._namespace, self._base = namespace, name
        self._attempt, self._since, self._said = 0, time.monotonic(), False
        self.placed: Placed | None = None
        self.failed: str | None = None
        self._try()

    def _try(self) -> None:
        self._tried = time.monotonic()
        self._bundle = self._places.take()
        self.name = f"{self._base}-{self._attempt}"
        self._attempt += 1
        options = (
            self._options | self._bundle.options() | {"name": self.name, "namespace": self._namespace, "lifetime": "detached"}
        )
        actor: Any = ray.remote(self._kind)
        self.handle = actor.options(max_concurrency=CONCURRENT_METHODS, **options).remote()
        self._placing = self.handle.place.remote()

    def look(self) -> bool:
        """Return whether the actor has a place. Starts it again if its node was lost before."""
        if self.placed is not None:
            return True
        if _is_done(self._placing):
            try:
                self.placed = ray.get(self._placing)
                return True
            except ray.exceptions.RayError as error:
                # An actor whose node was lost may be placed elsewhere. All else would fail again.
                if not isinstance(error, ray.exceptions.RayActorError) or getattr(error, "actor_init_failed", False):
                    self.failed = f"cannot be started: {str(error).strip().splitlines()[-1]}"
                    return False
            if time.monotonic() - self._tried >= PLACE_INTERVAL.total_seconds():
                self.end()
                self._try()
        elif not self._said and time.monotonic() - self._since >= WAIT_REPORT_INTERVAL.total_seconds():
            self._said = True
            report(f"{self.what}: waits until the cluster has room for it, {wanted(self._options)}")
        return False

    def end(self) -> None:
        """End the actor's process, and free its place."""
        with contextlib.suppress(Exception):
            ray.kill(self.handle)
        self._places.give_back(self._bundle)


def wanted(options: Mapping[str, Any]) -> str:
    """Return the cores and memory that an actor takes, in words."""
    cores, memory = options.get("num_cpus", 0), options.get("memory", 0)
    return f"{cores:g} core{'s' * (cores != 1)}" + (f" and {memory / 2**20:,.0f} MiB" if memory else "")


def bundle(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources to reserve for an actor, by Ray's names."""
    return {"CPU": options["num_cpus"]} | ({"memory": options["memory"]} if options.get("memory") else {})


def check_fits(flag: str, options: Mapping[str, Any]) -> None:
    """Raise SettingError if no node of the cluster is large enough for an actor."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(kind, 0) >= amount for kind, amount in bundle(options).items()) for node in nodes):
        raise SettingError(f"{flag}: no node of the Ray cluster has {wanted(options)}, which each takes; add larger nodes")


class RayTrainer:
    """A trainer on the cluster: a StartedProcess from the launcher's side."""

    is_here = False

    def __init__(self, actor: PlacedActor, begin: Callable[[PlacedActor], Any]) -> None:
        self._actor, self._begin = actor, begin
        self._running: Any = None
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """Id of the actor's process on its node; 0 while it has no place."""
        return 0 if self._actor.placed is None else self._actor.placed.pid

    @property
    def is_over(self) -> bool:
        """Whether the trainer is known to have ended, so that its place is free."""
        return self._status is not None

    def poll(self) -> int | None:
        """Return the trainer's exit status, HOST_GONE if its node or actor is gone, or None."""
        if self._status is None:
            if self._running is None:
                if self._actor.look():
                    self._running = self._begin(self._actor)
                elif self._actor.failed is not None:
                    report(f"{self._actor.what}: {self._actor.failed}")
                    self._over(1)
            elif _is_done(self._running):
                try:
                    self._over(ray.get(self._running))
                except ray.exceptions.RayError:
                    self._over(HOST_GONE)
        return self._status

    def _over(self, status: int) -> None:
        self._status = status
        self._actor.end()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the trainer has ended or its node is gone.

        Args:
            timeout: If None, a moment.
        """
        deadline = time.monotonic() + (timeout or _END_PATIENCE).total_seconds()
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL.total_seconds())

    def kill(self) -> None:
        """Kill the trainer. Its actor ends once it has reported that."""
        if self._status is not None:
            return
        if self._running is None:
            self._over(-signal.SIGKILL)
        else:
            self._actor.handle.stop.remote()


class RayServer:
    """A store server on the cluster.

    Attributes:
        url: Its URL, without password. None while it is being started.
        failed: Why it cannot be started, or None.
    """

    def __init__(
        self,
        actor: PlacedActor | None = None,
        name: str = "",
        url: str | None = None,
        handle: Any = None,
        node: str | None = None,
    ) -> None:
        """Take on a server that is being started by `actor`, or that runs already.

        Args:
            name, url, handle, node: Of a server that runs.
        """
        self._actor, self._name, self._handle, self.url, self._node = actor, name, handle, url, node
        self._starting: Any = None
        self._waiting: Any = None if handle is None else handle.wait.remote()
        self.failed: str | None = None

    @property
    def what(self) -> str:
        """What it is, as messages call it."""
        return f"store server {self.url}" if self._actor is None else self._actor.what

    @property
    def name(self) -> str:
        """The name of its actor."""
        return self._name if self._actor is None else self._actor.name

    @property
    def node(self) -> str | None:
        """The node that it is on. None while it has no place."""
        if self._actor is None:
            return self._node
        return None if self._actor.placed is None else self._actor.placed.node

    def is_up(self, run: Path) -> bool:
        """Return whether the server runs. Goes on with starting it."""
        if self.url is not None:
            return True
        assert self._actor is not None
        if self._starting is None:
            if self._actor.look():
                self._starting = self._actor.handle.start.remote(str(run))
            self.failed = self._actor.failed
            return False
        if not _is_done(self._starting):
            return False
        try:
            self.url = ray.get(self._starting)
        except ray.exceptions.RayTaskError as error:
            self.failed = str(error.cause)
            return False
        except ray.exceptions.RayError as error:
            self.failed = str(error).strip().splitlines()[0]
            return False
        self._handle = self._actor.handle
        self._waiting = self._handle.wait.remote()
        return True

    def ended(self) -> str | None:
        """Return how the server ended, or None while it runs."""
        if not _is_done(self._waiting):
            return None
        try:
            return str(ray.get(self._waiting))
        except ray.exceptions.RayError:
            return "its node can no longer be reached"

    def end(self) -> None:
        """End the server."""
        if self._actor is not None:
            self._actor.end()
        else:
            with contextlib.suppress(Exception):
                ray.kill(self._handle)
