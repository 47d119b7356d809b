"""The coordinator's side of changes of the store shards while trainers run.

These are servers that replace other servers, and migrations, in which rows move because shards are
added, removed or moved.

A migration first notes the new servers as the run's, and writes the new placement to RUN. Then the
trainers get the placement and move the rows of their lanes; their reports of the shards contain
their progress. Once all rows have moved, RUN and the trainers get the settled placement. When no
trainer uses a removed shard's server any longer, the run's rows there are deleted.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.trainer.cluster.coordinator.background_work import in_background
from foreload.trainer.cluster.coordinator.store_shards import SHOWN_STEP, StoreShards
from foreload.trainer.cluster.coordinator.training_call import PublishedPlan, TrainingCall
from foreload.trainer.cluster.messages.control import Answer, AskMove, MoveBegun, Refused
from foreload.trainer.errors import RunError
from foreload.trainer.memory.seen_servers import check_room
from foreload.trainer.run.event_log import RowsMove, RowsMoved
from foreload.trainer.run.shard_change import ShardChange, ShardProgram, Step
from foreload.trainer.saved.migration import NewServers, check_whole

_DRAIN_AGAIN = 2.0  # seconds between two requests for a server elsewhere


@dataclass(frozen=True, slots=True)
class _Preparation:
    """A requested migration, while a thread makes its new servers ready.

    Attributes:
        placement: The placement to migrate to.
        urls: The URLs of all shards, once the new servers are ready.
        answer: The answer to the request.
    """

    placement: Placement
    urls: Future[tuple[str, ...]]
    answer: Future[Answer] = field(default_factory=Future)


class RowMigration:
    """The migrations of one call."""

    def __init__(self, call: TrainingCall, shards: StoreShards, plan: PublishedPlan) -> None:
        self._call, self._shards, self._plan = call, shards, plan
        room = partial(check_room, call.manifest, call.schedule, call.layouts)
        self._new = NewServers(call.manifest, call.job.store_silence, shards.own, room)
        # The program also leaves the servers that an earlier call had yet to leave.
        self._program = ShardProgram.found(call.manifest, call.run.placement)
        self._preparing: _Preparation | None = None
        self._hurried = False  # whether the last migration that was wanted is in a hurry
        # The migration to begin: its placement, and the URLs of all shards with the new servers.
        self._wanted: tuple[Placement, tuple[str, ...]] | None = None
        self._left: Future[set[str]] | None = None  # the leaving of servers, in a thread
        self._shown = 0.0
        # The answer to the last request for a server elsewhere, and when it was made.
        self._drained: Future[Answer] | None = None
        self._drained_at = 0.0

    @property
    def under_way(self) -> bool:
        """Whether rows move or are about to, or a server is still to be left."""
        return self._wanted is not None or self._program.placement.migrating or bool(self._program.leaving)

    @property
    def placement(self) -> Placement:
        """Where the rows are, or migrate to."""
        return self._program.placement

    def want(self, request: AskMove, hurried: bool = False) -> Refused | Future[Answer]:
        """Prepare a requested migration. Once the request is answered, the new servers are ready.

        Args:
            hurried: Whether the rows are to migrate in a hurry.

        Raises:
            CacheError, RunError: The migration cannot be begun; the error is the reason.
        """
        if self._preparing is not None:
            return Refused("another change of its store shards was requested just now; try again in a moment")
        change = ShardChange(request.change, request.shard, request.urls)
        self._check_free()
        placement = change.placement_after(self._program.placement, self._shards.urls)
        urls, further = tuple(self._shards.urls), self._shards.about_to_come
        ready = in_background(lambda: self._new.made_ready(change.urls, placement, urls, further))
        self._preparing, self._hurried = _Preparation(placement, ready), hurried
        return self._preparing.answer

    def _see_prepared(self) -> None:
        """Answer the request once the new servers are ready."""
        preparing = self._preparing
        if preparing is None or not preparing.urls.done():
            return
        self._preparing, placement = None, preparing.placement
        if (error := preparing.urls.exception()) is not None:
            preparing.answer.set_exception(error)
            return
        self._wanted = placement, preparing.urls.result()
        preparing.answer.set_result(MoveBegun(placement.version, placement.joining, placement.leaving))

    def drain(self, urls: Collection[str]) -> None:
        """Move shards from servers whose machines are about to be taken away, one after the other.

        Args:
            urls: Their URLs, without passwords.
        """
        own, drained = self._shards.own, self._drained
        if drained is not None and drained.done():
            self._drained = None
            if (error := drained.exception()) is not None:
                self._call.say(f"store shards: not moved yet from a machine that is about to be taken away: {error}")
        here = [shard for shard, url in enumerate(self._shards.plain_urls) if url in urls]
        if own is None or not here or self._preparing is not None or self._call.clock() - self._drained_at < _DRAIN_AGAIN:
            return
        self._drained_at = self._call.clock()
        # While rows move already, or a shard is not whole, it is asked again later.
        with contextlib.suppress(RunError, CacheError):
            answer = self.want(AskMove("move", str(here[0]), (own.word,)))
            assert isinstance(answer, Future)
            self._drained = answer
            self._call.say(f"store shard {here[0]}: its machine is about to be taken away, so its rows move to another server")

    def _check_free(self) -> None:
        """Raise RunError if no migration can be begun now."""
        if self.under_way:
            placement = self._program.placement
            share = self._shards.share_moved(placement.version) if placement.migrating else 1.0
            raise RunError(
                f"its rows are already moving to other store shards ({share:.0%} moved); wait until `foreload stores status` no longer "
                "shows that"
            )
        together = self._shards.together
        check_whole(together.lost, [shard for shard in together.not_whole if shard not in together.lost])
        if self._shards.about_to_come:
            raise RunError("a store shard is about to get another server; ask again when that shard is whole")

    def poll(self, members: Collection[int]) -> None:
        """Announce replacement servers; start a requested migration, report it, and complete it."""
        while (replacement := self._shards.take_replacement()) is not None:
            shard, url = replacement
            self._plan.change(servers=self._shards.plain_urls)
            self._name()
            self._call.say(f"store shard {shard}: {url} takes its place")
        self._see_prepared()
        if self._program.placement.migrating:
            moved = self._shards.share_moved(self._program.placement.version)
            if moved >= self._shown + SHOWN_STEP:
                self._shown = moved
                self._call.say(f"store shards: {moved:.0%} of the rows have moved")
        if self._wanted is not None:
            (placement, urls), self._wanted = self._wanted, None
            # Only the new servers' URLs are taken: a server of another shard may have been replaced
            # since the request.
            self._shards.use((*self._shards.urls, *urls[len(self._shards.urls) :]))
            self._program, self._shown = self._program.ask(placement), 0.0
        before = self._program.placement
        self._go_on(members)
        # Trainers get a placement only once it is in RUN.
        if self._program.placement is not before:
            self._plan.move_rows(self._program.placement, self._shards.plain_urls, self._hurried)

    def _go_on(self, members: Collection[int], wait: Callable[[Future[Any]], None] | None = None) -> None:
        """Do the next steps of the migration, up to one that must be waited for.

        Args:
            wait: Returns when a future is done. Given once the trainers have ended. If None, they
                train, and may still use the servers of removed shards.
        """
        while True:
            program, placement = self._program, self._program.placement
            moved = placement.migrating and self._shards.all_moved(members, placement.version)
            leaves = wait is not None or self._left is not None
            step = program.next_step(moved, unused=leaves or self._shards.all_without(members, program.leaving))
            if step is Step.NAME:
                self._name()
            elif step is Step.PLACE:
                self._place()
            elif step is Step.COMPLETE:
                self._complete()
            elif step is not Step.LEAVE or not self._leave(wait):
                return

    def _name(self) -> None:
        # The manifest is written before the program goes on. If this call is killed, the next one
        # finds in it the servers that may have rows of the run.
        self._call.write_manifest(self._program.named_in(self._call.manifest, self._shards.plain_urls))
        self._program = self._program.name()

    def _place(self) -> None:
        self._program = self._program.place()
        placement = self._program.placement
        self._call.run.write_placement(placement)
        self._watch()
        self._call.events.note(RowsMove(joining=placement.joining, leaving=placement.leaving))
        self._call.say(f"store shards: {said_of(placement)}; rows move while training goes on")

    def _complete(self) -> None:
        before = self._program.placement
        self._program = self._program.complete(self._shards.plain_urls)
        placement = self._program.placement
        self._call.run.write_placement(placement)
        self._watch()
        self._shards.use([url if shard in placement.live else "" for shard, url in enumerate(self._shards.urls)])
        self._call.events.note(RowsMoved(joining=before.joining, leaving=before.leaving))
        self._call.say(f"store shards: all rows have moved; {said_of(before)}")

    def _watch(self) -> None:
        if self._shards.memory is not None:
            self._shards.memory.use(self._program.placement)

    def _leave(self, wait: Callable[[Future[Any]], None] | None) -> bool:
        """Leave the servers that the run no longer uses.

        A thread does that, since a server may not answer.

        Returns:
            Whether it is done.
        """
        if self._left is None:
            self._left = in_background(partial(self._new.leave, self._program.leaving))
        if wait is not None:
            wait(self._left)
        if not self._left.done():
            return False
        # If it failed, training goes on: the manifest still lists the servers among those that may
        # have rows of the run.
        if (error := self._left.exception()) is not None:
            traceback.print_exception(error)
        emptied = self._left.result() if error is None else ()
        self._program, self._left = self._program.leave(emptied), None
        return True

    def finish(self, members: Collection[int], wait: Callable[[Future[Any]], None]) -> None:
        """Complete a migration of which all rows have moved, and leave unused servers.

        Call it once all trainers have ended. The next call continues an incomplete migration.

        Args:
            members: The trainers that have ended, which are all members of the last term.
            wait: Returns when a future is done.
        """
        if self._preparing is not None:
            wait(self._preparing.urls)
            self._see_prepared()
        # A migration that has not begun is dropped, and its new servers are given back.
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            placement, urls = wanted
            self._new.give_back([urls[shard] for shard in placement.joining], placement.shard_count - len(placement.joining))
            self._call.say("store shards: training is over, so they stay as they were; ask again, now that the run is stopped")
        self._go_on(members, wait)
        if self._program.placement.migrating:
            self._call.say(
                f"store shards: not all rows have moved ({said_of(self._program.placement)}); the same command, now that the run is stopped, or a "
                "--resume that trains on, continues the migration"
            )

    @property
    def removed(self) -> tuple[int, ...]:
        """The numbers of the store shards that were removed."""
        return self._program.placement.removed


def said_of(placement: Placement) -> str:
    """Describe which shards join and leave by a placement."""
    said = [f"shard {shard} joins" for shard in placement.joining] + [f"shard {shard} leaves" for shard in placement.leaving]
    return ", ".join(said)
