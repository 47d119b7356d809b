"""A Ray cluster of several nodes on this machine, which can be lost one by one."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.cluster_utils import Cluster

from foreload.trainer.run.engine_record import EngineRecord

CORES = 4  # of a node, as Ray counts them
_ANSWERS = 5.0  # seconds in which an actor that has a place answers
_STARTS = 300.0  # seconds in which its process has started, on a busy machine
_STORE_BYTES = 80 << 20  # of Ray's object store, which nothing here uses
_QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""By default Ray takes half a minute to notice that a node is lost."""


class RayNodes:
    """The cluster. The first node has its head, and the drivers."""

    def __init__(self, count: int) -> None:
        self._cluster = Cluster()
        self._further: dict[str, Any] = {"_system_config": _QUICK}  # for the head
        self._nodes: list[Any] = []
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        """The cluster's address."""
        return str(self._cluster.address)

    @property
    def flags(self) -> list[str]:
        """Flags of `foreload train`."""
        return ["--engine", "ray", "--ray-address", self.address]

    def add(self) -> None:
        """Add a node."""
        further, self._further = self._further, {}
        self._nodes.append(
            self._cluster.add_node(num_cpus=CORES, object_store_memory=_STORE_BYTES, include_dashboard=False, **further)
        )

    def lose(self, *ids: str) -> None:
        """Kill all processes of nodes at once."""
        for node in [node for node in self._nodes if node.node_id in ids]:
            assert node is not self._nodes[0], "the driver's node"
            self._nodes.remove(node)
            self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: str) -> None:
        """Ask that a node be drained, as a cloud does that takes a machine back."""
        how = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "taken back"]
        subprocess.run(
            [Path(sys.executable).with_name("ray"), "drain-node", "--address", self.address, "--node-id", node, *how], check=True
        )

    def restore(self, count: int) -> None:
        """Add nodes until there are so many."""
        while len(self._nodes) < count:
            self.add()

    @property
    def head(self) -> str:
        """The id of the first node."""
        return str(self._nodes[0].node_id)

    def connect(self) -> None:
        """Let this process ask the cluster."""
        ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)

    def close(self) -> None:
        """End everything."""
        if ray.is_initialized():
            ray.shutdown()
        self._cluster.shutdown()


@contextlib.contextmanager
def connected_nodes(count: int) -> Iterator[RayNodes]:
    """A cluster of so many nodes, which this process can ask, while entered."""
    started = RayNodes(count)
    started.connect()
    try:
        yield started
    finally:
        started.close()


def actors_by_name(run: Path) -> dict[str, Any]:
    """The handles of a run's actors."""
    record = EngineRecord.read(run)
    assert record is not None
    named = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == record.namespace]
    handles = {}
    for name in named:
        # It may have ended since.
        with contextlib.suppress(ValueError):
            handles[name] = ray.get_actor(name, namespace=record.namespace)
    return handles


def used_actors(run: Path, members: Iterable[int]) -> dict[str, Any]:
    """The actors that a run uses: the trainers that are its members, and the servers of its shards, some of which may have been spare ones."""
    record = EngineRecord.read(run)
    assert record is not None
    trainers = tuple(f"trainer-{trainer}-" for trainer in members)
    return {
        name: actor for name, actor in actors_by_name(run).items() if name in record.servers.values() or name.startswith(trainers)
    }


def actors(run: Path) -> dict[str, Any]:
    """The handles of a run's actors by the beginning of their names: "trainer-0", "server-2", "keeper".

    A server that was a spare one is still "server-spare", whichever shard it has.
    """
    return {"-".join(name.split("-")[:2]): actor for name, actor in actors_by_name(run).items()}


def nodes_of(actors: Mapping[str, Any]) -> dict[str, str]:
    """The node of each of these actors that lives."""
    nodes = {}
    for name, actor in actors.items():
        if name != "keeper":
            # One that has no place yet does not answer.
            with contextlib.suppress(ray.exceptions.RayError):
                nodes[name] = ray.get(actor.place.remote(), timeout=_ANSWERS).node
    return nodes


def pid_of(run: Path, name: str) -> int:
    """The id of the process that an actor runs: a trainer or a server. An actor that has a place starts it a moment later.

    name: all of it, or its beginning as in `actors`.
    """
    deadline = time.monotonic() + _STARTS
    while (pid := ray.get((actors(run) | actors_by_name(run))[name].pid.remote())) is None:
        assert time.monotonic() < deadline, name
        time.sleep(0.05)
    return int(pid)
