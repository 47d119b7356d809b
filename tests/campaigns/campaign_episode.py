"""An episode of the campaign: a run is disturbed as its plan says and gone on with until it ends, and after each call it is checked what is left."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
from campaign_excuses import Excuses
from campaign_faults import Infliction, Undoing, check_copy
from campaign_plan import SERVER_FAULTS, Fault, Plan
from campaign_run import DEADLINE_SECONDS, CampaignRun, Started, Violation

from foreload.cache.errors import CacheError
from foreload.trainer.run.event_log import CallEnded, CallFailed, read_events

MOST_CALLS = 16
"""Of `foreload train` in an episode; each but the first goes on with the run."""


class Episode:
    """Plays a plan. digest: of a run to which nothing happened. Raises Violation."""

    def __init__(self, plan: Plan, schedule: Path, digest: str, folder: Path, certificates: Path, forked: bool) -> None:
        self._plan, self._digest = plan, digest
        self._run = CampaignRun(plan, schedule, folder, certificates, forked)
        self._excuses, self._undoing = Excuses(self._run), Undoing()
        self._pending = list(plan.faults)
        self.done: list[str] = []
        """The kinds of the faults that were inflicted."""

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._run.path

    @property
    def excuses(self) -> list[str]:
        """Why its calls may have ended with an error."""
        return self._excuses.reasons

    def play(self) -> str:
        """Returns how it ended: "digest", or the line of a refusal."""
        try:
            self._run.open()
            for number in range(MOST_CALLS):
                ending = self._play_call(number)
                if ending is not None:
                    return ending
            raise Violation(f"after {MOST_CALLS} calls the run has not ended")
        finally:
            self._undoing.cancel()
            self._run.close()

    def _play_call(self, number: int) -> str | None:
        """Call `foreload train` once; returns how the run ended, None where it is to be gone on with."""
        run, plan = self._run, self._plan
        begun, inflicted = run.begun, len(self.done)
        self._check_edited(begun)
        call = run.train("--resume=auto") if plan.auto else run.train("--resume") if begun else run.train()
        run.calls += 1
        self._excuses.begin_call()
        self._disturb(call)
        code = call.end()
        self._undoing.wait()
        self._check_what_is_left(call)
        self._check_events(code)
        run.note(f"call {number}: {'resume' if begun else 'new'}, exit {code}: {call.last_line}")
        # The model's own is reported, with the line of its code.
        if call.said.count("Traceback") > call.said.count("RuntimeError: a bad day\n"):
            raise Violation(f"a traceback: {call.said[-2000:]}")
        if code == 0:
            # Where it is stopped, the last trainer was asked to leave.
            return None if (run.json("status.json") or {}).get("state") == "stopped" else self._check_the_end()
        stopped = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if code in (-signal.SIGKILL, *(128 + number for number in stopped)) or (-code in stopped and not begun):
            # (A signal before the program has said what to do with signals ends it as it ends any.)
            return None
        if run.own is not None:
            (run.own / "fails").unlink(missing_ok=True)
        if code not in (2, 3, *((6,) if plan.auto else ())) or not call.last_line:
            raise Violation(f"exit {code}, and said {call.said[-1500:]!r}")
        if not self.excuses:
            raise Violation(f"refused without an excuse: {call.last_line}")
        if begun and len(self.done) == inflicted:
            # Nothing was inflicted on this call: it would be refused again.
            self._check_refusal(call.last_line)
            return call.last_line
        return None

    def _disturb(self, call: Started) -> None:
        """Inflict what is due while the call runs; the rest is left for the next one."""
        while self._pending and call.process.poll() is None and call.seconds < DEADLINE_SECONDS:
            status = self._run.training()
            step, elapsed = None if status is None else status.step, call.seconds
            for fault in list(self._pending):
                due = elapsed >= fault.seconds if fault.seconds is not None else step is not None and step >= fault.step
                if due and call.process.poll() is None and not self._excuses.waits(fault, self._shard(fault)):
                    self._pending.remove(fault)
                    self._inflict(fault, call, step)
            time.sleep(0.01)

    def _shard(self, fault: Fault) -> int:
        """The store shard that a fault meets."""
        live = self._run.live_shards()
        return live[fault.target % len(live)]

    def _inflict(self, fault: Fault, call: Started, step: int | None) -> None:
        shard = self._shard(fault)
        if fault.kind in (*SERVER_FAULTS, "trainer_and_shard") and self._run.server_pid(shard) is None:
            return
        self._excuses.note(fault, shard, step)
        try:
            done = Infliction(self._run, self._undoing, self._excuses, fault, call, shard).inflict()
        except (CacheError, psutil.Error, OSError) as error:
            done = f"not possible: {error}"
        else:
            self.done.append(fault.kind)
        self._run.note(f"{fault} at step {step}, {call.seconds:.2f} s into the call: {done or ''}")

    # -- what must hold ----------------------------------------------------------------------------------------------------------

    def _check_edited(self, begun: bool) -> None:
        """Where the model's file was changed, going on with it is refused; put it back."""
        if self._run.edited and begun:
            other = self._run.train("--resume")
            code = other.end()
            self._run.note(f"resume with another model: exit {code}: {other.last_line}")
            if "Traceback" in other.said or code not in (2, 3) or not other.last_line:
                raise Violation(f"resume with another model: exit {code}: {other.said[-1500:]}")
        self._run.write_model()

    def _check_what_is_left(self, call: Started) -> None:
        """No trainer is left; a server only where it alone holds rows."""
        run = self._run
        deadline = time.monotonic() + 60
        while (left := run.strangers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            raise Violation(f"left behind: {left}; the call said {call.said[-1000:]!r}")
        status = run.json("status.json")
        saved = all((run.path / "stores" / f"shard-{shard}.rdb").exists() for shard in run.live_shards())
        if run.servers is None and status and status["state"] != "training" and saved and run.local_pids():
            raise Violation(f"servers are left, though the run does not train and its rows are saved: {run.local_pids()}")

    def _check_events(self, code: int) -> None:
        """The events of the call: whole lines, terms that never fall, an end that is reported (unless the launcher was killed)."""
        events = list(read_events(self._run.path))
        terms = [event["term"] for event in events]
        if terms != sorted(terms):
            raise Violation(f"terms fall: {terms}")
        if code >= 0 and events and events[-1]["kind"] not in (CallEnded.kind, CallFailed.kind):
            raise Violation(f"exit {code}, and the last event is {events[-1]}")

    def _check_refusal(self, line: str) -> None:
        """One line, that does not leave the user with nothing."""
        if "--overwrite" in line and not re.search(r"--resume|scrub|are still|stay|hold|digest|evaluate", line):
            raise Violation(f"--overwrite as the only way on: {line}")
        if not (self._run.path / "manifest.json").exists():
            raise Violation(f"refused, and the run's folder is gone: {line}")

    def _check_the_end(self) -> str:
        for _ in range(3):
            call = self._run.command("digest", self._run.path)
            code = call.end()
            # A machine that has no time for a server is no fault of the run.
            if "did not answer for" not in call.last_line:
                break
        digest = call.out.read_text().strip()
        if self._run.copy.exists():
            check_copy(self._run)
        if code != 0:
            raise Violation(f"digest of a run that ended: exit {code}: {call.said[-1000:]}")
        if not digest.startswith(self._digest):
            raise Violation(f"another model: {digest}, undisturbed {self._digest}")
        return "digest"
