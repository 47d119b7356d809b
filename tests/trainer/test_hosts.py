"""`foreload train --coordinator` and `foreload join`: trainers that share no folder with the run, over the loopback."""

from __future__ import annotations

import signal
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import Command, free_port, main, refused, run_here
from held import Hold, send
from injection import AnyFault, CallFault
from small_job import arguments, check_end, failing_model, summary, synthetic_schedule, train_undisturbed
from waiting import DEADLINE_SECONDS

from foreload.base.job_token import new_token
from foreload.cache.client.local import LocalStores
from foreload.trainer.cluster.coordinator.terms import first_term, next_term
from foreload.trainer.cluster.messages.trainers import TermLeft
from foreload.trainer.run.directory import Run
from foreload.trainer.run.event_log import read_events

TOKEN = new_token()
OWN_NET = """
import torch
from sizes_of_net import HIDDEN
from torch import nn


class Net(nn.Module):
    def __init__(self, spec, *, bottom="", top=""):  # options that the tests' models are given
        super().__init__()
        self.net = nn.Sequential(nn.Linear(spec.dense_width + spec.width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, dense, embeddings):
        return self.net(torch.cat([dense, *embeddings.values()], 1)).squeeze(1)
"""


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of 60 steps in four lanes, with evaluation after each."""
    return synthetic_schedule(
        tmp_path_factory.mktemp("schedule"),
        8500,
        lanes=4,
        slots=500,
        further="--eval-fraction 0.1 --epochs 2 --segment-bytes 100KB",
    )


@pytest.fixture(scope="module")
def undisturbed(schedule: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run with one trainer that nothing happened to."""
    run = train_undisturbed(schedule, tmp_path_factory.mktemp("run"))
    return str(summary(run)["digest"])


@pytest.fixture
def servers(urls: Sequence[str]) -> list[str]:
    """For --store: three empty servers."""
    return ["--store", ",".join(urls)]


class Job:
    """A coordinator and hosts that join it, as processes of this machine."""

    def __init__(
        self,
        launched: Callable[..., Command],
        hold: Hold,
        schedule: Path,
        run: Path,
        *further: str,
        train: Callable[..., list[str]] = arguments,
        faults: Sequence[AnyFault] = (),
    ) -> None:
        """train: gives the command line, of schedule, run and further words; faults: of the coordinator's processes."""
        self.launched = launched
        self.place = f"127.0.0.1:{free_port()}"
        given = train(schedule, run, "--coordinator", self.place, "--digest", "--peer-timeout", "30", *further)
        through = 10 if "--resume" not in further else Run.open(run).saved_status().step + 10
        self.coordinator = hold(given, through, wait=False, faults=faults, FORELOAD_JOB_TOKEN=TOKEN)

    def join(self, *further: str, **environment: Any) -> Command:
        return self.launched("join", self.place, *further, **({"FORELOAD_JOB_TOKEN": TOKEN} | environment))


@pytest.mark.parametrize(
    "who",
    [
        pytest.param("guest", id="a joined one"),
        pytest.param("leader", marks=pytest.mark.full, id="the one beside the run's folder"),
    ],
)
def test_a_host_is_lost_and_the_other_goes_on(
    schedule: Path, undisturbed: str, servers: list[str], tmp_path: Path, launched: Callable[..., Command], hold: Hold, who: str
) -> None:
    run = tmp_path / "run"
    job = Job(launched, hold, schedule, run, *servers, "--trainers", "2", "--copies", "2", "--no-restart")
    guest = job.join()
    job.coordinator.until(job.coordinator.waits)
    (guest if who == "guest" else job.coordinator).workers[0].kill()
    status, _, err = job.coordinator.end()
    assert status == 0, err
    told = guest.end()
    assert summary(run)["digest"] == undisturbed, err
    assert summary(run)["steps"] == 120
    assert "training goes on after step" in err
    if who == "guest":
        assert told[0] == 2
        assert "was killed by SIGKILL" in told[2]
    else:
        assert told[0] == 0, told
        assert "ended normally" in told[2]
    lost = [event["trainer"] for event in read_events(run) if event["kind"] == "trainer-lost"]
    assert lost == [1 if who == "guest" else 0]
    # Nothing was logged in the run's folder until the end; then it has where each lane stands.
    assert main(["scrub", str(run)]) == 0


@pytest.mark.full
def test_a_stop_and_a_resume_over_hosts(
    schedule: Path, undisturbed: str, servers: list[str], tmp_path: Path, launched: Callable[..., Command], hold: Hold
) -> None:
    run = tmp_path / "run"
    job = Job(launched, hold, schedule, run, *servers, "--trainers", "3", "--copies", "2", "--local-trainers", "1")
    guests = [job.join() for _ in range(2)]
    job.coordinator.until(job.coordinator.waits)
    job.coordinator.process.terminate()
    assert job.coordinator.stopped()[0] == 143
    assert [guest.end()[0] for guest in guests] == [0, 0]
    job = Job(launched, hold, schedule, run, *servers, "--resume", "--trainers", "2", "--copies", "2")
    guest = job.join()
    job.coordinator.until(job.coordinator.waits)
    guest.workers[0].kill()
    status, _, err = job.coordinator.end()
    assert status == 0, err
    guest.end()
    assert summary(run)["digest"] == undisturbed


@pytest.mark.full
def test_hosts_join_and_leave_while_others_train(
    schedule: Path, undisturbed: str, servers: list[str], tmp_path: Path, launched: Callable[..., Command], hold: Hold
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    job = Job(launched, hold, schedule, run, *servers)
    training = job.coordinator
    training.until(training.waits)
    copy.symlink_to(training.schedule.path)
    guest = job.join("--schedule", str(copy))
    training.members(0, 1)
    training.hosting(0, 1)
    guest.process.send_signal(signal.SIGINT)
    training.hosting(0)
    assert guest.end()[0] == 0
    check_end(training, undisturbed, trainers=1)
    kinds = [event["kind"] for event in read_events(run)]
    assert kinds.count("trainer-joined") == kinds.count("trainer-left") == 1


@pytest.mark.full
def test_a_host_whose_model_is_of_other_code_is_refused_and_the_others_train_on(
    schedule: Path,
    servers: list[str],
    tmp_path: Path,
    launched: Callable[..., Command],
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, hidden in ((here, 4), (there, 8)):
        folder.mkdir()
        (folder / "sizes_of_net.py").write_text(f"HIDDEN = {hidden}\n")
        (folder / "net.py").write_text(OWN_NET)
    monkeypatch.chdir(here)
    job = Job(launched, hold, schedule, tmp_path / "run", *servers, "--model", "net.py:Net")
    job.coordinator.until(job.coordinator.waits)
    guest = job.join("--schedule", str(job.coordinator.schedule.path), within=["sh", "-c", 'cd "$0" && exec "$@"', str(there)])
    assert guest.end()[0] == 2
    job.coordinator.members(0)
    status, _, err = job.coordinator.end()
    assert status == 0, err
    (line,) = [line for line in err.splitlines() if "the code of its model" in line]
    assert f"is not what the job began with: {there / 'sizes_of_net.py'} has other contents; put the same files there" in line


@pytest.mark.full
def test_trainers_on_two_hosts_whose_launcher_is_killed_stop_and_go_on_exactly(
    schedule: Path, undisturbed: str, servers: list[str], tmp_path: Path, launched: Callable[..., Command], hold: Hold
) -> None:
    run = tmp_path / "run"
    job = Job(launched, hold, schedule, run, *servers, "--trainers", "2")
    guest = job.join()
    job.coordinator.until(job.coordinator.waits)
    job.coordinator.process.kill()
    _, err = job.coordinator.communicate()
    assert not psutil.wait_procs(job.coordinator.remains.processes(), timeout=DEADLINE_SECONDS)[1]
    assert "its launcher was killed; stopped after step " in err
    assert guest.end()[0] == 0
    saved = Run.open(run).saved_status()
    assert (saved.state, saved.totals["steps"]) == ("stopped", saved.step + 1)
    job = Job(launched, hold, schedule, run, *servers, "--resume", "--trainers", "2")
    guest = job.join()
    assert job.coordinator.end()[0] == 0
    assert guest.end()[0] == 0
    assert summary(run)["digest"] == undisturbed


@pytest.mark.full
@pytest.mark.parametrize("leads", ["the one beside the run's folder", "a joined one"])
def test_a_launcher_that_is_killed_while_lanes_change_hands_over_hosts_loses_no_step(
    schedule: Path, undisturbed: str, servers: list[str], tmp_path: Path, launched: Callable[..., Command], hold: Hold, leads: str
) -> None:
    """The next term is stated by nobody: a trainer that has the run's folder notes it there, whoever leads."""
    run = tmp_path / "run"
    killed = CallFault("foreload.trainer.cluster.coordinator.membership:TrainerLeft", signal.SIGKILL)
    job = Job(launched, hold, schedule, run, *servers, "--trainers", "2", "--copies", "2", faults=[killed])
    guest = job.join()
    job.coordinator.until(job.coordinator.waits)
    if leads == "a joined one":
        job.coordinator.workers[0].kill()
        job.coordinator.members(1, 2)
        job.coordinator.hosting(1, 2)
        assert job.coordinator.status.lanes[0] == 1
    step = job.coordinator.step
    guest.process.send_signal(signal.SIGINT)
    job.coordinator.process.wait()
    job.coordinator.schedule.release()
    _, err = job.coordinator.communicate()
    assert not psutil.wait_procs(job.coordinator.remains.processes(), timeout=DEADLINE_SECONDS)[1]
    assert "its launcher was killed; stopped after step " in err, err
    guest.end()
    saved = Run.open(run).saved_status()
    assert saved.state == "stopped"
    assert saved.step >= step
    job = Job(launched, hold, schedule, run, *servers, "--resume", "--trainers", "2")
    guest = job.join()
    assert job.coordinator.end()[0] == 0
    assert guest.end()[0] == 0
    assert summary(run)["digest"] == undisturbed


@pytest.mark.parametrize("parity", ["2+1", pytest.param("off", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "left", [pytest.param((0, 1), id="both"), pytest.param((1,), marks=pytest.mark.full, id="the one elsewhere alone")]
)
def test_what_servers_lack_that_stand_still_is_kept_over_hosts(
    schedule: Path,
    undisturbed: str,
    tmp_path: Path,
    launched: Callable[..., Command],
    hold: Hold,
    parity: str,
    left: tuple[int, ...],
) -> None:
    """What a trainer without the run's folder keeps comes into it: rows, the log's records, and the dense part where it leads."""
    run = tmp_path / "run"
    with LocalStores(3, tmp_path / "servers") as stores:
        place = ["--store", ",".join(stores.urls), "--parity", parity]
        further = ["--trainers", "2", "--copies", "2", "--no-restart", "--store-patience", "0", "--store-timeout", "1"]
        job = Job(launched, hold, schedule, run, *place, *further)
        guest = job.join()
        job.coordinator.until(job.coordinator.waits)
        if left == (1,):
            job.coordinator.workers[0].kill()
            job.coordinator.members(1)
        step = job.coordinator.step
        send(stores, signal.SIGSTOP)
        status, _, err = job.coordinator.end()
        send(stores, signal.SIGCONT)
        assert status == 2, err
        assert "the rows that its servers lack are kept in" in err, err
        assert "Traceback" not in err
        assert guest.end()[0] == 0
        assert [event["step"] for event in read_events(run) if event["kind"] == "rows-kept"] == [step]
        status, _, err = run_here(*arguments(schedule, run, *place, "--resume", "--digest"))
        assert status == 0, err
        assert "the rows that it kept are on its servers again" in err
        assert summary(run)["digest"] == undisturbed


@pytest.mark.full
def test_a_model_that_fails_on_another_host_costs_no_step(
    schedule: Path,
    servers: list[str],
    tmp_path: Path,
    launched: Callable[..., Command],
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "mine.py").write_text(failing_model(5))
    (there / "fails").write_text("1 / 0")
    monkeypatch.chdir(here)

    def train(schedule: Path, run: Path, *further: str) -> list[str]:
        own = ("--model", "mine.py:Fails", "--dim", "4", "--history", "off", "--no-report")
        return ["train", str(schedule), "--run", str(run), *own, *further]

    status, _, err = run_here(*train(schedule, Path("whole"), "--store", "local:1", "--digest"))
    assert status == 0, err
    job = Job(launched, hold, schedule, Path("run"), *servers, "--trainers", "2", train=train)
    guest = job.join("--schedule", str(job.coordinator.schedule.path), within=["sh", "-c", 'cd "$0" && exec "$@"', str(there)])
    status, _, err = job.coordinator.end()
    assert status == 2
    assert "division by zero (see above) (training stopped after step 4, with everything saved)" in err
    assert "ZeroDivisionError" in guest.end()[2]
    status, _, err = run_here(*train(schedule, Path("run"), *servers, "--resume", "--digest"))
    assert status == 0, err
    assert summary(Path("run"))["digest"] == summary(Path("whole"))["digest"]


def test_who_has_another_token_is_refused_and_harms_nothing(
    schedule: Path, servers: list[str], tmp_path: Path, launched: Callable[..., Command], hold: Hold
) -> None:
    run = tmp_path / "run"
    place = f"127.0.0.1:{free_port()}"
    coordinator = launched(*arguments(schedule, run, "--coordinator", place, "--trainers", "2", *servers))
    # It listens by then, and has written the token.
    coordinator.until(lambda: "waiting for 1 of 2 trainers: foreload join " in coordinator.said)
    assert stat.S_IMODE((run / "token").stat().st_mode) == 0o600
    wrong = tmp_path / "wrong"
    wrong.write_text(new_token())
    assert refused("join", place, "--token-file", wrong) == (
        f"coordinator at {place}: refuses this host: the token does not match the job's; give what RUN/token has there, with --token-file"
    )
    with socket.create_connection(("127.0.0.1", int(place.split(":")[1]))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    guest = launched("join", place, "--token-file", run / "token")
    status, _, err = coordinator.end()
    assert status == 0, err
    assert "127.0.0.1: refused at --coordinator: the token does not match the job's" in err
    assert guest.end()[0] == 0


@pytest.mark.parametrize(
    "machines", [{0: "", 1: "", 2: "b", 3: "b"}, {0: "", 1: "b", 2: "", 3: "b"}, {0: "", 1: "", 2: "", 3: "b"}]
)
def test_copies_lie_on_other_hosts_where_there_are_some(machines: dict[int, str]) -> None:
    term = first_term(1, range(4), 8, 2, -1, machines)
    assert all(machines[holder] != machines[host] for host, (holder,) in zip(term.hosts, term.copies, strict=True))
    # Where a host is lost with all that were on it, the others have every lane.
    left = [trainer for trainer in range(4) if machines[trainer] == ""]
    copied = {t: tuple(lane for lane, holders in enumerate(term.copies) if t in holders) for t in left}
    standings = {t: TermLeft(1, 5, copied[t], False, "it is gone") for t in left}
    assert set(next_term(term, standings, 2, machines=machines).hosts) <= set(left)


@pytest.mark.parametrize(
    ("further", "rule"),
    [
        (["--coordinator", "0.0.0.0:5000"], "--coordinator: must name one address, at which other hosts reach this one"),
        (["--coordinator", "here"], "--coordinator: must be HOST:PORT"),
        (["--coordinator", "h:1", "--store", "local:3"], "--store: must be URLs of servers that all hosts reach"),
        (["--local-trainers", "2"], "--local-trainers: is for trainers on several hosts"),
        (["--coordinator", "h:1", "--local-trainers", "2"], "--local-trainers: must be at most --trainers, 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(schedule: Path, tmp_path: Path, further: list[str], rule: str) -> None:
    given = arguments(schedule, tmp_path / "run", "--store", "redis://127.0.0.1:1", *further)
    assert refused(*given).startswith(rule)


def test_a_coordinator_that_is_not_there_is_told(tmp_path: Path) -> None:
    told = refused("join", f"127.0.0.1:{free_port()}", "--wait", "0", FORELOAD_JOB_TOKEN=TOKEN)
    assert "cannot be reached" in told
    assert "--token-file: is missing" in refused("join", "127.0.0.1:1")
