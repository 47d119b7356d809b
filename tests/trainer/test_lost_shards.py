"""`foreload train` while store shards die: the same model, and what the user is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from test_launch import Launched, arguments, free_port, reached, summary

from cache.fence import read_epochs
from cache.local import LocalStores
from cache.namespace import lane_key
from cache.rows import decode_rows
from cache.store import Store
from pipelines import prepare
from trainer.cli import main
from trainer.coordinator import ask
from trainer.run import STORES, Run


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An epoch of 80 steps in two lanes, with so few slots that rows come back from the store."""
    out = tmp_path_factory.mktemp("schedule") / "clicks"
    prepare.run(f"--format synthetic --rows 10240 --batch-size 128 --lanes 2 --slots 900 --out {out}".split())
    return out


@pytest.fixture(scope="module")
def undisturbed_run(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without parity that nothing happened to."""
    run = tmp_path_factory.mktemp("run") / "undisturbed"
    assert main(arguments(schedule, run, "--store", "local:1", "--digest")) == 0
    return run


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Path) -> str:
    """The digest of its model."""
    return str(summary(undisturbed_run)["digest"])


@pytest.fixture
def launched() -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def launch(*arguments: str) -> Launched:
        started.append(Launched(arguments))
        return started[-1]

    yield launch
    for one in started:
        for process in one.started:
            if process.is_running():
                process.kill()
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def send(run: Path, shard: int, signal_number: int) -> None:
    stores = LocalStores.find(run / STORES)
    assert stores is not None
    pid = stores.pids[shard]
    assert pid is not None
    os.kill(pid, signal_number)


Rows = dict[tuple[int, bytes], bytes]


def rows_on(run: Path, urls: Sequence[str], shard: int) -> Rows:
    """The stored bytes of every row on a store shard, by lane and field; parity rows left out."""
    namespace = Run.open(run).manifest.namespace
    found: Rows = {}
    with Store([urls[shard]]) as store:
        for lane, epoch in enumerate(read_epochs(store, 0, namespace, 2)):
            key = lane_key(namespace, lane, int(epoch))
            names = store.command(0, "HKEYS", key)
            assert isinstance(names, list)
            wanted = [name for name in names if len(name) == 8 and name[0] < 0x80]
            rows = store.command(0, "HMGET", key, *wanted)
            assert isinstance(rows, list)
            found |= {(lane, name): row for name, row in zip(wanted, rows, strict=True)}
    return found


def id_and_tag(row: bytes) -> tuple[int, int]:
    """Whose row it is, and the step of its last update plus one."""
    values = (len(row) - 12) // 4
    ids, tags = np.empty(1, np.int64), np.empty(1, np.int32)
    floats, none = np.empty((1, values), np.float32), np.empty((1, 0), np.float32)
    decode_rows(np.frombuffer(row, np.uint8).reshape(1, -1), values, 0, floats, none, ids, tags)
    return int(ids[0]), int(tags[0])


@pytest.mark.parametrize("trainers", ["1", "2"])
def test_a_dead_server_is_started_again_and_rebuilt(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    launched: Callable[..., Launched],
    trainers: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, "--store", "local:3", "--trainers", trainers, "--digest"))
    job.until(reached(run, 10))
    send(run, 1, signal.SIGKILL)
    job.until(reached(run, 15))
    status, _, err = job.end()
    assert status == 0, err
    assert "store shard 1: is lost" in err
    assert "store shard 1: is whole again" in err
    assert "warning" not in err
    assert summary(run)["digest"] == undisturbed
    assert Run.open(run).resting().lost == []
    assert main(["scrub", str(run)]) == 0
    assert "0 stripes repaired, 0 damaged" in capsys.readouterr().out


@pytest.mark.parametrize("trainers", ["1", pytest.param("2", marks=pytest.mark.full)])
@pytest.mark.parametrize("snapshot", [True, False], ids=["of an old snapshot", "empty"])
def test_a_server_that_is_back_at_once_without_its_last_rows_is_noticed_and_rebuilt(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    launched: Callable[..., Launched],
    snapshot: bool,
    trainers: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with contextlib.ExitStack() as servers:
        stores = [servers.enter_context(LocalStores(1, tmp_path / str(shard))) for shard in range(3)]
        urls = [url for store in stores for url in store.urls]
        job = launched(*arguments(schedule, run, "--store", ",".join(urls), "--trainers", trainers, "--digest"))
        job.until(reached(run, 10))
        if snapshot:
            with Store([urls[1]]) as store:
                assert store.command(0, "SAVE") == "OK"
        job.until(reached(run, 25))
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
        assert "store shard 1: is lost" in err
        assert "store shard 1: is whole again" in err
        assert "warning" not in err
        assert summary(run)["digest"] == undisturbed
        assert Run.open(run).resting().lost == []
        assert main(["scrub", str(run)]) == 0
        assert "0 stripes repaired, 0 damaged" in capsys.readouterr().out


def test_a_shard_that_dies_when_one_trainer_is_done_is_rebuilt_by_all(
    schedule: Path, undisturbed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = arguments(schedule, run, "--store", "local:3", "--digest")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    modules = ["trainer.cli", "tests.trainer.late_trainer"]
    jobs = [Launched(command, {**place, "RANK": str(rank)}, module) for rank, module in enumerate(modules)]
    try:
        ends = [job.end() for job in jobs]
    finally:
        for job in jobs:
            job.process.kill()
    assert [status for status, _, _ in ends] == [0, 0], ends
    err = ends[0][2]
    assert "store shard 1: is lost" in err
    assert "store shard 1: is whole again" in err
    assert summary(run)["digest"] == undisturbed
    assert Run.open(run).resting().lost == []
    assert main(["scrub", str(run)]) == 0
    out = capsys.readouterr().out
    assert "0 stripes repaired, 0 damaged" in out
    assert "not checked" not in out


def test_a_run_ends_though_the_server_of_a_lost_shard_is_stopped(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Launched]
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, "--store", "local:3", "--no-restart", "--store-timeout", "0.5", "--digest"))
    job.until(reached(run, 10))
    send(run, 1, signal.SIGSTOP)
    status, _, err = job.end()
    assert status == 0, err
    assert "warning: store shard 1 is lost" in err
    assert summary(run)["digest"] == undisturbed
    assert Run.open(run).resting().lost == [1]
    assert [(run / STORES / f"shard-{shard}.rdb").exists() for shard in range(3)] == [True, False, True]


def test_a_run_ends_without_a_server_for_its_lost_shard_and_goes_on_from_there(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, "--store", "local:3", "--no-restart"))
    job.until(reached(run, 10))
    send(run, 2, signal.SIGKILL)
    job.until(reached(run, 20))
    job.process.send_signal(signal.SIGINT)
    status, _, err = job.end()
    assert status == 130, err
    assert "warning: store shard 2 is lost" in err
    assert Run.open(run).resting().lost == [2]
    # The rows of the lost shard are decoded, and the server that then is there is rebuilt.
    assert main(["train", str(schedule), "--run", str(run), "--resume", "--digest"]) == 0
    assert "store shard 2: is whole again" in capsys.readouterr().err
    assert summary(run)["digest"] == undisturbed
    assert Run.open(run).resting().lost == []


def test_a_spare_takes_the_place_of_a_lost_shard(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with LocalStores(5, tmp_path / "stores") as servers:
        store, spare = ",".join(servers.urls[:3]), servers.urls[3]
        job = launched(*arguments(schedule, run, "--store", store, "--spare", spare, "--digest"))
        job.until(reached(run, 10))
        pid = servers.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        servers._processes[0].wait()
        job.until(reached(run, 25))
        answer = ask(run, {"do": "replace", "old": servers.urls[1], "new": servers.urls[4]})
        assert answer is not None
        status, _, err = job.end()
        assert status == 0, err
        assert answer == {"replacing": 1, "by": servers.urls[4]}
        assert summary(run)["digest"] == undisturbed
        assert Run.open(run).manifest.store_urls == (spare, servers.urls[4], servers.urls[2])
        assert main(["digest", str(run)]) == 0
        assert capsys.readouterr().out.strip() == undisturbed


def test_more_losses_than_parity_covers_end_the_run_with_their_own_status_and_leave_what_survived(
    schedule: Path, undisturbed_run: Path, tmp_path: Path, launched: Callable[..., Launched]
) -> None:
    run = tmp_path / "run"
    job = launched(*arguments(schedule, run, "--store", "local:3", "--no-restart"))
    job.until(reached(run, 40))
    stores = LocalStores.find(run / STORES)
    assert stores is not None
    before = rows_on(run, stores.urls, 2)
    send(run, 0, signal.SIGKILL)
    send(run, 1, signal.SIGKILL)
    status, _, err = job.end()
    assert status == 3, err
    assert "store shards 0, 1 are lost, and parity covers 1" in err
    assert json.loads((run / "status.json").read_text())["state"] == "training"
    assert [(run / STORES / f"shard-{shard}.rdb").exists() for shard in range(3)] == [False, False, True]
    with LocalStores(3, run / STORES) as left:
        survived = rows_on(run, left.urls, 2)
    with LocalStores(1, undisturbed_run / STORES) as whole:
        final = rows_on(undisturbed_run, whole.urls, 0)
    # A row is what it was, or was trained on since; one that was trained to its end is the undisturbed run's, bit for bit.
    assert before
    assert before.keys() <= survived.keys() <= final.keys()
    ended = 0
    for where, row in survived.items():
        identity, tag = id_and_tag(row)
        last_identity, last_tag = id_and_tag(final[where])
        assert identity == last_identity
        assert 1 <= tag <= last_tag
        if tag == last_tag:
            assert row == final[where]
            ended += 1
        if where in before:
            assert tag > id_and_tag(before[where])[1] or row == before[where]
    assert ended > 100
