"""A randomised campaign from outside: trainings on which a bad day is inflicted, through the command line and the servers alone.

    python tests/campaign.py --seed 1 --minutes 5 [--focus members|stores] [--episode N] [--json FILE]

An episode is a pure function of (seed, number, focus): a kind of store, a code, trainers, and a list of faults, each at a step or a moment. Its log
has the plan, and what was done when: as far as timing allows, --episode plays it again. After each
call of `foreload train` it is looked at what is left, and the run is gone on with, until it ends with the digest of an undisturbed run, or a
command refuses with one clear line where it may. What may not be: another digest, a traceback, a stop that the fault does not excuse,
`--overwrite` as the only way on, a trainer left behind, a server left behind that is not the only one to hold rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/trainer")]

from campaign_plan import (  # noqa: E402
    ALL_SERVERS_FAULTS,
    DISK_FAULTS,
    FAILING_MODEL,
    LANES,
    LOOKS,
    LOST,
    MEMBER_FAULTS,
    MEMBER_LANES,
    MEMBER_STEPS,
    MODEL_FAULTS,
    SERVER_FAULTS,
    STEPS,
    Fault,
    Plan,
)
from campaign_servers import Servers  # noqa: E402

from foreload.trainer.compute import numerics  # noqa: E402

# Before torch is imported, here and in the process that forks.
numerics.set_environment()
from command_line import Remains, free_port  # noqa: E402
from forking import FORKER, ForkedCommand  # noqa: E402
from tls import write_certificates  # noqa: E402

from foreload.cache.client.local import LocalStores  # noqa: E402
from foreload.cache.client.store import Store  # noqa: E402
from foreload.cache.errors import CacheError  # noqa: E402
from foreload.cache.parity.placement import Placement  # noqa: E402
from foreload.trainer.cluster.control import RunStatus, training_status  # noqa: E402
from foreload.trainer.errors import TrainerError  # noqa: E402
from foreload.trainer.run.directory import PLACEMENT  # noqa: E402
from foreload.trainer.run.event_log import CallEnded, CallFailed, read_events  # noqa: E402

MOST_CALLS = 16
"""Of `foreload train` in an episode; each but the first goes on with the run."""
NOTICED_SECONDS = 2.0
"""After which a run has seen what became of a store shard."""
SPARES = 4
"""Servers by URL that store shards may move to."""
DISK_BYTES = 128 << 20
"""Size of the disk that the fault `disk` fills."""
DEADLINE_SECONDS = 900
"""How long a command may take, disturbed."""
PREPARE = "--format synthetic --values 3000 --batch-size 64 --slots 700"
SETTINGS = "--dim 4 --lr 0.05"
MODEL = "--model-options bottom=8-4 top=8-1"
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


def model_words(own: Path | None) -> str:
    """What the command line says of the model. own: the folder of the user's own."""
    return f"{SETTINGS} {MODEL if own is None else f'--model {own}/net.py:Net'}"


class Violation(Exception):
    """Something that may not be."""


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


class Episode:
    """Runs a plan. Raises Violation."""

    def __init__(self, plan: Plan, schedule: Path, digest: str, folder: Path, certificates: Path, forked: bool) -> None:
        self._forked = forked
        self.plan, self._schedule, self._digest, self._folder = plan, schedule, digest, folder
        self.run = folder / "run"
        self._remains = Remains()
        self._environment = os.environ | {"PYTHONPATH": str(ROOT)} | self._remains.environment
        # Why a refusal may be, by what happened so far.
        self.excuses: list[str] = []
        self.done: list[str] = []
        self._undo: list[threading.Timer] = []
        self._servers: Servers | None = None
        self._certificates = certificates
        self._log = (folder / "log").open("w")
        self._note(str(plan))
        self._calls = 0
        # By term, the trainers that may be lost since that began: whom a further loss meets then, another may not have been taken over yet.
        self._lost_in: dict[int, set[int]] = {}
        self._hit: dict[int, float] = {}  # by store shard, until when a fault may hold that the run has not told of yet
        self._changed = False  # there were, or are to be, other store shards than at first
        self._own = folder if plan.own else None
        self._write_model()
        self._copy = folder / "copy"

    def play(self) -> str:
        """Returns how it ended: "digest", or the line of a refusal."""
        try:
            if self.plan.store != "local":
                self._servers = Servers(
                    self._folder,
                    self.plan.shards + (SPARES if self.plan.store != "tls" else 0),
                    self._remains.environment,
                    self._certificates if self.plan.store == "tls" else None,
                )
            if any(fault.kind in DISK_FAULTS for fault in self.plan.faults):
                self._mount_small_disk()
            return self._play()
        finally:
            for timer in self._undo:
                timer.cancel()
            self._remains.kill()
            for process in self._processes():
                process.kill()
            for pid in self._local_pids():
                os.kill(pid, signal.SIGKILL)
            if self._servers is not None:
                self._servers.close()
            self._remains.remove()
            self._log.close()
            if self.run.parent != self._folder:
                subprocess.run(["umount", "--lazy", str(self.run.parent)], check=False)

    def _play(self) -> str:
        pending = list(self.plan.faults)
        for number in range(MOST_CALLS):
            begun, inflicted = (self.run / "status.json").exists(), len(self.done)
            self._check_edited(begun)
            call = self._start("--resume=auto") if self.plan.auto else self._start("--resume") if begun else self._start()
            self._calls += 1
            self._lost_in.clear()
            pending = self._disturb(call, pending)
            code = self._await(call)
            self._undo_all()
            self._look_at_what_is_left(call)
            self._check_events(code)
            self._note(f"call {number}: {'resume' if begun else 'new'}, exit {code}: {call.last_line}")
            # The model's own is told, with the line of its code.
            if call.said.count("Traceback") > call.said.count("RuntimeError: a bad day\n"):
                raise Violation(f"a traceback: {call.said[-2000:]}")
            if code == 0 and (_json(self.run / "status.json") or {}).get("state") != "stopped":
                return self._check_the_end()
            if code == 0:
                continue  # the last trainer was asked to leave
            stopped = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if code in (-signal.SIGKILL, *(128 + number for number in stopped)) or (-code in stopped and not begun):
                # (A signal before the program has said what to do with signals ends it as it ends any.)
                continue
            if self._own is not None:
                (self._own / "fails").unlink(missing_ok=True)
            if code not in (2, 3, *((6,) if self.plan.auto else ())) or not call.last_line:
                raise Violation(f"exit {code}, and said {call.said[-1500:]!r}")
            if not self.excuses:
                raise Violation(f"refused without an excuse: {call.last_line}")
            if begun and len(self.done) == inflicted:
                # Nothing was inflicted on this call: it would be refused again.
                self._check_refusal(call.last_line)
                return call.last_line
        raise Violation(f"after {MOST_CALLS} calls the run has not ended")

    # -- calls -------------------------------------------------------------------------------------------------------------------

    def _start(self, *further: str) -> Started:
        store = f"local:{self.plan.shards}" if self._servers is None else ",".join(self._servers.urls[: self.plan.shards])
        trainers = self.plan.trainers[self._calls % len(self.plan.trainers)]
        words = [
            *f"train {self._schedule} --run {self.run} --trainers {trainers} {model_words(self._own)}".split(),
            *(() if self._changed else ("--store", store)),
            *("--copies", str(self.plan.copies)),
            *(("--store-timeout", "3") if self.plan.members else ()),
            *(() if self.plan.peer_timeout is None else ("--peer-timeout", str(self.plan.peer_timeout))),
            *further,
        ]
        if self.plan.shards >= 3 and "--resume" not in further:
            words += ["--parity", self.plan.parity]
        return self._command(*words)

    def _command(self, *words: object) -> Started:
        place = Path(tempfile.mkdtemp(dir=self._folder, prefix="call-"))
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

    def _await(self, call: Started) -> int:
        try:
            return call.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise Violation(f"hangs for {DEADLINE_SECONDS} s; it said {call.said[-1500:]!r}") from None

    def _training(self) -> RunStatus | None:
        """What the run says while it trains, else None."""
        with contextlib.suppress(TrainerError):
            told = training_status(self.run)
            if told is not None and told.state == "training":
                return told
        return None

    def _step(self) -> int | None:
        """The last step that the run says it has trained, None while none does."""
        told = self._training()
        return None if told is None else told.step

    def _disturb(self, call: Started, pending: list[Fault]) -> list[Fault]:
        """Inflict what is due while the call runs; returns what is left for the next one."""
        left = list(pending)
        while left and call.process.poll() is None and time.monotonic() - call.began < DEADLINE_SECONDS:
            step = self._step()
            elapsed = time.monotonic() - call.began
            due = [
                fault
                for fault in left
                if (elapsed >= fault.seconds if fault.seconds is not None else step is not None and step >= fault.step)
            ]
            for fault in due:
                if call.process.poll() is None and not self._waits(fault):
                    left.remove(fault)
                    self._inflict(fault, call, step)
            time.sleep(0.01)
        return left

    # -- faults ------------------------------------------------------------------------------------------------------------------

    def _waits(self, fault: Fault) -> bool:
        """Whether a fault is to wait until parity, or copies, cover it. One in ten does not care."""
        if self.plan.members and fault.kind in MEMBER_FAULTS and fault.target % 10:
            told = self._training()
            return told is not None and bool(self._uncovered(told, self._victims(fault, told)))
        if fault.kind not in LOST or not self.plan.losses_covered or fault.target % 10 == 0:
            return False
        return len(self._not_whole() - {self._shard(fault)}) >= self.plan.losses_covered

    def _inflict(self, fault: Fault, call: Started, step: int | None) -> None:
        shard = self._shard(fault)
        if fault.kind in SERVER_FAULTS or fault.kind == "trainer_and_shard":
            if self._server_pid(shard) is None:
                return
            self._excuse_shard(fault.kind, shard, step)
        if fault.kind in ALL_SERVERS_FAULTS and step is None:
            self.excuses.append(f"{fault.kind} while starting")
        if fault.kind in ("cut", "cut_all") and not self.plan.losses_covered and self._changed:
            self.excuses.append(f"{fault.kind} without parity while rows move")
        if fault.kind == "long_silence" or fault.kind in FAILING_MODEL:
            self.excuses.append(fault.kind)
        if fault.kind in MODEL_FAULTS and step is None:
            self.excuses.append("the model's file was changed while trainers read it")
        if fault.kind in (*MEMBER_FAULTS, "kill_launcher"):
            self._excuse_trainers(fault)
        try:
            told = getattr(self, "_" + fault.kind)(fault, call, shard)
        except (CacheError, psutil.Error, ProcessLookupError, OSError) as error:
            told = f"not possible: {error}"
        else:
            self.done.append(fault.kind)
        self._note(f"{fault} at step {step}, {time.monotonic() - call.began:.2f} s into the call: {told or ''}")

    def _excuse_shard(self, kind: str, shard: int, step: int | None) -> None:
        """Note it where a fault of a server may end the call."""
        if step is None:
            # A run that is not training yet may find that its servers are not there.
            self.excuses.append(f"{kind} while starting")
        if kind in LOST or kind == "trainer_and_shard":
            self._hit[shard] = time.monotonic() + NOTICED_SECONDS
            lost = self._not_whole() - {shard}
            if len(lost) >= self.plan.losses_covered:
                self.excuses.append(f"{kind} of shard {shard} beside {sorted(lost)}")
        elif not self.plan.losses_covered:
            self.excuses.append(f"{kind} without parity")

    def _victims(self, fault: Fault, told: RunStatus) -> list[int]:
        """The trainers that a fault meets, of those that the launcher started."""
        there = sorted(trainer for trainer in told.trainers if trainer in told.members)
        count = {"scale": 0, "kill_launcher": 0, "kill_two": 2}.get(fault.kind, 1)
        first = fault.target % len(there) if there else 0
        return (there[first:] + there[:first])[:count]

    def _uncovered(self, told: RunStatus, victims: list[int]) -> list[int]:
        """The lanes that nobody has whole if these trainers, and those that may be lost already, are."""
        lost = {*victims, *self._lost_in.get(told.term, ())}
        whole = {copy.lane for copy in told.copies if copy.complete and copy.trainer not in lost}
        return [lane for lane, host in enumerate(told.lanes) if host in lost and lane not in whole]

    def _excuse_trainers(self, fault: Fault) -> None:
        """Note it where a fault of a trainer may end the call, or meets another that may."""
        told = self._training()
        if told is None:
            self.excuses.append(f"{fault.kind} while starting")
            return
        victims = self._victims(fault, told)
        if fault.kind == "kill_launcher":
            if self._lost_in.get(told.term):
                self.excuses.append("the launcher was killed before a loss was taken over")
        elif uncovered := self._uncovered(told, victims):
            self.excuses.append(f"{fault.kind} of trainer {victims}: lane {uncovered} not covered")
        self._lost_in.setdefault(told.term, set()).update(victims)

    def _mount_small_disk(self) -> None:
        """Have the run on a disk of its own, so small that a fault can fill it."""
        disk = self._folder / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
        if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
            self.run = disk / "run"

    def _disk(self, fault: Fault, call: Started, shard: int) -> str:
        disk = self.run.parent
        if disk == self._folder:
            raise OSError("no small disk")
        self.excuses.append("the disk is full")
        filling = disk / "filling"
        with contextlib.suppress(OSError), filling.open("wb") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        self._later(fault.lasts, lambda: filling.unlink(missing_ok=True))
        return f"{shutil.disk_usage(disk).free} bytes left"

    def _wrong_type(self, fault: Fault, call: Started, shard: int) -> str:
        """Another program's key in the place of one lane's hash."""
        with self._connected(shard) as store:
            keys = store.command(0, "KEYS", "*")
            assert isinstance(keys, list)
            hashes = sorted(key for key in keys if store.command(0, "TYPE", key) == "hash" and b":epoch" not in key)
            if not hashes:
                raise OSError("no rows yet")
            key = hashes[fault.target % len(hashes)]
            store.command(0, "DEL", key)
            store.command(0, "SET", key, "another's")
        return str(key)

    def _copy_folder(self, fault: Fault, call: Started, shard: int) -> None:
        if not self._copy.exists():
            shutil.copytree(self.run, self._copy, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))

    def _delete_copy(self, fault: Fault, call: Started, shard: int) -> str:
        return self._check_copy() if self._copy.exists() else "no copy"

    def _check_copy(self) -> str:
        """A copy of the run's folder deletes nothing."""
        other = self._command("delete", self._copy)
        code = self._await(other)
        if "Traceback" in other.said or code != 2 or not self._copy.exists():
            raise Violation(f"delete of a copy of the run's folder: exit {code}: {other.said[-1500:]}")
        return other.last_line

    def _write_model(self, more: str = "") -> None:
        self._edited = bool(more)
        if self._own is not None:
            (self._own / "net.py").write_text(OWN_MODEL + more)

    def _edit_model(self, fault: Fault, call: Started, shard: int) -> None:
        self._write_model("# edited\n")

    def _check_edited(self, begun: bool) -> None:
        """Where the model's file was changed, going on with it is refused; put it back."""
        if self._edited and begun:
            other = self._start("--resume")
            code = self._await(other)
            self._note(f"resume with another model: exit {code}: {other.last_line}")
            if "Traceback" in other.said or code not in (2, 3) or not other.last_line:
                raise Violation(f"resume with another model: exit {code}: {other.said[-1500:]}")
        self._write_model()

    def _live(self) -> list[int]:
        """The numbers of the run's store shards."""
        with contextlib.suppress(CacheError):
            return Placement.load(self.run / PLACEMENT).live
        return list(range(self.plan.shards))

    def _shard(self, fault: Fault) -> int:
        """The store shard that a fault meets."""
        live = self._live()
        return live[fault.target % len(live)]

    def _server(self, shard: int) -> int:
        """Which of the episode's servers a store shard has. Raises ValueError where it has none."""
        assert self._servers is not None
        manifest = _json(self.run / "manifest.json")
        return shard if manifest is None else self._servers.urls.index(manifest["store_urls"][shard])

    def _server_pid(self, shard: int) -> int | None:
        if self._servers is not None:
            with contextlib.suppress(ValueError, IndexError):
                return self._servers.pid(self._server(shard))
            return None
        with contextlib.suppress(CacheError, OSError, IndexError):
            local = LocalStores.find(self.run / "stores")
            return local.pids[shard] if local is not None else None
        return None

    def _server_url(self, shard: int) -> str:
        if self._servers is not None:
            return self._servers.direct(self._server(shard))
        local = LocalStores.find(self.run / "stores")
        if local is None:
            raise OSError("no servers")
        return local.urls[shard]

    def _not_whole(self) -> set[int]:
        """The store shards that the run itself does not call ok, and those that it may not have seen to be so yet."""
        told = None
        with contextlib.suppress(TrainerError):
            told = training_status(self.run)
        hit = {shard for shard, until in self._hit.items() if time.monotonic() < until}
        return hit | (set() if told is None else set(told.shards.not_whole))

    @contextlib.contextmanager
    def _connected(self, shard: int) -> Iterator[Store]:
        with Store([self._server_url(shard)], timedelta(seconds=5), timedelta(seconds=1)) as store:
            yield store

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        def quietly() -> None:
            with contextlib.suppress(CacheError, OSError, AssertionError, IndexError, psutil.Error):
                undo()

        timer = threading.Timer(seconds, quietly)
        timer.daemon = True
        timer.start()
        self._undo.append(timer)

    def _undo_all(self) -> None:
        """Wait until every fault that lasts a while is over, before the run is gone on with."""
        for timer in self._undo:
            timer.join()
        self._undo.clear()

    def _kill(self, fault: Fault, call: Started, shard: int) -> None:
        pid = self._server_pid(shard)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if self._servers is not None:
            servers, server = self._servers, self._server(shard)
            self._later(fault.lasts, lambda: servers.restart(server))

    def _stop(self, fault: Fault, call: Started, shard: int) -> None:
        pid = self._server_pid(shard)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        self._later(fault.lasts, lambda: os.kill(pid, signal.SIGCONT))

    def _flush(self, fault: Fault, call: Started, shard: int) -> None:
        with self._connected(shard) as store:
            store.command(0, "FLUSHALL")

    def _cut(self, fault: Fault, call: Started, shard: int) -> None:
        with self._connected(shard) as store:
            store.command(0, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _readonly(self, fault: Fault, call: Started, shard: int) -> None:
        with self._connected(shard) as store:
            store.command(0, "REPLICAOF", "127.0.0.1", free_port())
        self._later(fault.lasts, lambda: self._tell(shard, "REPLICAOF", "NO", "ONE"))

    def _oom(self, fault: Fault, call: Started, shard: int) -> None:
        with self._connected(shard) as store:
            store.command(0, "CONFIG", "SET", "maxmemory", 1)
        self._later(fault.lasts, lambda: self._tell(shard, "CONFIG", "SET", "maxmemory", 0))

    def _busy(self, fault: Fault, call: Started, shard: int) -> None:
        with self._connected(shard) as store:
            store.command(0, "CONFIG", "SET", "lua-time-limit", 50)

        def spin() -> None:
            with contextlib.suppress(CacheError, OSError):
                self._tell(shard, "EVAL", "while true do end", 0)

        threading.Thread(target=spin, daemon=True).start()
        self._later(fault.lasts, lambda: self._end_script(shard))

    def _end_script(self, shard: int) -> None:
        import redis

        path = self._server_url(shard).removeprefix("unix://").partition("?")[0]
        with contextlib.suppress(redis.RedisError, OSError):
            redis.Redis(unix_socket_path=path, socket_timeout=5).execute_command("SCRIPT", "KILL")

    def _sleep(self, fault: Fault, call: Started, shard: int) -> None:
        def sleep() -> None:
            with contextlib.suppress(CacheError, OSError):
                self._tell(shard, "DEBUG", "SLEEP", str(fault.lasts))

        threading.Thread(target=sleep, daemon=True).start()

    def _silence(self, fault: Fault, call: Started, shard: int) -> str:
        """All servers stand still."""
        pids = [pid for one in self._live() if (pid := self._server_pid(one)) is not None]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            self._later(fault.lasts * (8 if fault.kind == "long_silence" else 1), partial(os.kill, pid, signal.SIGCONT))
        return f"servers {pids}"

    _long_silence = _silence

    def _cut_all(self, fault: Fault, call: Started, shard: int) -> None:
        for one in self._live():
            self._cut(fault, call, one)

    def _model_fails(self, fault: Fault, call: Started, shard: int) -> None:
        assert self._own is not None
        (self._own / "fails").touch()

    def _tell(self, shard: int, *words: str | int) -> None:
        with self._connected(shard) as store:
            store.command(0, *words)

    def _processes(self) -> list[psutil.Process]:
        """All of the episode that are alive, but servers where commands are forked."""
        return self._remains.processes() + (FORKER.processes() if self._forked else [])

    def _workers(self) -> list[psutil.Process]:
        return [
            process for process in self._remains.processes() if "foreload.trainer.cluster.worker" in " ".join(_words(process))
        ]

    def _met(self, fault: Fault) -> list[psutil.Process]:
        """The processes that a fault of trainers meets: also while they start."""
        told = self._training()
        if told is not None:
            return [psutil.Process(told.trainers[trainer]) for trainer in self._victims(fault, told)]
        workers = self._workers()
        return workers[fault.target % len(workers) :][:1] if workers else []

    def _kill_trainer(self, fault: Fault, call: Started, shard: int) -> str:
        met = self._met(fault)
        for process in met:
            process.kill()
        return f"process {[process.pid for process in met]}"

    _kill_two = _kill_trainer

    def _trainer_and_shard(self, fault: Fault, call: Started, shard: int) -> str:
        self._kill(fault, call, shard)
        return self._kill_trainer(fault, call, shard)

    def _stop_trainer(self, fault: Fault, call: Started, shard: int) -> str:
        met = self._met(fault)
        for process in met:
            process.suspend()
            self._later(fault.lasts, process.resume)
        return f"process {[process.pid for process in met]}"

    def _leave(self, fault: Fault, call: Started, shard: int) -> str:
        met = self._met(fault)
        for process in met:
            process.terminate()
        return f"process {[process.pid for process in met]}"

    def _scale(self, fault: Fault, call: Started, shard: int) -> str:
        """Another number of trainers; every other time the next faults meet it while that is under way."""
        return self._beside("scale", self.run, 1 + fault.target % 4, *(("--no-wait",) if fault.target % 8 < 4 else ()))

    def _kill_launcher(self, fault: Fault, call: Started, shard: int) -> None:
        call.process.kill()

    def _int(self, fault: Fault, call: Started, shard: int) -> None:
        os.killpg(call.process.pid, signal.SIGINT)

    def _term(self, fault: Fault, call: Started, shard: int) -> None:
        call.process.send_signal(signal.SIGTERM)

    def _hup(self, fault: Fault, call: Started, shard: int) -> None:
        os.killpg(call.process.pid, signal.SIGHUP)

    def _status(self, fault: Fault, call: Started, shard: int) -> str:
        return self._beside("stores", "status", self.run)

    def _run_status(self, fault: Fault, call: Started, shard: int) -> str:
        return self._beside("status", self.run)

    def _scrub(self, fault: Fault, call: Started, shard: int) -> str:
        return self._beside("scrub", self.run) if self.plan.losses_covered else ""

    def _second(self, fault: Fault, call: Started, shard: int) -> str:
        """Another training of the same run, at once: it is refused, and touches nothing."""
        other = self._start(*(("--resume",), ("--overwrite",), ())[fault.target % 3])
        code = self._await(other)
        if code == 0 and call.process.poll() is None:
            raise Violation("two trainings of one run at once, and both went on")
        if "Traceback" in other.said:
            raise Violation(f"a traceback of the second training: {other.said[-1500:]}")
        return other.last_line

    def _add_shard(self, fault: Fault, call: Started, shard: int) -> str:
        return self._change("add", *self._spare()) if self._spare() else ""

    def _remove_shard(self, fault: Fault, call: Started, shard: int) -> str:
        return self._change("remove", shard)

    def _move_shard(self, fault: Fault, call: Started, shard: int) -> str:
        return self._change("move", shard, *self._spare()) if self._spare() else ""

    def _change(self, what: str, *words: object) -> str:
        self._changed = True
        return self._beside("stores", what, self.run, *words)

    def _spare(self) -> list[str]:
        """A further server, where there is one."""
        if self._servers is None:
            return ["local"]
        manifest = _json(self.run / "manifest.json") or {"store_urls": self._servers.urls[: self.plan.shards]}
        return [url for url in self._servers.urls[self.plan.shards :] if url not in manifest["store_urls"]][:1]

    def _beside(self, *words: object) -> str:
        other = self._command(*words)
        code = self._await(other)
        if "Traceback" in other.said or code not in (0, 2, 3):
            raise Violation(f"{words[0]} {words[1]}: exit {code}: {other.said[-1500:]}")
        return f"exit {code} {other.last_line}"

    # -- what must hold ------------------------------------------------------------------------------------------------------------

    def _look_at_what_is_left(self, call: Started) -> None:
        """No trainer is left; a server only where it alone holds rows."""
        deadline = time.monotonic() + 60
        while (left := self._strangers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            raise Violation(f"left behind: {left}; the call said {call.said[-1000:]!r}")
        status = _json(self.run / "status.json")
        if self._servers is None and status and status["state"] != "training" and self._local_pids() and not self._unsaved():
            raise Violation(f"servers are left, though the run does not train and its rows are saved: {self._local_pids()}")

    def _check_events(self, code: int) -> None:
        """The events of the call: whole lines, terms that never fall, an end that is told (by whom the launcher's death leaves to tell it)."""
        events = list(read_events(self.run))
        terms = [event["term"] for event in events]
        if terms != sorted(terms):
            raise Violation(f"terms fall: {terms}")
        if code >= 0 and events and events[-1]["kind"] not in (CallEnded.kind, CallFailed.kind):
            raise Violation(f"exit {code}, and the last event is {events[-1]}")

    def _local_pids(self) -> list[int]:
        """The servers of the run's own that are alive. (Their environment cannot be seen, so no mark.)"""
        with contextlib.suppress(CacheError, OSError):
            local = LocalStores.find(self.run / "stores")
            return [pid for pid in local.pids if pid] if local is not None else []
        return []

    def _unsaved(self) -> bool:
        stores = self.run / "stores"
        return any(not (stores / f"shard-{shard}.rdb").exists() for shard in self._live())

    def _strangers(self) -> list[str]:
        """Processes of the episode that are no servers."""
        words = [" ".join(_words(process)) for process in self._processes()]
        return [text for text in words if text and "redis-server" not in text and "valkey-server" not in text]

    def _check_refusal(self, line: str) -> None:
        """One line, that does not send the user away with nothing."""
        rest = line.partition("--overwrite")
        if rest[1] and not re.search(r"--resume|scrub|are still|stay|hold|digest|evaluate", line):
            raise Violation(f"--overwrite as the only way on: {line}")
        if not (self.run / "manifest.json").exists():
            raise Violation(f"refused, and the run's folder is gone: {line}")

    def _check_the_end(self) -> str:
        for _ in range(3):
            call = self._command("digest", self.run)
            code = self._await(call)
            # A machine that has no time for a server is no fault of the run.
            if "silent for" not in call.last_line:
                break
        digest = call.out.read_text().strip()
        if self._copy.exists():
            self._check_copy()
        if code != 0:
            raise Violation(f"digest of a run that ended: exit {code}: {call.said[-1000:]}")
        if not digest.startswith(self._digest):
            raise Violation(f"another model: {digest}, undisturbed {self._digest}")
        return "digest"

    def _note(self, text: str) -> None:
        self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self._log.flush()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content


@dataclass(slots=True)
class Result:
    """What a campaign found."""

    episodes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)  # of the runs, by kind
    endings: Counter[str] = field(default_factory=Counter)
    violations: list[dict[str, Any]] = field(default_factory=list)


def campaign(
    seed: int,
    minutes: float,
    only: int | None = None,
    say: Callable[[str], object] = print,
    focus: str | None = None,
    forked: bool = False,
) -> Result:
    """Play episodes for so long (or one), one after the other; their folders stay where something may not be. forked: as the command line has it."""
    folder = Path(tempfile.mkdtemp(prefix="flc"))
    result = Result()
    deadline = time.monotonic() + 60 * minutes
    undisturbed: dict[tuple[bool, bool], tuple[Path, str]] = {}
    certificates = folder / "tls"
    certificates.mkdir()
    write_certificates(certificates)
    number = only if only is not None else 0
    while True:
        plan = Plan.draw(seed, number, focus)
        kind = (plan.members, plan.own)
        if kind not in undisturbed:
            undisturbed[kind] = _undisturbed(folder, *kind)
        place = folder / str(number)
        place.mkdir()
        episode = Episode(plan, *undisturbed[kind], place, certificates, forked)
        try:
            ending = episode.play()
        except Violation as error:
            ending = "VIOLATION"
            result.violations.append({"seed": seed, "episode": number, "what": str(error), "log": str(place / "log")})
            say(f"VIOLATION: {error}")
        result.episodes += 1
        result.faults.update(episode.done)
        result.events.update(event["kind"] for event in read_events(episode.run))
        result.endings[ending if ending in ("digest", "VIOLATION") else "refused: " + _without_figures(ending)] += 1
        say(
            f"{number}: {plan.store} {plan.shards} shards, parity {plan.parity}, {plan.trainers} trainers, copies {plan.copies}; "
            f"{', '.join(episode.done)} "
            f"-> {ending}{f' (excused: {episode.excuses})' if ending != 'digest' else ''}"
        )
        if ending != "VIOLATION":
            shutil.rmtree(place, ignore_errors=True)
        number += 1
        if only is not None or time.monotonic() >= deadline:
            break
    FORKER.close()
    if not result.violations:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _undisturbed(folder: Path, members: bool, own: bool) -> tuple[Path, str]:
    """The schedule of episodes that are about trainers, or about stores, and the digest of a run to which nothing happened."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    name = ("members" if members else "stores") + ("-own" if own else "")
    (folder / "net.py").write_text(OWN_MODEL)
    schedule, run = folder / name, folder / f"undisturbed-{name}"
    command = [sys.executable, "-m", "foreload.trainer.cli"]
    steps, lanes = (MEMBER_STEPS, MEMBER_LANES) if members else (STEPS, LANES)
    words = f"prepare {PREPARE} --rows {steps * 64} --lanes {lanes} --out {schedule}".split()
    subprocess.run([*command, *words], check=True, env=environment, capture_output=True)
    words = f"train {schedule} --run {run} --store local:1 --digest {model_words(folder if own else None)}".split()
    subprocess.run([*command, *words], check=True, env=environment, capture_output=True)
    return schedule, str(json.loads((run / "summary.json").read_text())["digest"])


def _without_figures(line: str) -> str:
    return re.sub(r"(unix|rediss?)://\S+|/\S+|[0-9]+", "N", line.removeprefix("foreload: error: "))[:160]


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if nothing was that may not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--episode", type=int, help="play this one only")
    parser.add_argument("--focus", choices=("members", "stores"), help="episodes about trainers, or about stores, alone")
    parser.add_argument(
        "--forked", action="store_true", help="commands in processes forked from one, which need no time to import"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    result = campaign(given.seed, given.minutes, given.episode, lambda text: print(text, flush=True), given.focus, given.forked)
    figures = {
        "episodes": result.episodes, "faults": dict(result.faults),
        "faults_in_all": sum(count for kind, count in result.faults.items() if kind not in LOOKS),
        "faults_of_trainers": sum(result.faults[kind] for kind in (*MEMBER_FAULTS, "kill_launcher")),
        "events": dict(result.events),
        "endings": dict(result.endings), "violations": result.violations,
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
