"""`foreload train --engine ray`, on a cluster of four nodes of this machine: nodes, servers and drivers are lost."""

from __future__ import annotations

import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from command_line import Command, free_port, refused, refused_apart, run_here
from held import HeldRun, Hold
from small_job import arguments, check_end, summary, synthetic_schedule, train_undisturbed
from waiting import DEADLINE_SECONDS, wait_until

from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_url
from foreload.cache.errors import StoreAuth
from foreload.trainer.checkpoints.contents import Checkpoint
from foreload.trainer.run.directory import GIVEN_UP, METRICS, PASSWORD, Run
from foreload.trainer.run.engine_record import EngineRecord, read_password, with_passwords
from foreload.trainer.run.event_log import CallEnded, read_events
from foreload.trainer.run.report import reported_step
from ray_nodes import RayNodes, actors, connected_nodes, nodes_of, pid_of

NODES = 4
BeginRun = Callable[..., HeldRun]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with connected_nodes(NODES) as started:
        yield started


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of 60 steps in four lanes, with evaluation after each."""
    further = "--eval-fraction 0.1 --epochs 2 --segment-bytes 100KB"
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), 8500, lanes=4, slots=500, further=further)


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run on this machine that nothing happened to."""
    return str(summary(train_undisturbed(schedule, tmp_path_factory.mktemp("run")))["digest"])


@pytest.fixture
def begin(cluster: RayNodes, schedule: Path, tmp_path: Path, hold: Hold) -> Iterator[BeginRun]:
    """Starts a run on the cluster, with three servers and two trainers, and holds it."""
    cluster.restore(NODES)
    run = tmp_path / "run"

    def started(*further: str, store: str = "engine:3") -> HeldRun:
        words = arguments(schedule, run, *cluster.flags, "--store", store, "--trainers", "2", "--digest", *further)
        before = Run.open(run).status if run.exists() else None
        through = 10 if before is None else (reported_step(run / METRICS) or 0) + 10
        job = hold(words, through, wait=False, anew=True)
        job.answer(run)  # its servers stand, which on one core takes Ray minutes: the deadline counts anew from here
        job.until(job.waits)
        return job

    yield started
    if run.exists():
        finish("delete", run)


def finish(*words: object) -> None:
    """Run a command that must succeed. It is a driver of the cluster of its own."""
    status, _, err = Command(*words).end()
    assert status == 0, err


def said(job: HeldRun, line: str) -> bool:
    """Whether a run has reported something."""
    return line in job.said


def shards_on(places: dict[str, str], node: str) -> list[int]:
    """The store shards whose servers are on a node."""
    return [shard for shard in range(3) if places[f"server-{shard}"] == node]


def go_on_until_whole(job: HeldRun, shards: list[int]) -> None:
    """Train on until shards that were lost are whole again, on other servers."""
    job.advance()
    job.until(lambda: all(f"store shard {shard}: is whole again" in job.said for shard in shards))


def test_a_node_with_a_trainer_and_a_shard_is_lost(begin: BeginRun, cluster: RayNodes, undisturbed: str) -> None:
    job = begin()
    places = nodes_of(actors(job.path))
    assert len({places[f"server-{shard}"] for shard in range(3)}) == 3
    assert places["trainer-0"] != places["trainer-1"]
    lost = next(iter({places["trainer-0"], places["trainer-1"]} - {cluster.head}))
    (gone,) = [trainer for trainer in range(2) if places[f"trainer-{trainer}"] == lost]
    cluster.lose(lost)
    job.members(1 - gone, 2)
    go_on_until_whole(job, shards_on(places, lost))
    assert lost not in nodes_of(actors(job.path)).values()
    check_end(job, undisturbed, 2)


@pytest.mark.full
def test_a_driver_is_killed_and_the_run_goes_on(begin: BeginRun, undisturbed: str) -> None:
    """Its trainers stop with everything saved, its servers stay, and the same command resumes the run."""
    job = begin()
    servers = {name: pid_of(job.path, name) for name in nodes_of(actors(job.path)) if name.startswith("server")}
    job.process.kill()
    job.process.wait()
    resumed = begin("--resume=auto")
    (stopped,) = [event for event in read_events(job.path) if event["kind"] == CallEnded.kind]
    assert stopped["step"] == job.step
    assert {name: pid_of(job.path, name) for name in servers} == servers
    check_end(resumed, undisturbed, 2)


@pytest.mark.full
@pytest.mark.parametrize("spares", [0, 1])
def test_a_server_is_lost(begin: BeginRun, undisturbed: str, spares: int) -> None:
    job = begin("--spare-servers", str(spares))
    psutil.Process(pid_of(job.path, "server-1")).kill()
    go_on_until_whole(job, [1])
    assert "store shard 1: its server is gone: was killed by SIGKILL; another one is started" in job.said
    assert set(nodes_of(actors(job.path))) >= {"server-0", "server-2", "server-spare" if spares else "server-1"}
    check_end(job, undisturbed, 2)


@pytest.mark.full
def test_a_server_that_ended_while_the_run_was_stopped_is_replaced(begin: BeginRun, undisturbed: str) -> None:
    job = begin()
    job.interrupt(job.waits)
    job.stopped()
    psutil.Process(pid_of(job.path, "server-2")).kill()
    resumed = begin("--resume", store="engine:3")
    assert "store shard 2: its server has ended; redis://" in resumed.said
    check_end(resumed, undisturbed, 2)


@pytest.mark.full
def test_trainers_come_and_go(begin: BeginRun, undisturbed: str) -> None:
    job = begin()
    assert run_here("scale", job.path, 4, "--no-wait")[0] == 0
    job.members(0, 1, 2, 3)
    job.hosting(0, 1, 2, 3)
    assert len(set(nodes_of(actors(job.path))) & {f"trainer-{trainer}" for trainer in range(4)}) == 4
    assert run_here("scale", job.path, 2, "--no-wait")[0] == 0
    job.hosting(0, 1)
    check_end(job, undisturbed, 2)


@pytest.mark.full
def test_a_node_that_drains_is_left_while_trainers_come_and_go(begin: BeginRun, cluster: RayNodes, undisturbed: str) -> None:
    job = begin()
    places = nodes_of(actors(job.path))
    drained = next(iter({places["trainer-0"], places["trainer-1"]} - {cluster.head}))
    leaves = shards_on(places, drained)
    (goes,) = [trainer for trainer in range(2) if places[f"trainer-{trainer}"] == drained]
    cluster.drain(drained)
    assert run_here("scale", job.path, 4, "--no-wait")[0] == 0
    job.members(1 - goes, 2, 3, 4)
    job.hosting(1 - goes, 2, 3, 4)
    for shard in leaves:
        wait_until(partial(said, job, f"store shards: all rows have moved; shard 3 joins, shard {shard} leaves"))
    wait_until(lambda: drained not in nodes_of(actors(job.path)).values())
    assert run_here("scale", job.path, 2, "--no-wait")[0] == 0
    job.train_until(lambda status: len({*status.lanes}) == 2)
    check_end(job, undisturbed, 2)
    assert "is lost" not in job.said


@pytest.mark.full
def test_shards_are_added_and_moved_on_the_cluster(begin: BeginRun, undisturbed: str) -> None:
    job = begin()
    assert "its servers are its own; give engine instead of a URL" in refused("stores", "add", job.path, "local")
    assert run_here("stores", "add", job.path, "engine")[0] == 0
    job.until(lambda: "all rows have moved; shard 3 joins" in job.said)
    assert run_here("stores", "move", job.path, "0", "engine")[0] == 0
    job.until(lambda: "all rows have moved; shard 4 joins, shard 0 leaves" in job.said)
    left = {"server-1", "server-2", "server-3", "server-4"}
    wait_until(lambda: {name for name in nodes_of(actors(job.path)) if name.startswith("server")} == left)
    check_end(job, undisturbed, 2)


@pytest.mark.full
def test_servers_want_a_password_and_end_with_the_run(begin: BeginRun, cluster: RayNodes) -> None:
    job = begin()
    record = EngineRecord.read(job.path)
    assert record is not None
    password = read_password(job.path)
    assert stat.S_IMODE((job.path / PASSWORD).stat().st_mode) == 0o600
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not any(password in command for command in commands)
    assert password not in job.said
    for url in record.servers:
        with pytest.raises(StoreAuth):
            Store([url])
    assert "is being trained" in refused_apart("delete", job.path)
    job.interrupt(job.waits)
    assert job.stopped()[0] == 128 + signal.SIGINT
    assert {name.split("-")[0] for name in actors(job.path)} == {"keeper", "server"}
    # Other commands find the servers' password.
    assert run_here("stores", "status", job.path)[0] == 0
    servers = [pid_of(job.path, f"server-{shard}") for shard in range(3)]
    folders = [Path(psutil.Process(pid).cwd()) for pid in servers]
    assert all(folder.name.startswith("foreload-server-") for folder in folders)
    finish("delete", job.path)
    psutil.wait_procs([psutil.Process(pid) for pid in servers if psutil.pid_exists(pid)], timeout=DEADLINE_SECONDS)
    assert not any(map(psutil.pid_exists, servers))
    wait_until(lambda: not any(map(Path.exists, folders)))
    assert record.namespace not in {one["namespace"] for one in ray.util.list_named_actors(all_namespaces=True)}
    places = [place for place in ray.util.placement_group_table().values() if place["name"].startswith(record.namespace)]
    assert {place["state"] for place in places} == {"REMOVED"}


@pytest.mark.full
def test_a_run_that_nobody_goes_on_with_is_saved_and_its_servers_end(begin: BeginRun, undisturbed: str) -> None:
    job = begin("--abandon-after", "1s")
    servers = [psutil.Process(pid_of(job.path, f"server-{shard}")) for shard in range(3)]
    job.process.kill()
    job.process.wait()
    log = job.path / GIVEN_UP
    wait_until(lambda: log.exists() and "is tried again" in log.read_text())
    assert all(server.is_running() for server in servers)
    assert f"foreload delete {job.path}" in log.read_text()
    # A checkpoint can be saved once all of the schedule is there.
    job.schedule.release()
    assert not psutil.wait_procs(servers, timeout=DEADLINE_SECONDS)[1]
    place = Run.open(job.path).newest_checkpoint()
    assert place is not None
    assert Checkpoint.open(place).contents.step == job.step
    assert str(place) in log.read_text()
    wait_until(lambda: "goes on from the checkpoint" in log.read_text())
    resumed = begin("--resume", store="engine:3")
    assert f"resumed from checkpoint {place}" in resumed.said
    check_end(resumed, undisturbed, 2)


@pytest.fixture
def with_password(urls: Sequence[str]) -> Iterator[str]:
    """For --store: three servers of this machine that want a password."""
    plain, given = Store(urls), [parse_url(url, {}).with_password("of these") for url in urls]
    for shard in range(3):
        plain.command(shard, "CONFIG", "SET", "requirepass", "of these")
    plain.close()
    yield ",".join(given)
    with Store(given) as store:
        for shard in range(3):
            store.command(shard, "CONFIG", "SET", "requirepass", "")


@pytest.mark.full
def test_servers_of_somebody_else_may_want_a_password(begin: BeginRun, undisturbed: str, with_password: str) -> None:
    job = begin(store=with_password)
    assert {name.split("-")[0] for name in nodes_of(actors(job.path))} == {"trainer"}
    check_end(job, undisturbed, 2)
    finish("delete", job.path, "--store", with_password)


def test_passwords_that_differ_are_refused(cluster: RayNodes, schedule: Path, tmp_path: Path) -> None:
    stores = "redis://:one@127.0.0.1:1,redis://:other@127.0.0.1:2,redis://:one@127.0.0.1:3"
    err = refused_apart(*arguments(schedule, tmp_path / "run", *cluster.flags, "--store", stores))
    assert "--store: all servers must want the same password, with --engine ray" in err
    assert not (tmp_path / "run").exists()


def test_what_no_node_has_is_refused(cluster: RayNodes, schedule: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = arguments(schedule, run, *cluster.flags, "--store", "engine:3", "--threads", "99")
    err = refused_apart(*words)
    assert "--trainers: no node of the Ray cluster has 99 cores" in err
    assert not run.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--store engine:3", "--store: engine:3 needs an engine that starts servers; give --engine ray, or local:3"),
        (
            "--store local:3 --engine ray",
            "--store: must be engine:N or URLs of servers that all nodes reach, with --engine ray; got local:3",
        ),
        ("--store local:3 --spare-servers 1", "--spare-servers: is for a run on a cluster"),
        ("--store engine:0 --engine ray", "--store: must be local:N or engine:N with N from 1 to 999"),
        ("--store engine:3 --engine ray --abandon-after 10", "--abandon-after: must be a time"),
        ("--store engine:3 --engine ray --coordinator 127.0.0.1:1", "--coordinator: is for hosts that join by themselves"),
        ("--store engine:3 --engine ray --ray-address ray://head:10001", "--ray-address: must be HOST:PORT"),
    ],
)
def test_settings_of_an_engine(schedule: Path, tmp_path: Path, flags: str, said: str) -> None:
    assert said in refused(*arguments(schedule, tmp_path / "run", *flags.split()))
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_is_not_there(schedule: Path, tmp_path: Path) -> None:
    flags = ["--engine", "ray", "--store", "engine:3", "--ray-address", f"127.0.0.1:{free_port()}"]
    assert "--ray-address: no Ray cluster is reached at 127.0.0.1:" in refused_apart(
        *arguments(schedule, tmp_path / "run", *flags)
    )


def test_servers_of_somebody_else_get_no_password(tmp_path: Path) -> None:
    EngineRecord("ray", "127.0.0.1:1", "foreload-run").write(tmp_path)
    assert with_passwords(tmp_path, ["redis://one:1", ""]) == ("redis://one:1", "")
