"""What every engine does for the coordinator: this machine, others that join, a Ray cluster, and one in memory.

And what the coordinator does with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from command_line import Command, free_port
from engine_twin import TwinEngine
from small_call import small_call
from waiting import wait_until

from foreload.base.job_token import new_token, write_token
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.trainer.cluster.coordinator.spawned_trainers import SpawnedTrainers
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.engines.engine import Draining, Engine
from foreload.trainer.cluster.engines.local_engine import JoinedEngine, LocalEngine
from foreload.trainer.cluster.processes.rendezvous_host import RendezvousHost
from foreload.trainer.cluster.processes.starting import ChildProcess, OnHost, StartedProcess, TrainerStart
from foreload.trainer.job.job import TrainJob

MINUTE = timedelta(minutes=1)


class World(ABC):
    """An engine, and what happens to its processes. machines: whether these can be lost."""

    engine: Engine
    machines = True

    @abstractmethod
    def start_servers(self, count: int) -> list[str]:
        """Their URLs, with passwords."""

    @abstractmethod
    def kill_trainer(self, trainer: int) -> None:
        """Kill its process."""

    @abstractmethod
    def kill_server(self, url: str) -> None:
        """Kill its process."""

    @abstractmethod
    def lose(self, machine: str) -> None:
        """Lose a machine with all that is on it."""

    @abstractmethod
    def drain(self, machine: str) -> None:
        """Announce that a machine is about to be taken away."""

    def before_start(self, trainer: int) -> None:
        """Bring about what the engine needs before it can start a trainer."""

    def is_empty(self, url: str) -> bool:
        """Whether a server answers, and has nothing."""
        with Store([url]) as store:
            return store.command(0, "DBSIZE") == 0


class Here(World):
    """This machine, with the run's local servers."""

    machines = False

    def __init__(self, folder: Path) -> None:
        self.engine = self._local = LocalEngine(ChildProcess)
        self._folder = folder
        self._started: dict[int, StartedProcess] = {}

    def start_servers(self, count: int) -> list[str]:
        self._local.stores = LocalStores(count, self._folder / "stores").start()
        return list(self._local.stores.urls)

    def kill_trainer(self, trainer: int) -> None:
        (process,) = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.environ().get("FORELOAD_TRAINER") == str(trainer)
        ]
        process.kill()

    def kill_server(self, url: str) -> None:
        stores = self._local.stores
        assert stores is not None
        pid = stores.pids[stores.urls.index(url)]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def lose(self, machine: str) -> None:
        raise AssertionError(machine)

    def drain(self, machine: str) -> None:
        raise AssertionError(machine)

    def close(self) -> None:
        """End the servers."""
        if self._local.stores is not None:
            self._local.stores.discard()


class Joined(Here):
    """This machine, on which `foreload join` offers every trainer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._place, self._token = f"127.0.0.1:{free_port()}", new_token()
        write_token(folder / "token", self._token)
        settings = {
            "schedule": str(folder),
            "run": str(folder / "run"),
            "store": "redis://127.0.0.1:1",
            "coordinator": self._place,
        }
        job = TrainJob.of(settings | {"trainers": 1, "token_file": str(folder / "token")})
        self.engine = self._local = JoinedEngine(ChildProcess, job)
        self.engine.take()
        self._joins: list[Command] = []

    def before_start(self, trainer: int) -> None:
        self._joins.append(Command("join", self._place, "--token-file", self._folder / "token", anew=True))
        wait_until(lambda: self.engine.take_offers(lambda: trainer) == [trainer])

    def close(self) -> None:
        super().close()
        self.engine.close()
        for one in self._joins:
            one.clear()


class InMemory(World):
    """The twin."""

    def __init__(self) -> None:
        self.engine = self._twin = TwinEngine()

    def start_servers(self, count: int) -> list[str]:
        return list(self._twin.start_servers(count))

    def kill_trainer(self, trainer: int) -> None:
        self._twin.trainers[trainer].kill()

    def kill_server(self, url: str) -> None:
        self._twin.end_server(url)

    def lose(self, machine: str) -> None:
        self._twin.lose(machine)

    def drain(self, machine: str) -> None:
        self._twin.drain(machine)

    def is_empty(self, url: str) -> bool:
        return True


@contextlib.contextmanager
def on_ray(folder: Path) -> Iterator[World]:
    """A cluster of four nodes; the first one is this process's."""
    import ray

    from foreload.trainer.cluster.engines.ray_engine import RayEngine
    from ray_nodes import RayNodes, actors, pid_of

    class OnRay(World):
        def __init__(self) -> None:
            self._ray = RayEngine(TrainJob.of({"schedule": "-", "run": str(folder), "store": "engine:3", "engine": "ray"}))
            self.engine = self._ray

        def start_servers(self, count: int) -> list[str]:
            self._ray.take()
            urls = self._ray.start_servers(count)
            self._ray.reserve_trainers(1 << 20)
            return list(urls)

        def kill_trainer(self, trainer: int) -> None:
            os.kill(pid_of(folder, f"trainer-{trainer}"), signal.SIGKILL)

        def kill_server(self, url: str) -> None:
            named = [name for name, actor in actors(folder).items() if name.startswith("server")]
            (pid,) = [pid_of(folder, name) for name in named if str(url).rpartition(":")[2] in _ports(pid_of(folder, name))]
            os.kill(pid, signal.SIGKILL)

        def lose(self, machine: str) -> None:
            nodes.lose(machine)

        def drain(self, machine: str) -> None:
            nodes.drain(machine)

    def _ports(pid: int) -> set[str]:
        return {str(one.laddr.port) for one in psutil.Process(pid).net_connections() if one.status == "LISTEN"}

    nodes = RayNodes(4)
    try:
        nodes.connect()
        world = OnRay()
        yield world
        world._ray.close()
    finally:
        assert ray.is_initialized()
        nodes.close()


@pytest.fixture(params=["here", "joined", "in memory", pytest.param("ray", marks=pytest.mark.full)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """One of each."""
    if request.param in ("here", "joined"):
        here = Here(tmp_path) if request.param == "here" else Joined(tmp_path)
        yield here
        here.close()
    elif request.param == "in memory":
        yield InMemory()
    else:
        with on_ray(tmp_path) as world:
            yield world


@pytest.fixture
def start(world: World) -> Iterator[Callable[[int], StartedProcess]]:
    """Starts trainers that wait for a plan, which nobody publishes."""
    hosts: list[RendezvousHost] = []
    started: list[StartedProcess] = []

    def begin(trainer: int) -> StartedProcess:
        if not hosts:
            hosts.append(world.engine.rendezvous_host("127.0.0.1"))
            hosts[0].await_ready()
        host = hosts[0]
        world.before_start(trainer)
        how = TrainerStart(trainer, host.address, "127.0.0.1", None, os.getpid(), on_host=OnHost("a token", has_run=True))
        started.append(world.engine.start_trainer(how, host.held))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
    for process in started:
        wait_until(lambda process=process: process.poll() is not None)  # type: ignore[misc]
    for host in hosts:
        host.close()


def runs(process: StartedProcess) -> bool:
    """Whether a trainer runs, on a machine."""
    return process.poll() is None and process.pid > 0


def test_trainers_start_end_and_are_killed(world: World, start: Callable[[int], StartedProcess]) -> None:
    world.start_servers(3)
    first, second, third = (start(trainer) for trainer in range(3))
    for process in (first, second, third):
        wait_until(lambda process=process: runs(process))  # type: ignore[misc]
    assert len({first.pid, second.pid, third.pid}) == 3
    world.kill_trainer(1)
    wait_until(lambda: second.poll() is not None)
    second.kill()
    second.wait()
    third.kill()
    third.wait(MINUTE)
    assert third.poll() is not None
    assert first.poll() is None


def test_guests_are_those_that_the_engine_did_not_place(world: World, start: Callable[[int], StartedProcess]) -> None:
    world.start_servers(3)
    process = start(2)
    wait_until(lambda: runs(process))
    joined = isinstance(world, Joined)
    assert set(world.engine.guests) == ({2} if joined else set())
    assert process.is_here == (type(world) is Here)
    assert world.engine.take_offers(lambda: 3) == []


def test_a_guest_that_is_not_needed_or_to_blame_is_refused_and_another_is_kept(tmp_path: Path) -> None:
    with contextlib.closing(Joined(tmp_path)) as world:
        for trainer in (1, 2):
            world.before_start(trainer)
        first, second = world._joins
        world.engine.refuse({1: "its arithmetic differs"}, set())
        status, _, err = first.end()
        assert status == 2
        assert "its arithmetic differs" in err
        assert world.engine.take_offers(lambda: None) == []
        status, _, err = second.end()
        assert status == 2
        assert "as many trainers as lanes" in err


def test_a_server_that_died_is_replaced_by_an_empty_one(world: World) -> None:
    urls = world.start_servers(3)
    assert all(map(world.is_empty, urls))
    new = world.engine.new_server
    assert all(new(shard, url, lambda shard: True) is None for shard, url in enumerate(urls))
    world.kill_server(urls[1])
    new_urls: list[str] = []

    def replaced() -> bool:
        url = new(1, urls[1], lambda shard: True)
        new_urls.extend([url] if url else [])
        return bool(new_urls)

    wait_until(replaced)
    wait_until(lambda: world.is_empty(new_urls[0]))
    assert new(1, new_urls[0], lambda shard: True) is None
    assert new(0, urls[0], lambda shard: True) is None


def test_a_server_that_may_not_start_does_not(world: World) -> None:
    urls = world.start_servers(3)
    world.kill_server(urls[1])
    assert world.engine.new_server(1, urls[1], lambda shard: False) is None


def test_further_servers_come_and_go(world: World) -> None:
    urls = world.start_servers(3)
    own = world.engine.own_servers
    assert own is not None
    third, fourth = own.add(3), own.add(4)
    assert world.is_empty(third)
    assert world.is_empty(fourth)
    assert len({*urls, third, fourth}) == 5
    own.take_back(4, fourth)
    own.remove(1, urls[1])
    assert all(map(world.is_empty, (urls[0], urls[2], third)))


def test_servers_of_a_stopped_run_are_found_or_replaced(world: World) -> None:
    urls = tuple(world.start_servers(3))
    if not world.machines:
        pytest.skip("local servers are the run's own, which its folder finds")
    plain = tuple(url.rpartition("@")[2] if "@" in url else url.removeprefix("redis://") for url in urls)
    plain = tuple(f"redis://{url}" for url in plain)
    assert world.engine.find_servers(plain, 1 << 20) == (urls, 0)
    world.kill_server(urls[2])
    urls_now, ended = world.engine.find_servers(plain, 1 << 20)
    assert ended == 1
    assert urls_now[:2] == urls[:2]
    assert urls_now[2] != urls[2]
    assert world.is_empty(urls_now[2])


def test_a_machine_that_drains_names_what_is_on_it(world: World, start: Callable[[int], StartedProcess]) -> None:
    urls = world.start_servers(3)
    processes = [start(trainer) for trainer in range(2)]
    wait_until(lambda: all(map(runs, processes)))
    assert world.engine.draining() == Draining()
    if not world.machines:
        pytest.skip("this machine does not drain")
    machine = world.engine.machines[1]
    world.drain(machine)
    wait_until(lambda: bool(world.engine.draining().trainers))
    draining = world.engine.draining()
    assert draining.trainers == {trainer for trainer in range(2) if world.engine.machines[trainer] == machine}
    assert len(draining.servers) <= len(urls)


def test_a_machine_that_is_lost_takes_its_trainers_along(world: World, start: Callable[[int], StartedProcess]) -> None:
    world.start_servers(3)
    processes = [start(trainer) for trainer in range(3)]
    wait_until(lambda: all(map(runs, processes)))
    if not world.machines:
        pytest.skip("with this machine the coordinator is lost, too")
    here = _machine_of_the_coordinator(world)
    lost = next(machine for machine in world.engine.machines.values() if machine != here)
    gone = [trainer for trainer, machine in world.engine.machines.items() if machine == lost]
    world.lose(lost)
    wait_until(lambda: all(processes[trainer].poll() is not None for trainer in gone))
    assert all(processes[trainer].poll() is None for trainer in range(3) if trainer not in gone)


def _machine_of_the_coordinator(world: World) -> str:
    if isinstance(world, InMemory):
        return "machine-0"
    import ray

    return str(ray.get_runtime_context().get_node_id())


# What the coordinator does with an engine.


def shards_of(tmp_path: Path, twin: TwinEngine, parity: str = "2+1", no_restart: bool = False) -> StoreShards:
    """Three shards on servers of the twin."""
    urls = twin.start_servers(3)
    call = small_call(tmp_path, step=7, store=list(urls), parity=parity, no_restart=no_restart)
    return StoreShards(call, urls, None, twin)


def test_a_server_of_the_engine_that_died_is_replaced(tmp_path: Path) -> None:
    twin = TwinEngine()
    shards = shards_of(tmp_path, twin)
    before = list(shards.urls)
    shards.restart_dead()
    assert shards.take_replacement() is None
    twin.end_server(before[2])
    shards.restart_dead()
    replaced = shards.take_replacement()
    assert replaced is not None
    assert replaced[0] == 2
    assert shards.urls == [*before[:2], replaced[1]]
    shards.restart_dead()
    assert shards.take_replacement() is None


@pytest.mark.parametrize(("parity", "no_restart"), [("2+1", True), ("off", False)])
def test_it_is_not_where_its_rows_could_not_be_had_or_the_user_wants_none(tmp_path: Path, parity: str, no_restart: bool) -> None:
    twin = TwinEngine()
    shards = shards_of(tmp_path, twin, parity, no_restart)
    twin.end_server(shards.urls[0])
    shards.restart_dead()
    assert shards.take_replacement() is None
    assert not shards.servers_return


def test_a_trainer_whose_machine_is_lost_may_live_on_and_one_that_was_killed_may_not() -> None:
    twin = TwinEngine()
    trainers = SpawnedTrainers(twin, list, None, 0)
    trainers.meet_at("127.0.0.1:1", "127.0.0.1", ())
    for trainer in range(3):
        trainers.start(trainer)
    twin.lose(twin.machines[0])
    twin.trainers[1].kill()
    assert trainers.ended() == {0: "its host can no longer be reached", 1: "was killed by SIGKILL"}
    assert not trainers.end(0)
    assert trainers.end(1)
    twin.drain(twin.machines[2])
    assert trainers.engine.draining().trainers == {2}
