"""The coordinator's view of the copies of lanes: how far each is seeded, as trainers report, and whether the loss of a trainer is survived now."""

from __future__ import annotations

from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.messages.control import CopyStatus
from foreload.trainer.cluster.messages.facts import Term
from foreload.trainer.cluster.messages.trainers import CopiesTold, SeededCopy
from foreload.trainer.run.event_log import CopiesComplete, CopiesIncomplete

_NOTHING = SeededCopy(0, 0, False)


class LaneReplicas:
    """The copies in the term that is."""

    def __init__(self, call: TrainingCall, term: Term) -> None:
        self._call, self._term = call, term
        self._reported: dict[int, CopiesTold] = {}  # by each trainer, of the term
        self._exposed = False  # whether the user knows that the loss of a trainer is not survived for now

    def on_term(self, term: Term) -> None:
        """A further term: how its copies are is reported anew."""
        self._term, self._reported = term, {}

    def on_copies(self, trainer: int, event: CopiesTold) -> None:
        """Note how a trainer's copies are, and tell the user when that decides whether a further loss is survived."""
        if event.term != self._term.number:
            return
        self._reported[trainer] = event
        holders = {holder for lane in self._term.copies for holder in lane}
        # Without --copies there are some only of lanes that are to move.
        if not all(self._term.copies) or not holders <= self._reported.keys():
            return
        lacking = self.lacking
        if lacking and not self._exposed:
            lanes = ", ".join(map(str, lacking))
            self._call.say(f"lane {lanes}: no complete copy yet; until there is, the loss of its trainer is not survived")
            self._call.events.note(CopiesIncomplete(lanes=tuple(lacking)))
        elif self._exposed and not lacking:
            self._call.say("every lane has a complete copy again; a further loss is survived")
            self._call.events.note(CopiesComplete())
        self._exposed = bool(lacking)

    @property
    def lacking(self) -> list[int]:
        """The lanes that no trainer but their owner has whole, as far as the trainers have reported."""
        status = self.status
        return [lane for lane in range(len(self._term.hosts)) if not any(copy.lane == lane and copy.complete for copy in status)]

    @property
    def status(self) -> tuple[CopyStatus, ...]:
        """Each copy of each lane."""
        term, reported = self._term, self._reported
        found = []
        for lane, holders in enumerate(term.copies):
            for trainer in holders:
                copy = reported[trainer].copies.get(lane, _NOTHING) if trainer in reported else _NOTHING
                found.append(CopyStatus(lane, trainer, copy.slots, copy.of, copy.complete))
        return tuple(found)
