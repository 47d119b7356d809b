"""What a joining host or its trainer can get wrong, before training begins and while others train: it alone is refused, with the reason."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_line import ROOT, Command, free_port
from held import HeldRun, Hold
from small_job import arguments, check_end, summary, synthetic_schedule, train_undisturbed

from foreload.base.job_token import connected, new_token
from foreload.cache.errors import CopyLost
from foreload.trainer.cluster.coordinator.failures import Failures, guests_to_blame
from foreload.trainer.cluster.messages.host_messages import PURPOSE, AskJoin, program_version, send_host_message
from foreload.trainer.cluster.messages.trainers import Failed
from foreload.trainer.errors import FingerprintError, PeerLost
from foreload.trainer.run.event_log import read_events

TOKEN = new_token()
MODEL = "from foreload.trainer.models.dlrm import DLRM as Net\n"


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty steps in four lanes, in several segments."""
    return synthetic_schedule(tmp_path_factory.mktemp("schedule"), 60 * 128, lanes=4, slots=500, further="--segment-bytes 100KB")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another schedule."""
    return synthetic_schedule(tmp_path_factory.mktemp("other"), 1000, lanes=4, slots=500)


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run with one trainer that nothing happened to."""
    return str(summary(train_undisturbed(schedule, tmp_path_factory.mktemp("run")))["digest"])


@dataclass(frozen=True)
class Wrong:
    """A guest with something wrong. reason: what it is told, on its own host; told: what the coordinator's user is told.

    given: further arguments; how: the name in wrong_guest.WRONGS, None for `foreload join` as it is; environment: variables; folder: where it is.
    """

    reason: str
    told: str
    given: Sequence[str] = ()
    how: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT


class Job:
    """A coordinator, whose model is in its working directory, and guests that are not as they should be.

    start: how the coordinator is started, given its command line and further arguments of Command.
    """

    def __init__(
        self,
        start: Callable[..., Command],
        launched: Callable[..., Command],
        schedule: Path,
        run: Path,
        folder: Path,
        *further: str,
    ) -> None:
        (folder / "net.py").write_text(MODEL, encoding="utf-8")
        self._launched, self._folder = launched, folder
        self.place = f"127.0.0.1:{free_port()}"
        given = arguments(schedule, run, "--coordinator", self.place, "--digest", "--model", "net.py:Net", *further)
        self.coordinator = start(given, FORELOAD_JOB_TOKEN=TOKEN, folder=folder)

    def join(self, wrong: Wrong | None = None) -> Command:
        """Start a guest."""
        if wrong is None:
            wrong = Wrong("", "", folder=self._folder)
        variables = {"FORELOAD_JOB_TOKEN": TOKEN} | wrong.environment
        module = "foreload.trainer.cli"
        if wrong.how is not None:
            module = "wrong_guest"
            variables |= {"WRONG": wrong.how, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "harness")])}
        return self._launched("join", self.place, *wrong.given, module=module, folder=wrong.folder, **variables)

    def refuses(self, wrong: Wrong) -> None:
        """Start a guest that is refused, for its reason."""
        status, _, err = self.join(wrong).end()
        assert status == 2, (wrong, err)
        assert re.search(wrong.reason, err), (wrong, err)
        assert self.coordinator.process.poll() is None, (wrong, self.coordinator.said)

    def meets_a_stranger(self) -> None:
        """Somebody with the token sends what is no message, before and after it has offered a trainer."""
        host, _, port = self.place.rpartition(":")
        for offers in (False, True):
            with connected(host, int(port), TOKEN, PURPOSE, 10) as stranger, contextlib.suppress(ConnectionError):
                if offers:
                    send_host_message(stranger, AskJoin("stranger", 1, program_version()))
                stranger.sendall(b"\0\0\0\4\0\0\0\0\0\0\0\0\xff\xfe\xfd\xfc" * 10)
                while stranger.recv(1 << 16):  # until the coordinator has closed the connection
                    pass


def started(launched: Callable[..., Command]) -> Callable[..., Command]:
    """As `hold` starts a command, without holding it."""
    return lambda words, **how: launched(*words, **how)


def wrongs(folder: Path, other: Path, urls: Sequence[str], count: int) -> list[Wrong]:
    """What a guest can get wrong before it has any part in the training: the first `count` of a list."""
    not_there = f"redis://127.0.0.1:{free_port()}"
    swapped = ",".join((urls[1], urls[0], *urls[2:]))
    return [
        Wrong("is not the one that the job trains", "is not the one that the job trains", ["--schedule", str(other)], folder=folder),
        Wrong("is not a folder", "is not a folder", ["--schedule", str(folder / "nowhere")], folder=folder),
        Wrong("this host has foreload 0.0.1, the coordinator ", "", how="version", folder=folder),
        Wrong("refuses this host: the token does not match the job's", "", environment={"FORELOAD_JOB_TOKEN": new_token()}),
        Wrong("model: .*net.py", "model: .*net.py"),  # it is not in the working directory
        Wrong("alike on all hosts", "alike on all hosts", how="numerics", folder=folder),
        Wrong("--address: must be an address", "--address: must be an address", ["--address", "192.0.2.1"], folder=folder),
        Wrong("is not shard 0 of the job's run", "is not shard 0 of the job's run", ["--store", swapped], folder=folder),
        Wrong("--store: must name the 3 store shards", "must name the 3 store shards", ["--store", urls[0]], folder=folder),
        Wrong("shards? 0, 1, 2", "shards? 0, 1, 2", ["--store", ",".join([not_there] * 3)], folder=folder),
        Wrong("ZeroDivisionError", "ZeroDivisionError", how="raises", folder=folder),
        Wrong("was killed by SIGKILL", "was killed by SIGKILL", how="killed at once", folder=folder),
    ][:count]  # fmt: skip


COUNTS = pytest.mark.parametrize("count", [pytest.param(1, id="a few"), pytest.param(20, marks=pytest.mark.full, id="all")])
"""How many of `wrongs` a test goes over: each starts two processes."""


@pytest.mark.full
@COUNTS
def test_before_training_begins(
    schedule: Path,
    undisturbed: str,
    other: Path,
    urls: Sequence[str],
    tmp_path: Path,
    launched: Callable[..., Command],
    count: int,
) -> None:
    run = tmp_path / "run"
    further = ["--store", ",".join(urls), "--trainers", "2", "--peer-timeout", "20"]
    job = Job(started(launched), launched, schedule, run, tmp_path, *further)
    given = [
        *wrongs(tmp_path, other, urls, count),
        Wrong("was killed by SIGKILL", "was killed by SIGKILL", how="killed when it is ready", folder=tmp_path),
        Wrong(
            "refused by the coordinator: it sends no messages",
            "it sends no messages",
            how="stopped when it is ready",
            folder=tmp_path,
        ),
        Wrong("refused by the coordinator: ", "cannot be reached for the batch log", how="elsewhere", folder=tmp_path),
    ][: count + 1]
    for wrong in given:
        job.refuses(wrong)
    job.meets_a_stranger()
    guest = job.join()
    status, _, err = job.coordinator.end()
    assert status == 0, err
    assert guest.end()[0] == 0
    assert (summary(run)["digest"], summary(run)["trainers"]) == (undisturbed, 2)
    assert "Traceback" not in err
    for wrong in given:
        assert not wrong.told or re.search(f"its trainer was refused: .*{wrong.told}", err), (wrong, err)
    assert [event["kind"] for event in read_events(run)].count("call-began") == 1


@pytest.mark.full
def test_the_other_guests_begin_again(
    schedule: Path, undisturbed: str, other: Path, urls: Sequence[str], tmp_path: Path, launched: Callable[..., Command]
) -> None:
    """A guest that is as it should be is started again, and its user need not do anything."""
    run = tmp_path / "run"
    job = Job(started(launched), launched, schedule, run, tmp_path, "--store", ",".join(urls), "--trainers", "3")
    first = job.join()
    job.refuses(Wrong("is not the one that the job trains", "", ["--schedule", str(other)], folder=tmp_path))
    second = job.join()
    status, _, err = job.coordinator.end()
    assert status == 0, err
    (status, _, err), (others_status, _, _) = first.end(), second.end()
    assert (status, others_status) == (0, 0), err
    assert "training could not begin because of another host's trainer; waiting until it begins again" in err
    assert (summary(run)["digest"], summary(run)["trainers"]) == (undisturbed, 3)


@COUNTS
def test_while_others_train(
    schedule: Path,
    undisturbed: str,
    other: Path,
    urls: Sequence[str],
    tmp_path: Path,
    launched: Callable[..., Command],
    hold: Hold,
    count: int,
) -> None:
    """No guest that fails leaves a trainer in its place on the coordinator's host, and the next one joins."""
    run = tmp_path / "run"
    job = Job(hold, launched, schedule, run, tmp_path, "--store", ",".join(urls), "--peer-timeout", "20")
    training = job.coordinator
    assert isinstance(training, HeldRun)
    given = [
        *wrongs(tmp_path, other, urls, count),
        Wrong("was killed by SIGKILL", "was killed by SIGKILL", how="killed when it can join", folder=tmp_path),
    ]
    for wrong in given:
        job.refuses(wrong)
        assert len(training.workers) == 1
    as_members = [
        Wrong("ZeroDivisionError", "ZeroDivisionError", how="fails as a member", folder=tmp_path),
        Wrong("was killed by SIGKILL", "was killed by SIGKILL", how="killed when it is ready", folder=tmp_path),
    ]
    for wrong in as_members:
        job.refuses(wrong)
        training.members(0)
    job.meets_a_stranger()
    guest = job.join()
    training.until(lambda: len(training.status.members) == 2)
    assert len(training.workers) == 1
    err = check_end(training, undisturbed, trainers=2)
    assert guest.end()[0] == 0
    for wrong in given:
        assert not wrong.told or re.search(f"trainer \\d+: did not join: .*{wrong.told}", err), (wrong, err)
    for wrong in as_members:
        assert re.search(f"trainer \\d+: lost \\(.*{wrong.told}.*\\); training goes on", err), (wrong, err)


LOST, OTHER_NUMERICS = Failed(PeerLost.code, "trainer 0: lost a peer"), Failed(FingerprintError.code, "torch: must be 2")


@pytest.mark.parametrize(
    ("reports", "unheard", "blamed"),
    [
        ([(0, LOST), (1, OTHER_NUMERICS), (2, LOST)], {}, [1]),
        ([(0, LOST), (2, LOST)], {1: "was killed by SIGKILL"}, [1]),
        ([(0, LOST), (2, LOST)], {}, [1]),
        ([(0, LOST), (1, LOST), (2, LOST)], {}, [1, 2]),
        ([(1, OTHER_NUMERICS), (2, OTHER_NUMERICS)], {}, [1, 2]),
        ([(0, OTHER_NUMERICS), (1, OTHER_NUMERICS)], {}, []),
        ([(1, OTHER_NUMERICS)], {0: "was killed by SIGKILL"}, []),
        ([], {0: "was killed by SIGKILL"}, []),
    ],
)
def test_who_is_to_blame(reports: list[tuple[int, Failed]], unheard: dict[int, str], blamed: list[int]) -> None:
    """Trainers 1 and 2 are guests; 0 is the coordinator's own, whose failure ends the job."""
    assert sorted(guests_to_blame([1, 2], reports, unheard)) == blamed


def test_a_lost_trainer_explains_nothing() -> None:
    """Whoever lost another trainer, or its copy of a batch log, speaks first; the others get time to say why."""
    failures = Failures({1})
    failures.receive(0, LOST, survived=False)
    failures.receive(0, Failed(CopyLost.code, "trainer 1: cannot be reached for the batch log"), survived=False)
    assert not failures.explained
    failures.receive(1, OTHER_NUMERICS, survived=False)
    assert failures.explained
