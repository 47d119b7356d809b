"""What trainers report to the coordinator: each sends its events over the rendezvous, a few at a time, and the coordinator takes them in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import Events, StepEnded, TrainerEvent
from foreload.trainer.errors import PeerLost

FLUSH_SECONDS = 0.1


class EventSender:
    """A trainer's reports to the coordinator."""

    def __init__(self, rendezvous: Rendezvous, trainer: int) -> None:
        self._rendezvous = rendezvous
        self._trainer = trainer
        self._held: list[TrainerEvent] = []
        self._sent = 0
        self._sent_at = time.monotonic()

    def send(self, event: TrainerEvent) -> None:
        """Report something; steps may be held back for a moment, all else goes at once."""
        self._held.append(event)
        if not isinstance(event, StepEnded) or time.monotonic() - self._sent_at > FLUSH_SECONDS:
            self.flush()

    def send_last(self, event: TrainerEvent) -> None:
        """Report what the coordinator waits for last: it may leave as soon as it has that, before it confirms it."""
        with contextlib.suppress(PeerLost):
            self.send(event)

    def flush(self) -> None:
        """Send what is held back."""
        if self._held:
            self._rendezvous.publish(Events(tuple(self._held)), self._trainer, self._sent)
            self._sent += 1
            self._held = []
            self._sent_at = time.monotonic()


class EventReceiver:
    """The coordinator's side, for the trainers of these numbers."""

    def __init__(self, rendezvous: Rendezvous, members: Iterable[int]) -> None:
        self._rendezvous = rendezvous
        self._next = dict.fromkeys(members, 0)

    def add(self, trainer: int) -> None:
        """Take in a further trainer's events, from its beginning."""
        self._next[trainer] = 0

    def poll(self) -> Iterator[tuple[int, TrainerEvent]]:
        """What has come in since, with the number of who sent it, in each trainer's order."""
        for trainer in list(self._next):
            while (taken := self._rendezvous.take(Events, trainer, self._next[trainer])) is not None:
                self._next[trainer] += 1
                for event in taken.events:
                    yield trainer, event
