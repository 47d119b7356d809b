"""The run of an episode of the campaign, as the user of its machine sees it: its commands, its processes, its store shards and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from campaign_plan import DISK_FAULTS, Plan
from campaign_servers import Servers
from command_line import Remains
from forking import FORKER, ForkedCommand

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.trainer.cluster.messages.control import RunStatus, training_status
from foreload.trainer.errors import TrainerError
from foreload.trainer.run.directory import PLACEMENT

ROOT = Path(__file__).resolve().parents[2]
SPARES = 4
"""Servers by URL that store shards may move to."""
DISK_BYTES = 128 << 20
"""Size of the disk that the fault `disk` fills."""
DEADLINE_SECONDS = 900
"""How long a command may take, disturbed."""
OWN_MODEL = """
import os
import torch

class Net(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.out = torch.nn.Linear(spec.dense_width + spec.width, 1)
        self.fails = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fails")

    def forward(self, dense, embeddings):
        if os.path.exists(self.fails):
            raise RuntimeError("a bad day")
        return self.out(torch.cat([dense, *embeddings.values()], 1)).squeeze(1)
"""
SETTINGS = "--dim 4 --lr 0.05"
MODEL = "--model-options bottom=8-4 top=8-1"


def model_words(own: Path | None) -> str:
    """What the command line says of the model. own: the folder of the user's own."""
    return f"{SETTINGS} {MODEL if own is None else f'--model {own}/net.py:Net'}"


class Violation(Exception):
    """Something that must not happen."""


@dataclass(slots=True)
class Started:
    """A `foreload` command in a process of its own. out, err: the files to which it prints; began: by time.monotonic()."""

    process: subprocess.Popen[bytes] | ForkedCommand
    out: Path
    err: Path
    began: float

    @property
    def said(self) -> str:
        """All that it has printed to stderr so far."""
        return self.err.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The error that it ended with; "" for none."""
        lines = [line for line in self.said.splitlines() if line.startswith("foreload: error: ")]
        return lines[-1] if lines else ""

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.monotonic() - self.began

    def end(self) -> int:
        """Wait for it; returns its exit status. Raises Violation."""
        try:
            return self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise Violation(f"hangs for {DEADLINE_SECONDS} s; it said {self.said[-1500:]!r}") from None


class CampaignRun:
    """A run, its servers and its log. forked: commands are forked from one process, which has imported everything."""

    def __init__(self, plan: Plan, schedule: Path, folder: Path, certificates: Path, forked: bool) -> None:
        self.plan, self._schedule, self._forked = plan, schedule, forked
        self.folder, self.path, self.copy = folder, folder / "run", folder / "copy"
        self.own = folder if plan.own else None
        """The folder of the user's own model."""
        self.moves = plan.adjusts
        """Whether there are, or are to be, other store shards than at first."""
        self.calls = 0
        """Of `foreload train`, so far."""
        self.servers: Servers | None = None
        self._certificates = certificates
        self._remains = Remains()
        self._environment = os.environ | {"PYTHONPATH": str(ROOT)} | self._remains.environment
        self._log = (folder / "log").open("w")
        self.note(str(plan))
        self.write_model()

    def note(self, text: str) -> None:
        """Write a line of the log."""
        self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self._log.flush()

    def open(self) -> None:
        """Start the servers, and mount the disk, that the plan needs."""
        if self.plan.store != "local":
            tls = self.plan.store == "tls"
            count = self.plan.shards + (0 if tls else SPARES)
            self.servers = Servers(self.folder, count, self._remains.environment, self._certificates if tls else None)
        if any(fault.kind in DISK_FAULTS for fault in self.plan.faults):
            disk = self.folder / "disk"
            disk.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
            if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
                self.path = disk / "run"

    def close(self) -> None:
        """Leave nothing, but the folder."""
        self._remains.kill()
        for process in self._processes():
            process.kill()
        for pid in self.local_pids():
            os.kill(pid, signal.SIGKILL)
        if self.servers is not None:
            self.servers.close()
        self._remains.remove()
        self._log.close()
        if self.on_small_disk:
            subprocess.run(["umount", "--lazy", str(self.path.parent)], check=False)

    @property
    def begun(self) -> bool:
        """Whether the run has ever begun to train."""
        return (self.path / "status.json").exists()

    @property
    def on_small_disk(self) -> bool:
        """Whether the run has a disk of its own, so small that a fault can fill it."""
        return self.path.parent != self.folder

    def write_model(self, more: str = "") -> None:
        """Write the user's own model, where the plan has one. more: to add to its code."""
        self.edited = bool(more)
        if self.own is not None:
            (self.own / "net.py").write_text(OWN_MODEL + more)

    # -- commands ----------------------------------------------------------------------------------------------------------------

    def train(self, *further: str) -> Started:
        """Start `foreload train`."""
        store = f"local:{self.plan.shards}" if self.servers is None else ",".join(self.servers.urls[: self.plan.shards])
        trainers = self.plan.trainers[self.calls % len(self.plan.trainers)]
        words = [
            *f"train {self._schedule} --run {self.path} --trainers {trainers} {model_words(self.own)}".split(),
            # Once shards may have moved, the run knows where they are; one that never began to train is told like a new one.
            *(() if self.moves and self.begun else ("--store", store)),
            *(("--auto",) if self.plan.adjusts else ()),
            *("--copies", str(self.plan.copies)),
            *(("--store-timeout", "3") if self.plan.members else ()),
            *(() if self.plan.peer_timeout is None else ("--peer-timeout", str(self.plan.peer_timeout))),
            *further,
        ]
        if self.plan.shards >= 3 and "--resume" not in further:
            words += ["--parity", self.plan.parity]
        return self.command(*words)

    def command(self, *words: object) -> Started:
        """Start a command."""
        place = Path(tempfile.mkdtemp(dir=self.folder, prefix="call-"))
        out, err = place / "out", place / "err"
        with out.open("wb") as to_out, err.open("wb") as to_err:
            if self._forked:
                forked = FORKER.command(list(map(str, words)), self._environment, self._remains.name, to_out, to_err)
                return Started(forked, out, err, time.monotonic())
            process = subprocess.Popen(
                [sys.executable, "-m", "foreload.trainer.cli", *map(str, words)],
                env=self._environment, stdin=subprocess.DEVNULL, stdout=to_out, stderr=to_err, start_new_session=True,
            )  # fmt: skip
        return Started(process, out, err, time.monotonic())

    def ended(self, *words: object, may_end: tuple[int, ...] = (0, 2, 3)) -> Started:
        """Run a command to its end. Raises Violation for a traceback, and for another exit status than it may have."""
        command = self.command(*words)
        code = command.end()
        if "Traceback" in command.said or code not in may_end:
            raise Violation(f"{words[0]} {words[1]}: exit {code}: {command.said[-1500:]}")
        return command

    def training(self) -> RunStatus | None:
        """What the run says while it trains, else None."""
        with contextlib.suppress(TrainerError):
            status = training_status(self.path)
            if status is not None and status.state == "training":
                return status
        return None

    # -- processes ---------------------------------------------------------------------------------------------------------------

    def _processes(self) -> list[psutil.Process]:
        """All of the episode that are alive, but servers where commands are forked."""
        return self._remains.processes() + (FORKER.processes() if self._forked else [])

    def workers(self) -> list[psutil.Process]:
        """The trainers, also those that start."""
        return [process for process in self._remains.processes() if "foreload.trainer.cluster.member.worker" in _words(process)]

    def strangers(self) -> list[str]:
        """Processes of the episode that are no servers."""
        words = [_words(process) for process in self._processes()]
        return [text for text in words if text and "redis-server" not in text and "valkey-server" not in text]

    def local_pids(self) -> list[int]:
        """The servers of the run's own that are alive. (Their environment cannot be seen, so no mark.)"""
        with contextlib.suppress(CacheError, OSError):
            local = LocalStores.find(self.path / "stores")
            return [pid for pid in local.pids if pid] if local is not None else []
        return []

    # -- store shards ------------------------------------------------------------------------------------------------------------

    def live_shards(self) -> list[int]:
        """The numbers of the run's store shards."""
        with contextlib.suppress(CacheError):
            return Placement.load(self.path / PLACEMENT).live
        return list(range(self.plan.shards))

    def server_of(self, shard: int) -> int:
        """Which of the episode's servers a store shard has. Raises ValueError where it has none."""
        assert self.servers is not None
        manifest = self.json("manifest.json")
        return shard if manifest is None else self.servers.urls.index(manifest["store_urls"][shard])

    def server_pid(self, shard: int) -> int | None:
        """The process of a store shard's server; None where it is dead."""
        if self.servers is not None:
            with contextlib.suppress(ValueError, IndexError):
                return self.servers.pid(self.server_of(shard))
            return None
        with contextlib.suppress(CacheError, OSError, IndexError):
            local = LocalStores.find(self.path / "stores")
            return local.pids[shard] if local is not None else None
        return None

    def server_url(self, shard: int) -> str:
        """Where a store shard's server answers without TLS. Raises OSError, ValueError."""
        if self.servers is not None:
            return self.servers.direct(self.server_of(shard))
        local = LocalStores.find(self.path / "stores")
        if local is None:
            raise OSError("no servers")
        return local.urls[shard]

    def spare(self) -> list[str]:
        """A further server, where there is one."""
        if self.servers is None:
            return ["local"]
        manifest = self.json("manifest.json") or {"store_urls": self.servers.urls[: self.plan.shards]}
        return [url for url in self.servers.urls[self.plan.shards :] if url not in manifest["store_urls"]][:1]

    @contextlib.contextmanager
    def connected(self, shard: int) -> Iterator[Store]:
        """A client of one store shard's server."""
        with Store([self.server_url(shard)], timedelta(seconds=5), timedelta(seconds=1)) as store:
            yield store

    def tell(self, shard: int, *words: str | int) -> None:
        """Give a store shard's server a command."""
        with self.connected(shard) as store:
            store.command(0, *words)

    def json(self, name: str) -> dict[str, Any] | None:
        """A file of the run; None where it is not there, or is not whole."""
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
