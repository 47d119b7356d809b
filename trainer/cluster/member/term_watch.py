"""A trainer's thread beside its training: it reports that the trainer is alive, and ends the term where the coordinator says that it is over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

from foreload.trainer.cluster.messages.facts import Lease, TermOver
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.errors import PeerLost
from foreload.trainer.step.transport import Transport

PAUSE = timedelta(milliseconds=20)  # between two looks whether the term is over
RENEWALS = 10  # of a lease, within the time after which a silent trainer counts as lost


class TermWatch:
    """Of one trainer, while entered. connect: makes a connection to the rendezvous store for this thread alone; silence: after which the coordinator
    takes a trainer for lost that renews no lease.
    """

    def __init__(self, connect: Callable[[], Any], trainer: int, silence: timedelta) -> None:
        self._connect, self._trainer, self._silence = connect, trainer, silence
        self._watched: tuple[int, Transport, Callable[[], None]] | None = None
        self._broken = 0  # the term that this trainer has found to be over
        self._changed = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="term watch", daemon=True)

    def __enter__(self) -> TermWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()

    @contextlib.contextmanager
    def watching(self, term: int, transport: Transport, on_over: Callable[[], None] = lambda: None) -> Iterator[None]:
        """While entered, `transport` is interrupted as soon as the term is over, and `on_over` called, in the thread."""
        with self._changed:
            self._watched = term, transport, on_over
        try:
            yield
        finally:
            # The thread is not at the transport any more when this returns.
            with self._changed:
                self._watched = None

    def break_off(self, term: int) -> None:
        """A term is over for this trainer, though nobody has said so: any thread may call this."""
        self._broken = term

    def _run(self) -> None:
        rendezvous = Rendezvous(self._connect())
        # Where the coordinator is gone, there is nobody to tell, and no further term.
        with contextlib.suppress(PeerLost):
            looks = 0
            every = max(int(self._silence / PAUSE / RENEWALS), 1)
            while not self._stopping.wait(PAUSE.total_seconds()):
                if looks % every == 0:
                    rendezvous.publish(Lease(looks // every), self._trainer)
                looks += 1
                with self._changed:
                    if self._watched is None:
                        continue
                    term, transport, on_over = self._watched
                    if self._broken == term or rendezvous.poll(TermOver, term) is not None:
                        transport.interrupt()
                        on_over()
                        self._watched = None
