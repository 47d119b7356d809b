"""`foreload stores add`, `remove` and `move`: rows move to other shards while a run trains or rests, and its model is the same to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Command, main
from held import HeldRun, Hold, standing, stop_after
from small_call import small_call
from small_job import BATCH, arguments, summary, synthetic_schedule

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_url
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.namespace import claim, owner
from foreload.cache.protocol.shards.shard_status import ShardSnapshot, ShardStatus
from foreload.trainer.cluster.coordinator.store_shards import StoreShards
from foreload.trainer.cluster.messages.faults import TrainerFault
from foreload.trainer.commands import migrate, stores
from foreload.trainer.run.directory import STORES, Run
from foreload.trainer.run.engine_record import EngineRecord, keep_password
from foreload.trainer.run.event_log import read_events
from foreload.trainer.run.shard_change import ShardChange
from foreload.trainer.saved.migration import NewServers

POINTS = ("rows to move read", "rows copied", "rows moved")


@dataclass(frozen=True)
class Case:
    """A schedule of 100 steps in four lanes, and the digest of a run that nothing happened to."""

    schedule: Path
    digest: str

    def words(self, run: Path, *further: object) -> list[str]:
        """The command that trains."""
        return arguments(self.schedule, run, "--digest", *map(str, further))

    def go_on(self, run: Path) -> list[str]:
        """The command that goes on with a run."""
        return ["train", str(self.schedule), "--run", str(run), "--resume", "--digest", "--trainers", "2"]

    def check(self, run: Path, live: Sequence[int], protected: bool) -> None:
        """Assert that a run at its end has the bits of the undisturbed one, on these store shards, each with what it must have."""
        assert summary(run)["digest"] == self.digest
        self.check_at_rest(run, live, protected)

    def check_at_rest(self, run: Path, live: Sequence[int], protected: bool) -> None:
        """Assert that a run rests on these store shards, each with what it must have; its rows are checked against its schedule."""
        placement = Run.open(run).placement
        assert (placement.live, placement.migrating) == (list(live), False)
        told = stores.run(str(run), None)
        assert [shard["shard"] for shard in told.shards] == list(live)
        assert {shard["state"] for shard in told.shards} <= {"at rest", "up"}
        assert told.move is None
        assert main(["digest", str(run)]) == 0
        if protected:
            assert main(["scrub", str(run)]) == 0


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    schedule = synthetic_schedule(folder, 100 * BATCH, lanes=4, slots=600)
    run = folder / "run"
    status, _, err = Command(*Case(schedule, "").words(run, "--store", "local:1", "--trainers", 1)).end()
    assert status == 0, err
    return Case(schedule, str(summary(run)["digest"]))


def asked(*arguments: object) -> None:
    """Have a command of `foreload stores` done."""
    assert main(["stores", *map(str, arguments)]) == 0


def ended(training: HeldRun, *moved: str) -> str:
    """Let a training go on to its end; returns what it said. moved: the changes of store shards that it was asked for, all of them complete."""
    status, _, err = training.end()
    assert status == 0, err
    assert "not all rows have moved" not in err
    assert not Run.open(training.path).placement.migrating
    kinds = [event["kind"] for event in read_events(training.path) if event["kind"].startswith("rows-")]
    assert kinds == ["rows-move", "rows-moved"] * len(moved)
    return err


def all_moved(run: Path, version: int) -> Callable[[], bool]:
    """Whether the rows of a run have all moved, and servers that it has no more are left."""

    def satisfied() -> bool:
        placement = Run.open(run).placement
        urls = Run.open(run).manifest.store_urls
        return (
            placement.version >= version
            and not placement.migrating
            and not any(urls[shard] for shard in placement.removed if urls)
        )

    return satisfied


def test_from_one_server_of_its_own_to_four_to_three_without_parity(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], hold: Hold
) -> None:
    run = tmp_path / "run"
    stop_after(10, case.words(run, "--store", "local:1", "--trainers", 2), tmp_path)
    # Rows that an earlier call wrote move, too.
    training = hold(case.go_on(run), 20)
    asked("add", run, "local", "local", "local")
    assert "shard 1, 2, 3 joins: rows are moving" in capsys.readouterr().out
    # One at a time.
    assert main(["stores", "remove", str(run), "0"]) == 2
    assert "its rows are already moving to other store shards" in capsys.readouterr().err
    training.until(all_moved(run, 1))
    asked("remove", run, "0")
    training.until(all_moved(run, 2))
    err = ended(training, "added", "removed")
    assert "shard 1 joins, shard 2 joins, shard 3 joins; rows move while training goes on" in err
    case.check(run, [1, 2, 3], protected=False)
    for wrong, why in (("7", "the run has no store shard 7"), ("redis://127.0.0.1:1", "the run has no store shard redis")):
        assert main(["stores", "remove", str(run), wrong]) == 2
        assert why in capsys.readouterr().err
    assert not (run / STORES / "shard-0.rdb").exists()


@pytest.mark.parametrize("known_by", ["--store", "engine"])
def test_a_server_that_wants_a_password_is_left(case: Case, tmp_path: Path, known_by: str) -> None:
    run, password = tmp_path / "run", "s3cret"
    with LocalStores(2, tmp_path / "stores") as servers:
        urls = servers.urls
        with_passwords = [parse_url(url, {}).with_password(password) for url in urls]
        stop_after(10, case.words(run, "--store", ",".join(urls), "--trainers", 2), tmp_path)
        with Store(urls) as store:
            for shard in range(2):
                store.command(shard, "CONFIG", "SET", "requirepass", password)
        try:
            if known_by == "engine":
                EngineRecord("ray", "127.0.0.1:1", "foreload-run", dict.fromkeys(urls, "actor")).write(run)
                keep_password(run, password)
                asked("remove", run, "1")
            else:
                asked("remove", run, "1", "--store", ",".join(with_passwords))
            with Store(with_passwords[1:]) as left:
                assert owner(left, "run", 0) is None
            assert Run.open(run).manifest.store_urls == (urls[0], "")
        finally:
            # Shutdown has no password.
            with Store(with_passwords) as store:
                for shard in range(2):
                    store.command(shard, "CONFIG", "SET", "requirepass", "")


def test_from_three_servers_to_five_to_four_with_parity(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    run = tmp_path / "run"
    with LocalStores(6, tmp_path / "stores") as servers:
        urls = servers.urls
        training = hold(case.words(run, "--store", ",".join(urls[:3]), "--trainers", 2))
        with Store([urls[5]]) as other:
            claim(other, "run", {"run": "another"}, "new")
        for wrong, why in (
            ((urls[3], urls[5]), "namespace run belongs to a run there"),
            ((urls[3], urls[1]), "is already the server of store shard 1"),
            ((urls[3], urls[3]), "is already the server of store shard 3"),
            (("local",), "its servers are not its own"),
            ((urls[3], "redis://127.0.0.1:1"), "cannot be reached"),
        ):
            assert main(["stores", "add", str(run), *wrong]) == 2
            line = capsys.readouterr().err
            assert line.startswith("foreload: error: stores add: ")
            assert why in line
        asked("add", run, urls[3], urls[4])
        training.until(all_moved(run, 1))
        assert main(["stores", "status", str(run)]) == 0
        asked("remove", run, urls[1])
        training.until(all_moved(run, 2))
        ended(training, "added", "removed")
        assert Run.open(run).manifest.store_urls == (urls[0], "", *urls[2:5])
        with Store([urls[1]]) as left:
            assert owner(left, "run", 0) is None
        case.check(run, [0, 2, 3, 4], protected=True)
        # At rest: killed as it left the server, the same command does that, and finds nothing else to do.
        with monkeypatch.context() as killed:
            killed.setattr(NewServers, "leave", lambda servers, leaving: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                migrate.run(str(run), None, ShardChange("remove", "0"))
        assert Run.open(run).manifest.store_urls == (urls[0], "", *urls[2:5])
        capsys.readouterr()
        assert main(["stores", "remove", str(run), "0"]) == 2
        assert "the run has no store shard 0" in capsys.readouterr().err
        assert Run.open(run).manifest.store_urls == ("", "", *urls[2:5])
        with Store([urls[0]]) as left:
            assert owner(left, "run", 0) is None
        case.check_at_rest(run, [2, 3, 4], protected=True)


def test_a_server_without_memory_for_the_rows_is_refused(
    case: Case, tmp_path: Path, launched: Callable[..., Command], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with LocalStores(4, tmp_path / "stores") as servers:
        # Not held by its schedule: what the rows will need is known of a whole schedule only.
        words = case.words(run, "--store", ",".join(servers.urls[:3]), "--trainers", 2, "--peer-timeout", 600)
        job = launched(*words, faults=[TrainerFault(1, "exchanged", 10, signal.SIGSTOP)])
        trainer = standing(job, run, 1)
        with Store([servers.urls[3]]) as small:
            small.command(0, "CONFIG", "SET", "maxmemory", int(small.info(0)["used_memory"]) + 300_000)
            assert main(["stores", "add", str(run), servers.urls[3]]) == 2
            assert "its maxmemory must be at least what it needs once the rows have moved" in capsys.readouterr().err
            assert owner(small, "run", 0) is None
        trainer.resume()
        status, _, err = job.end()
        assert status == 0, err
        case.check(run, [0, 1, 2], protected=True)


@pytest.mark.full
@pytest.mark.parametrize("trainer", [0, 1])
@pytest.mark.parametrize("change", ["add", "remove"])
@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_that_dies_amid_a_move(case: Case, tmp_path: Path, point: str, change: str, trainer: int, hold: Hold) -> None:
    run = tmp_path / "run"
    words = case.words(run, "--store", "local:4", "--trainers", 2, "--copies", 2)
    training = hold(words, faults=[TrainerFault(trainer, point, 1, signal.SIGKILL)])
    asked(*(("add", run, "local") if change == "add" else ("remove", run, 1)))
    training.until(lambda: f"trainer {trainer}: lost" in training.said)
    # The trainer that comes in its place has no lanes until the next step, and so nothing to move.
    training.until(all_moved(run, 1))
    ended(training, change)
    case.check(run, [0, 1, 2, 3, 4] if change == "add" else [0, 2, 3], protected=True)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(5))
@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_shard_that_dies_amid_a_move(case: Case, tmp_path: Path, change: str, shard: int, hold: Hold) -> None:
    run = tmp_path / "run"
    words = case.words(run, "--store", "local:4", "--trainers", 2, "--peer-timeout", 600)
    training = hold(words, faults=[TrainerFault(1, "rows copied", 1, signal.SIGSTOP)])
    asked(*(("add", run, "local") if change == "add" else ("move", run, 1, "local")))
    trainer = standing(training, run, 1)
    local = LocalStores.find(run / STORES)
    assert local is not None
    pid = local.pids[shard]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    trainer.resume()
    training.until(lambda: f"store shard {shard}: is whole again" in training.said)
    training.until(all_moved(run, 1))
    ended(training, change)
    case.check(run, [0, 1, 2, 3, 4] if change == "add" else [0, 2, 3, 4], protected=True)


def test_all_has_moved_only_once_trainers_have_told_of_all_their_lanes(tmp_path: Path) -> None:
    urls = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    shards = StoreShards(small_call(tmp_path, step=7, store=list(urls), parity="2+1"), urls, None)
    views = tuple(ShardStatus(url) for url in urls)
    # As a run goes on, a trainer takes its lanes one after the other; of the first all may have moved before.
    shards.on_shards(0, ShardSnapshot(views, 1, 1.0))
    assert not shards.all_moved([0], 1)
    shards.on_shards(0, ShardSnapshot(views, 1, 0.3))
    shards.term_begins()
    assert not shards.all_moved([0], 1)
    shards.on_shards(0, ShardSnapshot(views, 1, 1.0))
    assert shards.all_moved([0], 1)


@pytest.mark.full
@pytest.mark.parametrize("parity", ["off", "2+1"])
def test_a_run_that_rests_moves_and_goes_on(
    case: Case, tmp_path: Path, parity: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    protected = parity != "off"
    stop_after(40, case.words(run, "--store", "local:3", "--parity", parity, "--trainers", 2), tmp_path)
    before = Run.open(run).saved_status()
    # Broken off before all has settled, the same command goes on; another one is refused.
    with monkeypatch.context() as broken:
        broken.setattr(Placement, "completed", lambda placement: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            migrate.run(str(run), None, ShardChange("add", urls=("local",)))
    assert Run.open(run).placement.migrating
    assert stores.run(str(run), None).move == stores.Move(None, [3], [])
    capsys.readouterr()
    assert main(["digest", str(run)]) == 0
    assert main(["stores", "remove", str(run), "0"]) == 2
    assert "as an earlier command asked" in capsys.readouterr().err
    asked("add", run, "local")
    asked("move", run, "0", "local")
    asked("remove", run, "1")
    case.check_at_rest(run, [2, 3, 4], protected)
    after = Run.open(run).saved_status()
    assert (after.state, after.step, after.batches) == (before.state, before.step, before.batches)
    status, _, err = Command(*case.go_on(run)).end()
    assert status == 0, err
    case.check(run, [2, 3, 4], protected)
