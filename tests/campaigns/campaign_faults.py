"""What the faults of the campaign do to a run, and how those are undone that last a while."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil
import redis
from campaign_excuses import Excuses, victims
from campaign_plan import Fault
from campaign_run import CampaignRun, Started, Violation
from command_line import free_port

from foreload.cache.errors import CacheError

_CUT = ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


class Undoing:
    """What is still to be undone."""

    def __init__(self) -> None:
        self._timers: list[threading.Timer] = []

    def later(self, seconds: float, undo: Callable[[], object]) -> None:
        """Call `undo` after that time; what cannot be undone by then is not."""

        def quietly() -> None:
            with contextlib.suppress(CacheError, OSError, AssertionError, IndexError, psutil.Error):
                undo()

        timer = threading.Timer(seconds, quietly)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def wait(self) -> None:
        """Wait until every fault that lasts a while is over."""
        for timer in self._timers:
            timer.join()
        self._timers.clear()

    def cancel(self) -> None:
        """Undo nothing more."""
        for timer in self._timers:
            timer.cancel()


@dataclass(slots=True)
class Infliction:
    """A fault that meets a call of `foreload train`: the method of its kind inflicts it, and may return what there is to note of it.

    shard: the store shard that it meets.
    """

    run: CampaignRun
    undoing: Undoing
    excuses: Excuses
    fault: Fault
    call: Started
    shard: int

    def inflict(self) -> str | None:
        """Do it. Raises CacheError, psutil.Error or OSError where it is not possible, Violation."""
        done: str | None = getattr(self, "_" + self.fault.kind)()
        return done

    def _later(self, undo: Callable[[], object], times: float = 1) -> None:
        self.undoing.later(times * self.fault.lasts, undo)

    def _tell(self, *words: str | int) -> None:
        self.run.tell(self.shard, *words)

    def _in_background(self, *words: str | int) -> None:
        """Give the server a command that it takes long for."""

        def tell() -> None:
            with contextlib.suppress(CacheError, OSError):
                self._tell(*words)

        threading.Thread(target=tell, daemon=True).start()

    # -- servers -----------------------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        pid = self.run.server_pid(self.shard)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if self.run.servers is not None:
            self._later(partial(self.run.servers.restart, self.run.server_of(self.shard)))

    def _stop(self) -> None:
        pid = self.run.server_pid(self.shard)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        self._later(partial(os.kill, pid, signal.SIGCONT))

    def _silence(self, times: float = 1) -> str:
        """All servers stand still."""
        pids = [pid for shard in self.run.live_shards() if (pid := self.run.server_pid(shard)) is not None]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            self._later(partial(os.kill, pid, signal.SIGCONT), times)
        return f"servers {pids}"

    def _long_silence(self) -> str:
        return self._silence(8)

    def _flush(self) -> None:
        self._tell("FLUSHALL")

    def _cut(self) -> None:
        self._tell(*_CUT)

    def _cut_all(self) -> None:
        for shard in self.run.live_shards():
            self.run.tell(shard, *_CUT)

    def _readonly(self) -> None:
        self._tell("REPLICAOF", "127.0.0.1", free_port())
        self._later(partial(self._tell, "REPLICAOF", "NO", "ONE"))

    def _oom(self) -> None:
        self._tell("CONFIG", "SET", "maxmemory", 1)
        self._later(partial(self._tell, "CONFIG", "SET", "maxmemory", 0))

    def _sleep(self) -> None:
        self._in_background("DEBUG", "SLEEP", str(self.fault.lasts))

    def _busy(self) -> None:
        self._tell("CONFIG", "SET", "lua-time-limit", 50)
        self._in_background("EVAL", "while true do end", 0)
        self._later(self._end_script)

    def _end_script(self) -> None:
        path = self.run.server_url(self.shard).removeprefix("unix://").partition("?")[0]
        with contextlib.suppress(redis.RedisError, OSError):
            redis.Redis(unix_socket_path=path, socket_timeout=5).execute_command("SCRIPT", "KILL")

    def _wrong_type(self) -> str:
        """Another program's key in the place of one lane's hash."""
        with self.run.connected(self.shard) as store:
            keys = store.command(0, "KEYS", "*")
            assert isinstance(keys, list)
            hashes = sorted(key for key in keys if store.command(0, "TYPE", key) == "hash" and b":epoch" not in key)
            if not hashes:
                raise OSError("no rows yet")
            key = hashes[self.fault.target % len(hashes)]
            store.command(0, "SET", key, "another's")
        return str(key)

    # -- processes ---------------------------------------------------------------------------------------------------------------

    def _each_met(self, act: Callable[[psutil.Process], object]) -> str:
        """Do something to the processes that a fault of trainers meets: also while they start."""
        if (status := self.run.training()) is not None:
            met = [psutil.Process(status.trainers[trainer]) for trainer in victims(self.fault, status)]
        else:
            workers = self.run.workers()
            met = workers[self.fault.target % len(workers) :][:1] if workers else []
        for process in met:
            act(process)
        return f"process {[process.pid for process in met]}"

    def _kill_trainer(self) -> str:
        return self._each_met(psutil.Process.kill)

    _kill_two = _kill_trainer

    def _trainer_and_shard(self) -> str:
        self._kill()
        return self._kill_trainer()

    def _stop_trainer(self) -> str:
        def stop(process: psutil.Process) -> None:
            process.suspend()
            self._later(process.resume)

        return self._each_met(stop)

    def _leave(self) -> str:
        return self._each_met(psutil.Process.terminate)

    def _kill_launcher(self) -> None:
        self.call.process.kill()

    def _int(self) -> None:
        os.killpg(self.call.process.pid, signal.SIGINT)

    def _hup(self) -> None:
        os.killpg(self.call.process.pid, signal.SIGHUP)

    def _term(self) -> None:
        self.call.process.send_signal(signal.SIGTERM)

    # -- the run's folder --------------------------------------------------------------------------------------------------------

    def _disk(self) -> str:
        if not self.run.on_small_disk:
            raise OSError("no small disk")
        self.excuses.reasons.append("the disk is full")
        filling = self.run.path.parent / "filling"
        with contextlib.suppress(OSError), filling.open("wb") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        self._later(lambda: filling.unlink(missing_ok=True))
        return f"{shutil.disk_usage(filling.parent).free} bytes left"

    def _copy_folder(self) -> None:
        if not self.run.copy.exists():
            shutil.copytree(self.run.path, self.run.copy, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))

    def _delete_copy(self) -> str:
        return check_copy(self.run) if self.run.copy.exists() else "no copy"

    def _edit_model(self) -> None:
        self.run.write_model("# edited\n")

    def _model_fails(self) -> None:
        assert self.run.own is not None
        (self.run.own / "fails").touch()

    # -- commands beside the training --------------------------------------------------------------------------------------------

    def _beside(self, *words: object) -> str:
        command = self.run.ended(*words)
        return f"exit {command.end()} {command.last_line}"

    def _scale(self) -> str:
        """Another number of trainers."""
        return self._change_trainers(1 + self.fault.target % 4)

    def _replace(self) -> str:
        """Another trainer in the place of one."""
        status = self.run.training()
        trainer = status.members[self.fault.target % len(status.members)] if status is not None else 0
        return self._change_trainers("--replace", trainer)

    def _change_trainers(self, *change: object) -> str:
        """Every other time the next faults meet it while that is under way."""
        further = ("--no-wait",) if self.fault.target % 8 < 4 else ()
        return self._beside("scale", self.run.path, *change, *further)

    def _status(self) -> str:
        return self._beside("stores", "status", self.run.path)

    def _run_status(self) -> str:
        return self._beside("status", self.run.path)

    def _scrub(self) -> str:
        return self._beside("scrub", self.run.path) if self.run.plan.losses_covered else ""

    def _second(self) -> str:
        """Another training of the same run, at once: it is refused, and touches nothing."""
        other = self.run.train(*(("--resume",), ("--overwrite",), ())[self.fault.target % 3])
        code = other.end()
        if code == 0 and self.call.process.poll() is None:
            raise Violation("two trainings of one run at once, and both went on")
        if "Traceback" in other.said:
            raise Violation(f"a traceback of the second training: {other.said[-1500:]}")
        return other.last_line

    def _change(self, what: str, *words: object) -> str:
        self.run.moves = True
        return self._beside("stores", what, self.run.path, *words)

    def _add_shard(self) -> str:
        spare = self.run.spare()
        return self._change("add", *spare) if spare else ""

    def _remove_shard(self) -> str:
        return self._change("remove", self.shard)

    def _move_shard(self) -> str:
        spare = self.run.spare()
        return self._change("move", self.shard, *spare) if spare else ""


def check_copy(run: CampaignRun) -> str:
    """A copy of the run's folder deletes nothing. Raises Violation."""
    other = run.ended("delete", run.copy, may_end=(2,))
    if not run.copy.exists():
        raise Violation(f"delete of a copy of the run's folder: {other.said[-1500:]}")
    return other.last_line
