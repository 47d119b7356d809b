"""Stores that are down, full, locked, untrusted or another's: one clear line, status 2, nothing left running, no password anywhere."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import SMALL, Command, done, error_of, free_port, refused, refused_apart, run_here
from held import Hold
from tls import TlsServer

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.client.url import PASSWORD_VARIABLE
from foreload.trainer.run import reach

PASSWORD = "s3cret,not@shown"
IN_URL = "s3cret%2Cnot%40shown"
"""The same as it is written in a URL."""


class Server:
    """A redis-server of the test's own, on a TCP port. settings: redis-server's, with _ for -; stores: the same, by its Unix socket."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.port = free_port()
        named = {"port": str(self.port), "bind": "127.0.0.1"} | {
            name.replace("_", "-"): value for name, value in settings.items()
        }
        self.stores = LocalStores(1, folder, settings=named)
        self.url = f"redis://127.0.0.1:{self.port}"

    def command(self, *words: str | int) -> object:
        with Store(self.stores.urls) as store:
            return store.command(0, *words)

    @property
    def keys(self) -> list[object]:
        names = self.command("KEYS", "*")
        assert isinstance(names, list)
        return names


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server")
    with server.stores:
        yield server


def train(clicks: Clicks, run: Path, store: object, *further: object) -> tuple[object, ...]:
    """The words of a command that trains a small model on a store."""
    return ("train", clicks.schedule, "--run", run, "--store", store, *further, *SMALL)


def test_a_store_that_is_down_or_no_store_is_refused_without_its_password(clicks: Clicks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = refused_apart(*train(clicks, run, f"redis://:{IN_URL}@127.0.0.1:1"))
    assert "store redis://:***@127.0.0.1:1: cannot be reached" in line
    assert "shown" not in line
    assert not run.exists()
    for store, words in [
        ("memcached://h", "must begin with redis://, rediss:// or unix://"),
        (f"redis://:{IN_URL}@h:port", "the port must be a number"),
        (f"redis://:{PASSWORD}@h2", "store URL 2 of 2: must begin with redis://"),
        (f"redis://h1,redis://:{PASSWORD}@h2", "write a comma in a password as %2C"),
        ("redis://:s3cret,redis://h2", "redis://***: the port must be a number"),
        ("local:0", "--store: must be local:N or engine:N with N from 1 to 999"),
    ]:
        line = refused(*train(clicks, run, store))
        assert words in line
        assert not any(part in line for part in ("s3cret", "shown")), line


def test_a_store_that_does_not_answer_is_said_to_be_waited_for(
    clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "SAID_AFTER", timedelta())
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        status, _, err = run_here(*train(clicks, run, url, "--store-timeout", 0.1, "--store-patience", 0.2))
    assert f"store {url}: does not answer yet; waiting 0 s more at most\n" in err
    assert f"store {url}: cannot be reached" in error_of(status, err)
    assert not run.exists()


def test_a_store_that_dies_while_training_leaves_a_run_that_keeps_what_it_lacked(
    clicks: Clicks, tmp_path: Path, server: Server, hold: Hold
) -> None:
    run = tmp_path / "run"
    command = hold(train(clicks, run, server.url, "--trainers", 2, "--store-patience", 0))
    os.kill(server.stores.pids[0] or 0, signal.SIGKILL)
    status, _, err = command.end()
    assert f"store {server.url}: " in error_of(status, err)
    # It may come back with its rows, for all that is known.
    for further in (("digest", run), ("evaluate", run), ("export", run, "--out", tmp_path / "export")):
        assert "ended while its servers lacked rows; it keeps these in" in refused(*further)
    assert "cannot be reached" in refused("train", clicks.schedule, "--run", run, "--resume")
    assert not (tmp_path / "export").exists()


def test_a_store_that_gets_full_while_training_is_told_and_the_run_goes_on_once_there_is_room(
    clicks: Clicks, tmp_path: Path, server: Server, hold: Hold
) -> None:
    run = tmp_path / "run"
    wide = (
        "train",
        clicks.schedule,
        "--run",
        run,
        "--store",
        server.url,
        "--dim",
        128,
        "--model-options",
        "top=8-1",
        "bottom=128",
    )
    command = hold(wide)
    # The forecast before step 1 knows of no limit yet; from now on there is room for nothing more.
    with Store(server.stores.urls) as store:
        server.command("CONFIG", "SET", "maxmemory", int(store.info(0)["used_memory"]))
    status, _, err = command.end()
    line = error_of(status, err)
    assert f"store {server.url}: is full" in line
    assert "raise its maxmemory" in line
    # It stopped at a step, not before the first.
    assert len((run / "metrics.jsonl").read_text().splitlines()) > 3
    server.command("CONFIG", "SET", "maxmemory", 0)
    assert "--overwrite" in refused(*wide)
    done("train", clicks.schedule, "--run", run, "--resume")
    undisturbed = (*wide[:3], tmp_path / "undisturbed", *wide[4:])
    done(*undisturbed)
    assert done("digest", run) == done("digest", tmp_path / "undisturbed")


def test_a_store_that_would_evict_rows_is_refused(clicks: Clicks, tmp_path: Path, server: Server) -> None:
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    line = refused(*train(clicks, tmp_path / "run", server.url))
    assert "maxmemory-policy must be noeviction or volatile-*, because others delete rows; got allkeys-lru" in line
    assert not (tmp_path / "run").exists()


def test_a_wrong_password_is_refused_and_no_password_is_shown_or_kept(
    clicks: Clicks, tmp_path: Path, server: Server, hold: Hold
) -> None:
    server.command("ACL", "SETUSER", "ann", "on", f">{PASSWORD}", "~*", "+@all")
    server.command("CONFIG", "SET", "requirepass", PASSWORD)
    try:
        run, address = tmp_path / "run", server.url.removeprefix("redis://")
        texts = []
        for store, environment in [
            (server.url, {}),
            (f"redis://:wr0ng@{address}", {}),
            (f"redis://ann:wr0ng@{address}", {}),
            (server.url, {PASSWORD_VARIABLE: "wr0ng"}),
        ]:
            line = refused(*train(clicks, run, store), **environment)
            assert "refuses the user or password" in line
            assert PASSWORD_VARIABLE in line
            assert not run.exists()
            texts.append(line)
        # Mistakes beside a good password.
        good = f"redis://ann:{IN_URL}@{address}"
        texts.append(refused(*train(clicks, run, good, "--frobnicate")))
        texts.append(refused("train", clicks.schedule, "--run", run, "--stores", good))
        texts.append(refused(*train(clicks, run, f"{good},{good}")))
        texts.append(refused(*train(clicks, run, f"local:{good}")))

        command = hold(train(clicks, run, good, "--trainers", 2))
        command.interrupt(command.waits)
        status, out, err = command.stopped()
        assert status == 130, err
        texts += [out, err]
        # The run remembers the address; the password is asked for again.
        texts.append(refused("train", clicks.schedule, "--run", run, "--resume"))
        assert "refuses the user or password" in texts[-1]
        texts.append(done("train", clicks.schedule, "--run", run, "--resume", "--digest", **{PASSWORD_VARIABLE: PASSWORD}))
        texts.append(refused("digest", run))
        texts.append(refused("digest", run, "--store", f"redis://ann:wr0ng@{address}"))
        digest = done("digest", run, "--store", good)
        assert digest.strip() == json.loads((run / "summary.json").read_text())["digest"]
        status, out, err = Command("stores", "status", run).end()
        assert (status, "down" in out) == (2, True)
        texts += [out, err]

        texts += [path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()]
        for text in texts:
            assert not any(secret in text for secret in (PASSWORD, IN_URL, "s3cret", "wr0ng")), text
    finally:
        # The fixture's shutdown has no password.
        with Store([server.stores.urls[0].replace("unix://", f"unix://:{IN_URL}@")]) as client:
            client.command(0, "CONFIG", "SET", "requirepass", "")


def test_only_a_store_with_a_trusted_certificate_is_trained_on(
    clicks: Clicks, tmp_path: Path, tls_server: TlsServer, certificates: Path
) -> None:
    run, url = tmp_path / "run", f"rediss://localhost:{tls_server.port}"
    for option, words in [
        ("", "its certificate is not trusted"),
        (f"?ssl_ca_certs={certificates}/stranger.pem", "its certificate is not trusted"),
        (f"?ssl_ca_certs={certificates}/none.pem", "ssl_ca_certs must be an existing file"),
    ]:
        assert words in refused(*train(clicks, run, url + option))
        assert not run.exists()
    trusted = done(*train(clicks, run, tls_server.url, "--digest"))
    # The options are no secret: the run has kept them.
    assert trusted.strip().endswith(done("digest", run).strip())


def test_a_namespace_that_is_another_runs_is_refused_and_given_up_by_overwrite_only(
    clicks: Clicks, tmp_path: Path, server: Server
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    named = ("--namespace", "clicks")
    done(*train(clicks, first, server.url, "--digest", *named))
    keys = sorted(str(key) for key in server.keys)
    line = refused(*train(clicks, second, server.url, *named))
    assert "namespace clicks already belongs to a run" in line
    assert "--overwrite removes its rows" in line
    assert sorted(str(key) for key in server.keys) == keys
    # The refused run took no folder, and the first one's rows are as they were.
    line = refused("digest", second)
    assert "never began to train" in line
    done("digest", first)

    done(*train(clicks, second, server.url, "--overwrite", *named))
    for command in (("digest", first), ("evaluate", first)):
        assert "namespace clicks" in refused(*command)
    done("digest", second)
    # A run that was deleted by hand leaves its namespace; its folder is still there, empty.
    for path in sorted(second.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert "namespace clicks already belongs to a run" in refused(*train(clicks, second, server.url, *named))


@pytest.mark.full
def test_a_run_goes_on_with_its_own_store_shards_in_their_order_only(
    clicks: Clicks, tmp_path: Path, server: Server, hold: Hold
) -> None:
    run = tmp_path / "run"
    other = Server(tmp_path / "other")
    with other.stores:
        command = hold(train(clicks, run, f"{server.url},{other.url}"))
        command.interrupt(command.waits)
        assert command.stopped()[0] == 130
        resume = ("train", clicks.schedule, "--run", run, "--resume", "--store")
        assert "is shard 1 of 2 of namespace run, not 0 of 2" in refused(*resume, f"{other.url},{server.url}")
        assert f"what the run was started with, {server.url},{other.url}; got {server.url}" in refused(*resume, server.url)
        other.command("FLUSHALL")
        assert "has no namespace run" in refused(*resume, f"{server.url},{other.url}")
    assert "cannot be reached" in refused(*resume, f"{server.url},{other.url}")
