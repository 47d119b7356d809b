"""Why a call of `foreload train` may end with an error: by what was done to the run so far, and what of that parity and copies do not cover."""

from __future__ import annotations

import contextlib
import time

from campaign_plan import ALL_SERVERS_FAULTS, FAILING_MODEL, LOST, MEMBER_FAULTS, MODEL_FAULTS, SERVER_FAULTS, Fault
from campaign_run import CampaignRun

from foreload.trainer.cluster.messages.control import RunStatus, training_status
from foreload.trainer.errors import TrainerError

NOTICED_SECONDS = 2.0
"""After which a run has seen what became of a store shard."""


class Excuses:
    """The excuses of an episode."""

    def __init__(self, run: CampaignRun) -> None:
        self._run, self._plan = run, run.plan
        self.reasons: list[str] = []
        # By term, the trainers that may be lost since that began: if a further loss meets them, another may not have been taken over yet.
        self._lost_in: dict[int, set[int]] = {}
        self._hit: dict[int, float] = {}  # by store shard, until when a fault may hold that the run has not reported yet

    def begin_call(self) -> None:
        """A call begins, whose terms are others."""
        self._lost_in.clear()

    def waits(self, fault: Fault, shard: int) -> bool:
        """Whether a fault is to wait until parity, or copies, cover it. One in ten does not care."""
        if self._plan.members and fault.kind in MEMBER_FAULTS and fault.target % 10:
            status = self._run.training()
            return status is not None and bool(self._uncovered(status, victims(fault, status)))
        if fault.kind not in LOST or not self._plan.losses_covered or fault.target % 10 == 0:
            return False
        return len(self._not_whole() - {shard}) >= self._plan.losses_covered

    def note(self, fault: Fault, shard: int, step: int | None) -> None:
        """Note it where a fault may end the call, or meets another one that may. step: the last one trained, None while none is."""
        kind, reasons = fault.kind, self.reasons
        if kind in SERVER_FAULTS or kind == "trainer_and_shard":
            self._note_shard(kind, shard, step)
        if kind in ALL_SERVERS_FAULTS and step is None:
            reasons.append(f"{kind} while starting")
        if kind in ("cut", "cut_all") and not self._plan.losses_covered and self._run.moves:
            reasons.append(f"{kind} without parity while rows move")
        if kind == "long_silence" or kind in FAILING_MODEL:
            reasons.append(kind)
        if kind in MODEL_FAULTS and step is None:
            reasons.append("the model's file was changed while trainers read it")
        if kind in (*MEMBER_FAULTS, "kill_launcher"):
            self._note_trainers(fault)

    def _note_shard(self, kind: str, shard: int, step: int | None) -> None:
        if step is None:
            # A run that is not training yet may find that its servers are not there.
            self.reasons.append(f"{kind} while starting")
        if kind in LOST or kind == "trainer_and_shard":
            self._hit[shard] = time.monotonic() + NOTICED_SECONDS
            lost = self._not_whole() - {shard}
            if len(lost) >= self._plan.losses_covered:
                self.reasons.append(f"{kind} of shard {shard} beside {sorted(lost)}")
        elif not self._plan.losses_covered:
            self.reasons.append(f"{kind} without parity")

    def _note_trainers(self, fault: Fault) -> None:
        status = self._run.training()
        if status is None:
            self.reasons.append(f"{fault.kind} while starting")
            return
        lost = victims(fault, status)
        if fault.kind == "kill_launcher":
            if self._lost_in.get(status.term):
                self.reasons.append("the launcher was killed before a loss was taken over")
        elif uncovered := self._uncovered(status, lost):
            self.reasons.append(f"{fault.kind} of trainer {lost}: lane {uncovered} not covered")
        self._lost_in.setdefault(status.term, set()).update(lost)

    def _uncovered(self, status: RunStatus, trainers: list[int]) -> list[int]:
        """The lanes that nobody has whole if these trainers, and those that may be lost already, are."""
        lost = {*trainers, *self._lost_in.get(status.term, ())}
        whole = {copy.lane for copy in status.copies if copy.complete and copy.trainer not in lost}
        return [lane for lane, host in enumerate(status.lanes) if host in lost and lane not in whole]

    def _not_whole(self) -> set[int]:
        """The store shards that the run itself does not call ok, and those that it may not have seen to be so yet."""
        status = None
        with contextlib.suppress(TrainerError):
            status = training_status(self._run.path)
        hit = {shard for shard, until in self._hit.items() if time.monotonic() < until}
        return hit | (set() if status is None else set(status.shards.not_whole))


def victims(fault: Fault, status: RunStatus) -> list[int]:
    """The trainers that a fault meets, of those that the launcher started."""
    there = sorted(trainer for trainer in status.trainers if trainer in status.members)
    count = {"scale": 0, "replace": 0, "kill_launcher": 0, "kill_two": 2}.get(fault.kind, 1)
    first = fault.target % len(there) if there else 0
    return (there[first:] + there[:first])[:count]
