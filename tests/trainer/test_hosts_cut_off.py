"""Two hosts as network namespaces, the run's folder hidden from the second, which is cut off while it trains: the other one goes on."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Command, main
from held import Hold
from small_job import arguments, summary, synthetic_schedule

from foreload.base.job_token import new_token
from foreload.cache.client.local import LocalStores
from foreload.trainer.run.event_log import read_events

TOKEN = new_token()
FIRST, SECOND = "10.213.0.1", "10.213.0.2"


@dataclass(frozen=True)
class Hosts:
    """Two of them, with a link between. names: of their namespaces; ends: of the link, in each."""

    names: tuple[str, str]
    ends: tuple[str, str]

    def within(self, host: int) -> list[str]:
        """The command line that starts something on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut_off(self) -> None:
        """Nothing goes from one to the other any more."""
        subprocess.run(["ip", "-n", self.names[1], "link", "set", self.ends[1], "down"], check=True)


def _made(*commands: Sequence[str]) -> None:
    for command in commands:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"network namespaces cannot be made here: {' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, which know no others."""
    mark = uuid.uuid4().hex[:8]
    made = Hosts((f"a{mark}", f"b{mark}"), (f"va{mark}", f"vb{mark}"))
    try:
        _made(
            ["unshare", "--mount", "true"],
            ["ip", "netns", "add", made.names[0]],
            ["ip", "netns", "add", made.names[1]],
            [
                "ip",
                "link",
                "add",
                made.ends[0],
                "netns",
                made.names[0],
                "type",
                "veth",
                "peer",
                made.ends[1],
                "netns",
                made.names[1],
            ],
        )
        for name, end, address in zip(made.names, made.ends, (FIRST, SECOND), strict=True):
            _made(
                ["ip", "-n", name, "address", "add", f"{address}/24", "dev", end],
                ["ip", "-n", name, "link", "set", end, "up"],
                ["ip", "-n", name, "link", "set", "lo", "up"],
            )
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.full
@pytest.mark.parametrize("parity", ["2+1", "off"])
def test_a_host_that_is_cut_off_is_lost_and_the_other_goes_on(
    hosts: Hosts, tmp_path: Path, launched: Callable[..., Command], hold: Hold, parity: str
) -> None:
    schedule = synthetic_schedule(tmp_path, 8500, lanes=4, slots=500, further="--eval-fraction 0.1 --epochs 2")
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    assert main(arguments(schedule, undisturbed, "--store", "local:1", "--digest")) == 0
    with LocalStores(3, tmp_path / "stores") as stores:
        place = f"{FIRST}:5000"
        further = [
            "--store",
            ",".join(stores.urls),
            "--parity",
            parity,
            "--trainers",
            "2",
            "--copies",
            "2",
            "--peer-timeout",
            "3",
        ]
        given = arguments(schedule, run, *further, "--coordinator", place, "--digest", "--no-restart")
        coordinator = hold(given, 15, wait=False, within=hosts.within(0), FORELOAD_JOB_TOKEN=TOKEN)
        hidden = f'mkdir -p "{run}" && mount -t tmpfs none "{run}" && exec "$@"'
        guest = launched(
            "join", place, within=[*hosts.within(1), "unshare", "--mount", "sh", "-c", hidden, "sh"], FORELOAD_JOB_TOKEN=TOKEN
        )
        coordinator.until(coordinator.waits)
        hosts.cut_off()
        status, _, err = coordinator.end()
        assert status == 0, err
        told = guest.end()
    assert "trainer 1: lost (it sends no messages); training goes on after step" in err
    assert told[0] == 2
    assert "so this host counts as lost; it stops" in told[2]
    assert summary(run)["digest"] == summary(undisturbed)["digest"]
    lost = [event["trainer"] for event in read_events(run) if event["kind"] == "trainer-lost"]
    assert lost == [1]
