"""Whose rows are on servers: a copy of a run's folder changes and deletes none, and a run that is deleted leaves none on any server that it had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import SMALL, done, refused, run_here
from held import Hold, stop_after

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.shards.namespace import FolderId, owner, run_key
from foreload.trainer.run.directory import STORES, Run


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[list[str]]:
    """Three servers on their own."""
    with LocalStores(3, tmp_path / "servers") as servers:
        yield list(servers.urls)


def train(clicks: Clicks, run: Path, urls: list[str], *further: object) -> tuple[object, ...]:
    return ("train", clicks.schedule, "--run", run, "--store", ",".join(urls), *SMALL, *further)


def stopped(clicks: Clicks, run: Path, urls: list[str]) -> None:
    """Leave a run that stopped cleanly on the way."""
    stop_after(10, train(clicks, run, urls), run.parent)


def held_by(urls: list[str]) -> list[int]:
    """How many keys each server has besides fence epochs, which stay."""
    counts = []
    for url in urls:
        with Store([url]) as store:
            names = store.command(0, "KEYS", "*")
            assert isinstance(names, list)
            counts.append(sum(not name.endswith(b":epoch") for name in names))
    return counts


def rewrite_keys(urls: list[str], change: dict[str, object] | None) -> None:
    """Have the run's key on every server name another folder, or none, as earlier versions did."""
    with Store(urls) as store:
        for shard in range(len(urls)):
            text = store.command(shard, "GET", run_key("run"))
            assert isinstance(text, bytes)
            note = json.loads(text)
            folder = note.pop("folder")
            if change is not None:
                note["folder"] = folder | change
            store.command(shard, "SET", run_key("run"), json.dumps(note))


def test_a_stale_copy_of_a_folder_changes_and_deletes_nothing(clicks: Clicks, tmp_path: Path, urls: list[str]) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    stopped(clicks, run, urls)
    shutil.copytree(run, copy)
    term = Run.open(copy).term
    done("train", clicks.schedule, "--run", run, "--resume")
    digest, there = done("digest", run), held_by(urls)
    commands: list[tuple[object, ...]] = [
        ("delete", copy),
        ("delete", copy, "--moved"),
        ("train", clicks.schedule, "--run", copy, "--resume"),
        ("train", clicks.schedule, "--run", copy, "--resume", "--moved"),
        train(clicks, copy, urls, "--overwrite"),
        ("scrub", copy),
        ("digest", copy),
        ("stores", "add", copy, "redis://127.0.0.1:1"),
    ]
    for command in commands:
        line = refused(*command)
        assert f"is of term {term}, and the rows on its servers are of term {term + 1}" in line, command
        assert f"({run.resolve()} on host " in line
        assert copy.exists()
    assert (done("digest", run), held_by(urls)) == (digest, there)
    # The way out says whose rows these were.
    told = done("delete", copy, "--force").splitlines()
    assert told[0].startswith(
        f"forced  the rows are of term {term + 1}, and this folder is of term {term}: they are those of another folder"
    )
    assert held_by(urls) == [0, 0, 0]


def test_a_copy_at_the_same_term_is_not_the_folder_and_a_moved_one_is(clicks: Clicks, tmp_path: Path, urls: list[str]) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    stopped(clicks, run, urls)
    shutil.copytree(run, copy)
    for command in (("delete", copy), ("train", clicks.schedule, "--run", copy, "--resume"), ("scrub", copy)):
        line = refused(*command)
        assert f"the rows on its servers are those of another folder ({run.resolve()} on host " in line, command
        assert "if that was moved to here, add --moved" in line
    # A copy can be read, and `mv` is no copy.
    assert done("digest", copy) == done("digest", run)
    elsewhere = tmp_path / "elsewhere"
    run.rename(elsewhere)
    done("scrub", elsewhere)
    with Store(urls) as store:
        note = owner(store, "run", 2)
        assert note is not None
        assert note.folder is not None
        assert note.folder.path == str(elsewhere.resolve())
    # A folder that went to another disk is a copy whose original is gone.
    shutil.rmtree(elsewhere)
    done("train", clicks.schedule, "--run", copy, "--resume", "--moved")
    done("scrub", copy)
    done("delete", copy)
    assert held_by(urls) == [0, 0, 0]


def test_a_run_is_not_deleted_by_a_copy_while_a_trainer_answers(
    clicks: Clicks, tmp_path: Path, urls: list[str], hold: Hold
) -> None:
    run, copy, other = tmp_path / "run", tmp_path / "copy", tmp_path / "other"
    job = hold(train(clicks, run, urls))
    shutil.copytree(run, copy, ignore=lambda folder, names: ["control.sock"])
    for overrule in ("--moved", "--force"):
        assert f"is being trained or read in {run.resolve()} on host " in refused("delete", copy, overrule)
    # Nor by its name on the servers.
    words = "which is being trained or read; stop that first"
    assert words in refused("stores", "delete", ",".join(urls), "run")
    assert words in refused(*train(clicks, other, urls, "--overwrite", "--namespace", "run"))
    assert job.end()[0] == 0
    done("digest", run)


def test_a_run_that_crashed_is_deleted_from_its_folder(clicks: Clicks, tmp_path: Path, urls: list[str], hold: Hold) -> None:
    run = tmp_path / "run"
    hold(train(clicks, run, urls)).remains.kill()
    assert Run.open(run).saved_status().state == "training"
    done("delete", run)
    assert held_by(urls) == [0, 0, 0]


def test_keys_of_earlier_versions_name_no_folder_and_get_one(clicks: Clicks, tmp_path: Path, urls: list[str]) -> None:
    run = tmp_path / "run"
    stopped(clicks, run, urls)
    rewrite_keys(urls, None)
    done("train", clicks.schedule, "--run", run, "--resume")
    with Store(urls) as store:
        folders = [note.folder for shard in range(3) if (note := owner(store, "run", shard)) is not None]
    assert folders == [FolderId.of(run)] * 3


@pytest.mark.parametrize(
    ("change", "same"),
    [({"device": 0}, True), ({"inode": 0}, False), ({"host": "elsewhere"}, False), ({"device": 0, "path": "/"}, False)],
)
def test_what_names_a_folder(clicks: Clicks, tmp_path: Path, urls: list[str], change: dict[str, object], same: bool) -> None:
    run = tmp_path / "run"
    here = FolderId.of(tmp_path)
    assert replace(here, **change).is_same(here) == same  # type: ignore[arg-type]
    if change == {"device": 0}:
        # Mounted again, it may have another one.
        done(*train(clicks, run, urls))
        rewrite_keys(urls, change)
        done("scrub", run)


def test_a_copy_of_a_run_with_local_stores_leaves_the_servers_of_the_original_alone(
    clicks: Clicks, tmp_path: Path, hold: Hold
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    job = hold(train(clicks, run, ["local:2"]))
    shutil.copytree(run, copy, ignore=lambda folder, names: [name for name in names if name.endswith(".sock")])
    done("delete", copy)
    servers = LocalStores.find(run / STORES)
    assert servers is not None
    with Store(servers.urls) as store:
        assert store.command(0, "PING") == "PONG"
    assert job.end()[0] == 0
    done("digest", run)


def test_overwrite_deletes_the_rows_on_all_servers_that_the_run_had(clicks: Clicks, tmp_path: Path, urls: list[str]) -> None:
    run = tmp_path / "run"
    done(*train(clicks, run, urls[:2]))
    done("stores", "add", run, urls[2])
    done(*train(clicks, run, urls[:2], "--overwrite"))
    assert held_by(urls)[2] == 0
    done("stores", "add", run, urls[2])
    # Under another name, and on servers of its own.
    done(*train(clicks, run, urls[:1], "--overwrite", "--namespace", "other"))
    assert held_by(urls)[1:] == [0, 0]
    with Store(urls[:1]) as store:
        assert owner(store, "run", 0) is None
    done("train", clicks.schedule, "--run", run, "--store", "local:1", "--overwrite", *SMALL)
    assert held_by(urls) == [0, 0, 0]


def test_overwrite_says_where_rows_of_the_old_run_may_be_left(clicks: Clicks, tmp_path: Path, urls: list[str]) -> None:
    run = tmp_path / "run"
    with LocalStores(1, tmp_path / "gone") as gone:
        (url,) = gone.urls
        done(*train(clicks, run, [url, urls[0]]))
        gone.stop(save=True)
        status, _, err = run_here(*train(clicks, run, urls[:1], "--overwrite"))
        assert status == 0, err
        (line,) = [line for line in err.splitlines() if "old run" in line]
        assert f"store {url}: cannot be reached" in line
        later = f"foreload stores delete {url} run"
        assert line.endswith(later)
        gone.start()
        done(*later.split()[1:])
        assert held_by([url]) == [0]


def test_a_run_is_deleted_from_servers_that_others_have_taken_the_place_of(
    clicks: Clicks, tmp_path: Path, urls: list[str]
) -> None:
    run = tmp_path / "run"
    with LocalStores(1, tmp_path / "fourth") as fourth:
        every = [*urls, *fourth.urls]
        stopped(clicks, run, urls)
        # Named in its place, it is rebuilt, and the run goes on with it.
        named = ",".join([*urls[:2], every[3]])
        done("train", clicks.schedule, "--run", run, "--resume", "--store", named)
        assert Run.open(run).manifest.store_urls == (*urls[:2], every[3])
        assert Run.open(run).manifest.former_urls == (urls[2],)
        done("digest", run)
        assert all(held_by(every))
        done("delete", run)
        assert held_by(every) == [0, 0, 0, 0]
