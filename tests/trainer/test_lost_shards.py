"""`foreload train` while store shards die: the same model, and what the user is told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from command_line import Command, error_of, free_port, main
from held import Hold, stop_after
from small_call import small_call
from small_job import BATCH, arguments, rows_of, scheduler_environment, summary, synthetic_schedule, train_undisturbed

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.namespace import claim, owner
from foreload.cache.protocol.shards.shard_status import ServerUnreachable, ShardSnapshot, ShardState, ShardStatus
from foreload.cache.rows.row_bytes import decode_rows
from foreload.pipelines.planning.sizing import TRAILER_BYTES
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.coordinator import store_shards
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.member.coordinator_link import CoordinatorLink
from foreload.trainer.cluster.messages.control import AskReplace, Replacing
from foreload.trainer.cluster.messages.trainers import ShardsReport
from foreload.trainer.run.directory import STORES, Run
from foreload.trainer.run.event_log import read_events


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An epoch of 80 steps in two lanes."""
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), 80 * BATCH)


@pytest.fixture(scope="module")
def undisturbed_run(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without parity that nothing happened to."""
    return train_undisturbed(schedule, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Path) -> str:
    """The digest of its model."""
    return str(summary(undisturbed_run)["digest"])


def send(run: Path, shard: int, signal_number: int) -> None:
    """Send a signal to the local server of a run's store shard."""
    stores = LocalStores.find(run / STORES)
    assert stores is not None
    pid = stores.pids[shard]
    assert pid is not None
    os.kill(pid, signal_number)


Rows = dict[tuple[int, bytes], bytes]


def rows_on(run: Path, urls: Sequence[str], shard: int) -> Rows:
    """The stored bytes of every row on a store shard, by lane and field; parity rows left out."""
    held: Rows = {}
    with Store([urls[shard]]) as store:
        for lane in range(Run.open(run).manifest.lanes):
            key, names = rows_of(store, run, lane, 0)
            rows = store.command(0, "HMGET", key, *names)
            assert isinstance(rows, list)
            held |= {(lane, name): row for name, row in zip(names, rows, strict=True)}
    return held


def id_and_tag(row: bytes) -> tuple[int, int]:
    """Whose row it is, and the step of its last update plus one."""
    values = (len(row) - TRAILER_BYTES) // 4
    ids, tags = np.empty(1, np.int64), np.empty(1, np.int32)
    floats, none = np.empty((1, values), np.float32), np.empty((1, 0), np.float32)
    decode_rows(np.frombuffer(row, np.uint8).reshape(1, -1), values, 0, floats, none, ids, tags)
    return int(ids[0]), int(tags[0])


def check_repaired(run: Path, err: str, undisturbed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that a run that lost shard 1, and says so, has it again, with the same model as if nothing had happened."""
    assert "store shard 1: is lost" in err
    assert "store shard 1: is whole again" in err
    assert "warning" not in err
    assert summary(run)["digest"] == undisturbed
    assert Run.open(run).saved_status().lost == []
    assert main(["scrub", str(run)]) == 0
    out = capsys.readouterr().out
    assert "0 stripes repaired, 0 damaged" in out
    assert "not checked" not in out


@pytest.mark.parametrize("trainers", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_dead_server_is_started_again_and_rebuilt(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    hold: Hold,
    trainers: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:3", "--trainers", trainers, "--digest"), 10)
    send(run, 1, signal.SIGKILL)
    status, _, err = job.end()
    assert status == 0, err
    check_repaired(run, err, undisturbed, capsys)


@pytest.mark.parametrize("trainers", ["1", pytest.param("2", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "snapshot", [pytest.param(True, id="of an old snapshot"), pytest.param(False, id="empty", marks=pytest.mark.full)]
)
@pytest.mark.full
def test_a_server_that_is_back_at_once_without_its_last_rows_is_noticed_and_rebuilt(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    hold: Hold,
    snapshot: bool,
    trainers: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with contextlib.ExitStack() as servers:
        stores = [servers.enter_context(LocalStores(1, tmp_path / str(shard))) for shard in range(3)]
        urls = [url for store in stores for url in store.urls]
        job = hold(arguments(schedule, run, "--store", ",".join(urls), "--trainers", trainers, "--digest"), 10)
        if snapshot:
            with Store([urls[1]]) as store:
                assert store.command(0, "SAVE") == "OK"
        job.advance(10)
        assert (tmp_path / "1" / "shard-0.rdb").exists() == snapshot
        # Whoever comes back to the server finds the other one there already, and steps are left to rebuild it in.
        for worker in job.workers:
            worker.suspend()
        os.kill(stores[1].pids[0] or 0, signal.SIGKILL)
        stores[1].stop(save=False)
        again = servers.enter_context(LocalStores(1, tmp_path / "1"))
        assert again.urls == (urls[1],)
        with Store(again.urls) as store:
            assert (store.command(0, "DBSIZE") != 0) == snapshot
        for worker in job.workers:
            worker.resume()
        status, _, err = job.end()
        assert status == 0, err
        check_repaired(run, err, undisturbed, capsys)


@pytest.mark.full
def test_a_shard_that_dies_when_one_trainer_is_done_is_rebuilt_by_all(
    schedule: Path, undisturbed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = arguments(schedule, run, "--store", "local:3", "--digest")
    meeting = scheduler_environment()
    modules = ["foreload.trainer.cli", "tests.harness.late_trainer"]
    jobs = [Command(*command, module=module, **meeting, RANK=str(rank)) for rank, module in enumerate(modules)]
    try:
        ends = [job.end() for job in jobs]
    finally:
        for job in jobs:
            job.clear()
    assert [status for status, _, _ in ends] == [0, 0], ends
    err = ends[0][2]
    check_repaired(run, err, undisturbed, capsys)


@pytest.mark.full
def test_a_run_ends_though_the_server_of_a_lost_shard_is_stopped(
    schedule: Path, undisturbed: str, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:3", "--no-restart", "--store-timeout", "0.5", "--digest"), 10)
    send(run, 1, signal.SIGSTOP)
    status, _, err = job.end()
    assert status == 0, err
    assert "warning: store shard 1 is lost" in err
    assert summary(run)["digest"] == undisturbed
    assert Run.open(run).saved_status().lost == [1]
    assert [(run / STORES / f"shard-{shard}.rdb").exists() for shard in range(3)] == [True, False, True]
    capsys.readouterr()
    assert main(["stores", "status", str(run)]) == 2
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("parity 2+1 degraded")
    assert [line.split("  ")[1] for line in told[1:4]] == ["at rest", "lost", "at rest"]
    assert main(["scrub", str(run)]) == 0
    assert "not checked: store shard 1, which is lost" in capsys.readouterr().out


@pytest.mark.full
def test_a_run_ends_without_a_server_for_its_lost_shard_and_goes_on_from_there(
    schedule: Path, undisturbed: str, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:3", "--no-restart"), 10)
    send(run, 2, signal.SIGKILL)
    job.advance(10)
    job.process.send_signal(signal.SIGINT)
    status, _, err = job.stopped()
    assert status == 130, err
    assert "warning: store shard 2 is lost" in err
    assert Run.open(run).saved_status().lost == [2]
    # The rows of the lost shard are decoded, and the server that then is there is rebuilt.
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    assert "store shard 2: is whole again" in capsys.readouterr().err
    assert summary(run)["digest"] == undisturbed
    assert Run.open(run).saved_status().lost == []


def test_a_spare_takes_the_place_of_a_lost_shard(
    schedule: Path, undisturbed: str, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with LocalStores(5, tmp_path / "stores") as servers:
        store, spare = ",".join(servers.urls[:3]), servers.urls[3]
        job = hold(arguments(schedule, run, "--store", store, "--spare", spare, "--digest"), 10)
        pid = servers.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        servers._processes[0].wait()
        job.advance(10)
        capsys.readouterr()
        assert main(["stores", "replace", str(run), servers.urls[1], servers.urls[4]]) == 0
        assert servers.urls[4] in capsys.readouterr().out
        status, _, err = job.end()
        assert status == 0, err
        assert f"store shard 1: {servers.urls[4]} takes its place" in err
        assert summary(run)["digest"] == undisturbed
        assert Run.open(run).manifest.store_urls == (spare, servers.urls[4], servers.urls[2])
        assert main(["digest", str(run)]) == 0
        assert capsys.readouterr().out.strip() == undisturbed


@pytest.mark.full
def test_a_spare_that_is_of_no_use_is_named_and_the_next_one_used(
    schedule: Path, undisturbed: str, tmp_path: Path, hold: Hold
) -> None:
    run = tmp_path / "run"
    with LocalStores(5, tmp_path / "stores") as servers:
        taken, good = servers.urls[3], servers.urls[4]
        store_urls, spares = ",".join(servers.urls[:3]), f"{taken},{good}"
        job = hold(arguments(schedule, run, "--store", store_urls, "--spare", spares, "--digest"), 10)
        # It was of use when training began.
        with Store([taken]) as store:
            claim(store, "run", {"run": "another"}, "new")
        pid = servers.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        status, _, err = job.end()
        assert status == 0, err
        assert f"store shard 0: no server for it yet (store {taken}: namespace run belongs to another run there" in err
        assert f"store shard 0: {good} takes its place" in err
        assert "store shard 0: is whole again" in err
        assert summary(run)["digest"] == undisturbed
        with Store([taken]) as store:
            note = owner(store, "run", 0)
            assert note is not None
            assert note.identity == {"run": "another"}


@contextlib.contextmanager
def server_of_another_protocol() -> Iterator[str]:
    """The URL of a server that is no Redis: it answers everything as a web server does."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                while self.request.recv(1000):
                    self.request.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def servers_of_no_use(url: str, in_use: str) -> Iterator[tuple[str, str]]:
    """URLs of servers that cannot take a shard's place, and why; url: of a server that is made so and is good again afterwards."""
    yield in_use, "is already the server of store shard 2; give another one"
    yield f"redis://127.0.0.1:{free_port()}", "cannot be reached"
    with server_of_another_protocol() as other:
        yield other, "Protocol error"
    with Store([url]) as store:
        for words, undo, why in [
            (("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE"), "is a read-only replica"),
            (
                ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
                ("CONFIG", "SET", "maxmemory-policy", "noeviction"),
                "must be noeviction",
            ),
            (("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "SET", "maxmemory", 0), "is full"),
            (("CONFIG", "SET", "requirepass", "s3cret"), ("CONFIG", "SET", "requirepass", ""), "refuses the user or password"),
        ]:
            store.command(0, *words)
            yield url, why
            store.command(0, *undo)
        claim(store, "run", {"run": "another"}, "new")
        yield url, "namespace run belongs to a run there; name another server, or remove its rows first"
        store.command(0, "FLUSHALL")
        # Others' rows are no obstacle.
        store.command(0, "SET", "another's", "row")


@pytest.mark.full
def test_a_server_of_no_use_is_refused_before_it_is_needed_and_a_healthy_shard_kept(
    schedule: Path, undisturbed: str, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with LocalStores(4, tmp_path / "stores") as servers:
        named = ("--store", ",".join(servers.urls[:3]))
        for bad, why in servers_of_no_use(servers.urls[3], servers.urls[2]):
            assert main(arguments(schedule, run, *named, "--spare", bad)) == 2
            (line,) = [line for line in capsys.readouterr().err.splitlines() if "lanes x" not in line]
            assert line.startswith(f"foreload: error: --spare: store {bad}: ")
            assert why in line
            assert not run.exists()
        assert main(arguments(schedule, run, *named, "--spare", servers.urls[3], "--parity", "off")) == 2
        assert "--spare: needs parity" in capsys.readouterr().err
        job = hold(arguments(schedule, run, *named, "--digest"), 10)
        # It trains on in its own time; meanwhile it is asked, and goes on as before.
        (trainer,) = job.workers
        trainer.suspend()
        for bad, why in servers_of_no_use(servers.urls[3], servers.urls[2]):
            assert main(["stores", "replace", str(run), "1", bad]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"foreload: error: stores replace: store {bad}: ")
            assert why in line
        assert main(["stores", "replace", str(run), "1", servers.urls[3]]) == 0
        assert main(["stores", "replace", str(run), "0", servers.urls[3]]) == 2
        assert "is already the server of store shard 1" in capsys.readouterr().err
        trainer.resume()
        status, _, err = job.end()
        assert status == 0, err
        assert err.count("takes its place") == 1
        assert summary(run)["digest"] == undisturbed
        assert Run.open(run).manifest.store_urls == (servers.urls[0], servers.urls[3], servers.urls[2])


def test_a_shard_is_whole_when_every_trainer_says_so_and_only_a_server_in_use_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    spares = [f"redis://127.0.0.1:{port}" for port in (11, 12, 13)]
    monkeypatch.setattr(store_shards, "spare_check", lambda job, manifest: lambda url, in_use: None)
    call = small_call(tmp_path, step=7, store=list(urls), parity="2+1", spare=",".join(spares))
    shards = StoreShards(call, urls, None)

    views = {trainer: [ShardStatus(url) for url in urls] for trainer in (0, 1)}

    def tell(trainer: int, state: ShardState, url: str, why: str = "", rebuilt: float = 0.0, shard: int = 1) -> None:
        views[trainer][shard] = ShardStatus(url, state, why, 1.0 if state == "ok" else rebuilt)
        shards.on_shards(trainer, ShardSnapshot(tuple(views[trainer])))

    def rebuilt(trainer: int, share: float) -> None:
        tell(trainer, "rebuilding", spares[0], rebuilt=share)

    def is_now(state: ShardState, share: float) -> bool:
        status = shards.together.shards[1]
        return (status.state, status.rebuilt) == (state, share)

    tell(0, "lost", urls[1], "it was closed")
    assert is_now("lost", 0.0)
    assert shards.take_replacement() == (1, spares[0])
    # One that finds the same server gone later asks for nothing more.
    tell(1, "lost", urls[1], "it was closed")
    assert shards.take_replacement() is None
    tell(0, "rebuilding", spares[0])
    tell(1, "rebuilding", spares[0])
    rebuilt(0, 0.6)
    assert is_now("rebuilding", 0.0)
    rebuilt(1, 0.3)
    rebuilt(1, 0.35)
    rebuilt(1, 0.4)
    assert is_now("rebuilding", 0.4)
    # The spare dies before it is whole, and the next is not there.
    tell(0, "lost", spares[0], "it was reset")
    assert shards.take_replacement() == (1, spares[1])
    tell(1, "lost", spares[0], "it was reset")
    shards.unreachable(ServerUnreachable(1, spares[1], "it refuses"))
    assert shards.take_replacement() == (1, spares[2])
    shards.unreachable(ServerUnreachable(1, spares[1], "it refuses"))
    assert shards.take_replacement() is None
    tell(0, "rebuilding", spares[2])
    tell(0, "ok", spares[2])
    assert is_now("lost", 0.0)
    tell(1, "rebuilding", spares[2])
    tell(1, "ok", spares[2])
    assert is_now("ok", 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "store shard 1: is lost; training goes on and reads its rows from parity (it was closed)",
        "store shard 1: 30% rebuilt",
        "store shard 1: 40% rebuilt",
        "store shard 1: is lost; training goes on and reads its rows from parity (it was reset)",
        "store shard 1: no server for it yet (it refuses)",
        "store shard 1: is whole again",
    ]
    assert [(event["kind"], event["shard"], event["cause"]) for event in read_events(tmp_path)] == [
        ("shard-lost", 1, "it was closed"),
        ("shard-replaced", 1, None),
        ("shard-lost", 1, "it was reset"),
        *2 * [("shard-replaced", 1, None)],
        ("shard-rebuilt", 1, None),
    ]
    # A live server that the user replaces is no loss that asks for a spare.
    answer = shards.want_replacement(AskReplace("0", "redis://127.0.0.1:21"))
    assert isinstance(answer, Future)
    taken = None
    while not answer.done():
        taken = shards.take_replacement()
    assert answer.result() == Replacing(0, "redis://127.0.0.1:21")
    assert taken == (0, "redis://127.0.0.1:21")
    tell(0, "lost", urls[0], "another takes the shard over", shard=0)
    assert shards.take_replacement() is None


@pytest.mark.parametrize("trainers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_more_losses_than_parity_covers_end_the_run_with_their_own_status_and_leave_what_survived(
    schedule: Path, undisturbed_run: Path, tmp_path: Path, hold: Hold, trainers: int
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:3", "--trainers", str(trainers), "--no-restart"), 40)
    stores = LocalStores.find(run / STORES)
    assert stores is not None
    before = rows_on(run, stores.urls, 2)
    send(run, 0, signal.SIGKILL)
    send(run, 1, signal.SIGKILL)
    status, _, err = job.end()
    assert status == 3, err
    assert "store shards 0, 1 are lost, but parity covers only 1" in err
    told = {table: int(count.replace(",", "")) for count, table in re.findall(r"([\d,]+) rows of table (\w+)", err)}
    assert json.loads((run / "status.json").read_text())["state"] == "training"
    assert [(run / STORES / f"shard-{shard}.rdb").exists() for shard in range(3)] == [False, False, True]
    with LocalStores(3, run / STORES) as left:
        survived = rows_on(run, left.urls, 2)
    with LocalStores(1, undisturbed_run / STORES) as whole:
        final = rows_on(undisturbed_run, whole.urls, 0)
    # A row is what it was, or was trained on since; one that has had its last step is the undisturbed run's, bit for bit.
    assert before
    assert before.keys() <= survived.keys() <= final.keys()
    at_their_last_tag = 0
    for where, row in survived.items():
        identity, tag = id_and_tag(row)
        last_identity, last_tag = id_and_tag(final[where])
        assert identity == last_identity
        assert 1 <= tag <= last_tag
        if tag == last_tag:
            assert row == final[where]
            at_their_last_tag += 1
        if where in before:
            assert tag > id_and_tag(before[where])[1] or row == before[where]
    assert at_their_last_tag > 100, "enough to have compared something"
    # Of both lanes are told the rows of the shards that are gone: two thirds of all, so about twice what survived, whoever trained them.
    assert set(told) <= {table.name for table in Schedule(schedule).header.features.tables}
    assert 1.5 * len(survived) < sum(told.values()) < 2.5 * len(survived)


@pytest.mark.full
def test_after_too_many_losses_a_run_goes_on_from_its_last_clean_stop(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    launched: Callable[..., Command],
    hold: Hold,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    stopped = stop_after(10, arguments(schedule, run, "--store", "local:3"), tmp_path)
    job = hold(["train", str(schedule), "--run", str(run), "--resume"], stopped + 10)
    stores = LocalStores.find(run / STORES)
    assert stores is not None
    for pid in stores.pids[:2]:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    status, _, err = job.end()
    assert status == 3, err
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    assert f"resumed after step {stopped}: the run has crashed since" in capsys.readouterr().err
    assert summary(run)["digest"] == undisturbed


def flush(run: Path, shard: int) -> None:
    """Have the server of a store shard forget everything, under the connections that it has."""
    stores = LocalStores.find(run / STORES)
    assert stores is not None
    with Store(stores.urls) as store:
        store.command(shard, "FLUSHALL")


@pytest.mark.full
@pytest.mark.parametrize("step", [10, 25, 45, 60])
def test_a_server_that_is_emptied_under_its_connections_is_rebuilt(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    hold: Hold,
    step: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:3", "--digest"), step)
    flush(run, 1)
    status, _, err = job.end()
    assert status == 0, err
    check_repaired(run, err, undisturbed, capsys)


def test_without_parity_a_server_that_is_emptied_stops_the_training(schedule: Path, tmp_path: Path, hold: Hold) -> None:
    run = tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:3", "--parity", "off"), 20)
    flush(run, 1)
    status, _, err = job.end()
    line = error_of(status, err)
    assert re.search(r"store unix://\S*shard-1.sock: (lost rows of lane \d|stale shard)", line), line
    assert json.loads((run / "status.json").read_text())["state"] == "training"


def test_a_shard_that_is_rebuilt_for_a_lane_that_changes_hands_is_not_whole_before_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    shards = StoreShards(small_call(tmp_path, step=7, store=list(urls), parity="2+1"), urls, None)

    def told(trainer: int, state: ShardState) -> None:
        shards.on_shards(
            trainer, ShardSnapshot((ShardStatus(urls[0], state, "", 0.0), ShardStatus(urls[1]), ShardStatus(urls[2])))
        )

    told(0, "rebuilding")
    shards.on_term([0, 1])
    told(0, "ok")  # of the lanes that it still has
    assert shards.together.shards[0].state == "rebuilding"
    told(1, "rebuilding")
    shards.term_begins()
    assert shards.together.shards[0].state == "rebuilding"
    assert capsys.readouterr().err == ""
    # The one that took the lane over is lost, and the first has it again, whole.
    shards.on_term([0])
    assert shards.together.shards[0].state == "rebuilding"
    shards.term_begins()
    assert shards.together.whole
    assert capsys.readouterr().err == "store shard 0: is whole again\n"


def test_a_trainer_tells_of_shards_that_it_finds_not_whole_as_it_takes_lanes_over(tmp_path: Path) -> None:
    sent: list[object] = []
    urls = ("redis://127.0.0.1:1",)
    plan = mock.Mock(text=Placement.spread(1).text, servers=urls)
    rendezvous, start = mock.Mock(read=lambda kind, *place: plan), mock.Mock(store_urls=urls, plan=None)
    link = CoordinatorLink(mock.Mock(rendezvous=rendezvous, start=start, events=mock.Mock(send=sent.append)), mock.Mock())
    whole, rebuilding = (ShardSnapshot((ShardStatus(urls[0], state),)) for state in ("ok", "rebuilding"))
    traffic = mock.Mock(shards=whole)
    link.serve(mock.Mock(traffic=traffic), [])
    link.report_shards()
    assert sent == []
    for shards in (rebuilding, rebuilding, whole):
        traffic.shards = shards
        link.report_shards()
    assert [told.shards for told in sent if isinstance(told, ShardsReport)] == [rebuilding, whole]
