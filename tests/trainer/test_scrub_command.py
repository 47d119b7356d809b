"""`foreload scrub` and `foreload stores status` as a user calls them, on runs that rest and on one that trains."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, main, reached
from held import Hold
from small_job import BATCH, arguments, rows_of, summary, synthetic_schedule, train_undisturbed

from foreload.cache.client.local import LocalStores
from foreload.cache.client.resp import MARKER
from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.marker import Marker
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.control import AskScrub, AskScrubbed, Refused, ScrubBegun, ScrubProgress, ask
from foreload.trainer.command_line.stores import DAMAGED
from foreload.trainer.run.directory import SCRUB, STORES
from foreload.trainer.saved.model_rows import write_expected_rows


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An epoch of 1,200 steps in two lanes: long enough to look at a run that trains."""
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), 1200 * BATCH)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of 30 steps."""
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), 30 * BATCH)


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run with one trainer that nothing happened to."""
    run = train_undisturbed(schedule, tmp_path_factory.mktemp("run"))
    return str(summary(run)["digest"])


def asked(command: list[str], capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and --json (written to the path) of a command."""
    capsys.readouterr()
    status = main([*command, "--json", str(path)])
    return status, capsys.readouterr().out, json.loads(path.read_text(encoding="utf-8"))


def test_a_run_that_ended_is_clean_and_what_is_repaired_in_local_stores_is_saved(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, json_path = tmp_path / "run", tmp_path / "report.json"
    assert main(arguments(short, run, "--store", "local:3", "--digest")) == 0
    status, out, report = asked(["scrub", str(run)], capsys, json_path)
    assert status == 0
    assert "0 stripes repaired, 0 damaged" in out
    assert report["stripes"] > 0
    with LocalStores(3, run / STORES) as stores:
        with Store(stores.urls) as store:
            key, names = rows_of(store, run, 1, 2)
            for name in names[:5]:
                store.command(2, "HDEL", key, name)
        stores.stop(save=True)
    damaged = (run / STORES / "shard-2.rdb").stat().st_mtime_ns
    status, out, report = asked(["scrub", str(run)], capsys, json_path)
    assert status == 0
    assert report["stripes_repaired"] == 5
    assert {one["lane"] for one in report["repaired"]} == {1}
    assert all("(shard 2) is missing" in one["what"] for one in report["repaired"])
    assert "repaired: lane 1, table " in out
    status, _, report = asked(["scrub", str(run)], capsys, json_path)
    assert (status, report["stripes_repaired"]) == (0, 0)
    assert main(["digest", str(run)]) == 0
    assert capsys.readouterr().out.strip() == summary(run)["digest"]
    assert (run / STORES / "shard-2.rdb").stat().st_mtime_ns > damaged


def test_a_damaged_row_is_named_left_alone_and_has_an_exit_status_of_its_own(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, json_path = tmp_path / "run", tmp_path / "report.json"
    with LocalStores(3, tmp_path / "stores") as stores, Store(stores.urls) as store:
        assert main(arguments(short, run, "--store", ",".join(stores.urls))) == 0
        key, names = rows_of(store, run, 0, 1)
        row = store.command(1, "HGET", key, names[0])
        assert isinstance(row, bytes)
        changed = bytes([row[0] ^ 1]) + row[1:]
        store.command(1, "HSET", key, names[0], changed)
        status, out, report = asked(["scrub", str(run)], capsys, json_path)
        assert status == DAMAGED == 4
        assert report["stripes_damaged"] == 1
        (one,) = report["damaged"]
        assert (one["lane"], 1 in one["shards"]) == (0, True)
        first, last = one["ordinals"]
        assert first <= int.from_bytes(names[0][2:], "big") <= last
        assert f"damaged: lane 0, table {one['table']}, ordinals {first} to {last}" in out
        assert store.command(1, "HGET", key, names[0]) == changed


@pytest.mark.full
def test_a_run_that_stopped_early_is_clean_and_so_is_one_without_a_shard(
    schedule: Path, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run, json_path = tmp_path / "run", tmp_path / "report.json"
    with LocalStores(3, tmp_path / "stores") as stores:
        job = hold(arguments(schedule, run, "--store", ",".join(stores.urls)), 30)
        job.process.send_signal(signal.SIGINT)
        status, _, err = job.stopped()
        assert status == 130, err
        status, _, report = asked(["scrub", str(run)], capsys, json_path)
        assert (status, report["stripes_repaired"], report["lost_shards"]) == (0, 0, [])
        with Store(stores.urls) as store:
            key, names = rows_of(store, run, 0, 1)
            store.command(1, "HDEL", key, *names[:3])
            status, _, report = asked(["scrub", str(run)], capsys, json_path)
            assert (status, report["stripes_repaired"]) == (0, 3)
            store.command(2, "FLUSHALL")
        status, out, report = asked(["scrub", str(run)], capsys, json_path)
        assert (status, report["lost_shards"]) == (0, [2])
        assert "not checked: store shard 2, which is lost" in out
        status, out, report = asked(["stores", "status", str(run)], capsys, json_path)
        assert report["parity"] == {"code": "2+1", "state": "degraded"}
        assert [shard["state"] for shard in report["shards"]] == ["up", "up", "degraded"]


@pytest.mark.full
def test_a_run_that_was_killed_is_brought_to_its_last_batch_and_is_clean(
    schedule: Path, tmp_path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]
) -> None:
    run, json_path = tmp_path / "run", tmp_path / "report.json"
    with LocalStores(3, tmp_path / "stores") as stores:
        job = hold(arguments(schedule, run, "--store", ",".join(stores.urls), "--trainers", "2"), 30)
        job.remains.kill()
        job.schedule.release()
        status, _, report = asked(["scrub", str(run)], capsys, json_path)
        assert (status, report["stripes_repaired"], report["stripes_damaged"]) == (0, 0, 0)
        assert report["stripes"] > 0
        assert report["lost_shards"] == []
        with Store(stores.urls) as store:
            for lane in range(2):
                # All shards of a lane are at one batch.
                (marker,) = {store.command(shard, "HGET", rows_of(store, run, lane, shard)[0], MARKER) for shard in range(3)}
                assert isinstance(marker, bytes)
                assert Marker.parse(marker).parity == Marker.parse(marker).data > 0
            store.command(1, "FLUSHALL")
        assert main(["scrub", str(run)]) == 2
        assert "crashed, and store shard 1 is lost" in capsys.readouterr().err


@pytest.mark.parametrize("trainers", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_run_is_scrubbed_and_told_of_while_it_trains(
    schedule: Path,
    tmp_path: Path,
    launched: Callable[..., Command],
    slow: Path,
    capsys: pytest.CaptureFixture[str],
    trainers: str,
) -> None:
    run, json_path = tmp_path / "run", tmp_path / "report.json"
    # Its schedule is whole: else what its rows are, and will need, is not known.
    job = launched(*arguments(schedule, run, "--store", "local:3", "--trainers", trainers))
    job.until(reached(run, 3))
    status, out, report = asked(["stores", "status", str(run)], capsys, json_path)
    assert status == 0, out
    assert report["state"] == "training"
    assert report["parity"] == {"code": "2+1", "state": "ok"}
    assert report["lag"]["rows"] >= 0
    assert all(shard["rows"] > 0 and shard["parity_rows"] > 0 for shard in report["shards"])
    assert report["forecast"]["rows"] > sum(shard["rows"] for shard in report["shards"])
    assert report["forecast"]["overhead_measured"]
    status, out, report = asked(["scrub", str(run)], capsys, json_path)
    assert status == 0, out
    assert report["stripes"] > 0
    assert report["rows"] > 0
    assert (report["stripes_repaired"], report["stripes_damaged"]) == (0, 0)
    assert not (run / SCRUB).exists()
    job.process.send_signal(signal.SIGINT)
    status, _, err = job.end()
    assert status == 130, err


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_a_trainer_that_is_lost_amid_a_scrub_ends_that_alone(
    schedule: Path, undisturbed: str, tmp_path: Path, launched: Callable[..., Command], slow: Path, killed: int
) -> None:
    run = tmp_path / "run"
    words = ("--store", "local:3", "--trainers", "2", "--no-restart", "--peer-timeout", "600", "--digest")
    job = launched(*arguments(schedule, run, *words))
    job.until(reached(run, 3))
    # While one stands still no lane is scrubbed to its end.
    worker = job.workers[killed]
    worker.suspend()
    (run / SCRUB).mkdir()
    write_expected_rows(Schedule(schedule), run / SCRUB)
    begun: ScrubBegun | Refused | None = ask(run, AskScrub("."))
    assert isinstance(begun, ScrubBegun)
    progress: ScrubProgress | Refused | None = ask(run, AskScrubbed())
    assert isinstance(progress, ScrubProgress)
    assert not progress.done
    worker.kill()
    job.until(lambda: ask(run, AskScrubbed()) == Refused("its trainers, or their lanes, changed meanwhile; scrub it again"))
    shutil.rmtree(run / SCRUB)
    assert main(["scrub", str(run)]) == 0
    slow.unlink()
    status, _, err = job.end()
    assert status == 0, err
    assert f"trainer {killed}: lost (was killed by SIGKILL)" in err
    assert summary(run)["digest"] == undisturbed


def test_what_a_store_will_need_is_what_it_then_has(short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, json_path = tmp_path / "run", tmp_path / "report.json"
    with LocalStores(3, tmp_path / "stores") as stores:
        assert main(arguments(short, run, "--store", ",".join(stores.urls))) == 0
        status, out, report = asked(["stores", "status", str(run)], capsys, json_path)
        assert (status, report["parity"]["state"], report["lag"]) == (0, "ok", None)
        for shard in report["shards"]:
            assert shard["rows"] + shard["parity_rows"] == shard["entries"]
        forecast = report["forecast"]
        assert forecast["rows"] == sum(shard["rows"] for shard in report["shards"])
        assert forecast["parity_rows"] == sum(shard["parity_rows"] for shard in report["shards"])
        # Nothing is left to come, so this is what there is.
        assert forecast["memory_bytes"] == pytest.approx(sum(shard["hash_bytes"] for shard in report["shards"]), abs=2)
        assert "at the end of the schedule: " in out


def test_a_run_without_parity_has_nothing_to_be_checked_against(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(arguments(short, run, "--store", "local:1")) == 0
    capsys.readouterr()
    assert main(["scrub", str(run)]) == 2
    assert "has no parity" in capsys.readouterr().err
    assert main(["stores", "status", str(run)]) == 0
    assert "parity off" in capsys.readouterr().out
