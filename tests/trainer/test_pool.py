"""Jobs with --auto that share a Ray cluster: what the pool's actor knows of them, and whole jobs that come, give back, end and die."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from command_line import Command, free_port, refused_apart
from held import Hold
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from small_job import arguments, summary, synthetic_schedule, train_undisturbed
from test_auto import sleeping
from waiting import wait_until

from foreload.trainer.adjusting.shares import Bid, Choice, Resources, Share
from foreload.trainer.cluster.engines.ray_actors import KEEPER, Keeper
from foreload.trainer.cluster.engines.ray_pool import PoolMember, pool_actor, state
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import read_events
from ray_nodes import RayNodes, connected_nodes

NODES, CORES = 2, 8  # in all


@pytest.fixture
def cluster() -> Iterator[RayNodes]:
    with connected_nodes(NODES) as started:
        yield started


class Driver:
    """A process that has a run's lease, as the driver of a training has, and what it asks the pool."""

    def __init__(self, name: str, weight: float = 1) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.name, self._weight = name, weight
        here, kind = ray.get_runtime_context().get_node_id(), cast(Any, ray.remote(Keeper))
        named = kind.options(
            name=KEEPER,
            namespace=f"foreload-{name}",
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        self.keeper = named.remote(name, f"foreload-{name}")
        assert ray.get(self.keeper.take.remote("call", here, self.process.pid, None)) == "taken"

    def granted(self, uses: int = 0) -> float | None:
        """What it may use, as the pool answers."""
        choices = tuple(Choice(Resources(cores), 100 / (cores - 1)) for cores in range(2, 9))
        bid = Bid(self._weight, Resources(2), Resources(uses), choices)
        share: Share = ray.get(pool_actor().bid.remote(PoolMember(self.name, f"foreload-{self.name}", "call"), bid))
        return None if share.granted is None else share.granted.cores

    def end(self, how: str) -> None:
        """It ends as it should, or its process is killed, or its keeper."""
        if how == "released":
            ray.get(self.keeper.release.remote("call"))
        elif how == "killed":
            self.process.kill()
        else:
            ray.kill(self.keeper)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def driver(cluster: RayNodes) -> Iterator[Callable[..., Driver]]:
    """Starts drivers."""
    started: list[Driver] = []

    def start(name: str, weight: float = 1) -> Driver:
        started.append(Driver(name, weight))
        return started[-1]

    yield start
    for one in started:
        one.close()


def runs() -> list[str]:
    """The jobs that the pool knows."""
    there = state()
    assert there is not None
    return [one.run for one in there.jobs]


def test_what_jobs_leave_goes_to_the_others(driver: Callable[..., Driver]) -> None:
    first, second = driver("first", weight=2), driver("second")
    assert state() is None
    assert first.granted() == CORES
    assert first.granted(CORES) == CORES
    assert second.granted() is None
    assert [first.granted(CORES), first.granted(5), second.granted()] == [5, 5, 3]
    for number, how in enumerate(("released", "killed", "keeper")):
        further = driver(f"further-{number}")
        further.granted()
        assert runs() == ["first", "second", f"further-{number}"]
        assert [first.granted(5), second.granted(3), further.granted()] == [4, 2, None]
        assert [first.granted(4), second.granted(2), further.granted()] == [4, 2, 2]
        further.end(how)
        wait_until(lambda: len(runs()) == 2)
        assert [first.granted(4), second.granted(2)] == [5, 3]
        assert [first.granted(5), second.granted(3)] == [5, 3]
    # The actor is lost, and knows again what it is told.
    ray.kill(pool_actor())
    wait_until(lambda: state() is None)
    first.granted(5)
    assert [second.granted(3), first.granted(5)] == [3, 5]
    assert runs() == ["first", "second"]


def test_cores_that_others_use_are_theirs(driver: Callable[..., Driver]) -> None:
    class Other:
        def place(self) -> None:
            pass

    first = driver("first")
    kind: Any = ray.remote(Other)
    others = kind.options(num_cpus=3).remote()
    ray.get(others.place.remote())
    # Ray counts them a moment later.
    wait_until(lambda: ray.available_resources()["CPU"] == CORES - 3)
    assert first.granted() == CORES - 3
    ray.kill(others)
    wait_until(lambda: first.granted() == CORES)


@pytest.mark.full
def test_whole_jobs_share_a_cluster(cluster: RayNodes, tmp_path: Path, hold: Hold) -> None:
    """The first gives back for the second, and takes over its part once the second is killed."""
    schedule = synthetic_schedule(tmp_path, 200_000, lanes=8)
    undisturbed = summary(train_undisturbed(schedule, tmp_path))["digest"]
    model = sleeping(tmp_path, 0.001)

    def job(run: str, *further: str) -> list[str]:
        return [*arguments(schedule, tmp_path / run, *cluster.flags, "--auto", "--history", "off", "--digest", *further), *model]

    first = hold(job("first", "--pool", "weight=2"), anew=True)
    first.train_until(lambda status: len(status.members) >= 3)
    second = Command(*job("second"), anew=True)
    first.train_until(lambda status: any("the pool leaves" in change["cause"] for change in changes(tmp_path / "first")))
    second.until(lambda: Run.open(tmp_path / "second").status is not None)
    listed = Command("pool", "status", "--ray-address", cluster.address, "--json", tmp_path / "pool.json", anew=True)
    status, out, err = listed.end()
    assert status == 0, err
    assert f"the cluster has {CORES} cores" in out
    told = [
        (Path(one["run"]).name, one["bid"]["weight"]) for one in json.loads((tmp_path / "pool.json").read_text())["state"]["jobs"]
    ]
    assert told == [("first", 2), ("second", 1)]
    before = len(changes(tmp_path / "first"))
    second.process.kill()
    first.train_until(lambda status: any(change["gain_seconds"] for change in changes(tmp_path / "first")[before:]))
    (tmp_path / "slow").unlink()
    status, _, err = first.end()
    assert status == 0, err
    assert summary(tmp_path / "first")["digest"] == undisturbed
    for run in ("first", "second"):
        status, _, err = Command("delete", tmp_path / run, anew=True).end()
        assert status == 0, err


def changes(run: Path) -> list[dict[str, Any]]:
    """The changes of a run."""
    return [event for event in read_events(run) if event["kind"] == "adjusted"]


def test_a_cluster_that_nobody_shares(cluster: RayNodes) -> None:
    status, out, err = Command("pool", "status", "--ray-address", cluster.address, anew=True).end()
    assert (status, out) == (0, "no job shares the cluster; those of `foreload train --engine ray --auto` do\n"), err


def test_a_cluster_that_is_not_there() -> None:
    assert "--ray-address: no Ray cluster is reached at" in refused_apart(
        "pool", "status", "--ray-address", f"127.0.0.1:{free_port()}"
    )
