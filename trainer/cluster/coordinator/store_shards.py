"""The launcher's care of the store shards while trainers run.

It tracks the state of each shard, restarts dead local servers, and replaces servers by spares and
by servers that the user names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from foreload.base.errors import SettingError
from foreload.cache.client.local import LocalStores
from foreload.cache.client.url import StoreUrl, parse_url, parse_urls
from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.namespace import check_spare
from foreload.cache.protocol.shards.shard_status import LOST, OK, REBUILDING, REMOVED, ServerUnreachable, ShardSnapshot
from foreload.trainer.cluster.coordinator.background_work import in_background
from foreload.trainer.cluster.coordinator.store_watch import StoreWatch
from foreload.trainer.cluster.coordinator.training_call import TrainingCall
from foreload.trainer.cluster.engines.engine import Engine
from foreload.trainer.cluster.messages.control import Answer, AskReplace, Refused, Replacing
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.event_log import ShardLost, ShardRebuilt, ShardReplaced
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.servers import plain
from foreload.trainer.run.shard_change import shard_named
from foreload.trainer.saved.migration import OwnServers


def check_spares(job: TrainJob, manifest: Manifest, urls: Sequence[StoreUrl | str], placement: Placement) -> None:
    """Check the spares of a job before anything is started or deleted.

    Args:
        urls: The URLs of the run's shards, by number.

    Raises:
        SettingError: A spare cannot be used, or the run has no parity.
    """
    if job.spare is None:
        return
    if not placement.r and not job.auto:
        raise SettingError(
            "--spare: needs parity, since a lost shard's rows exist nowhere else without it; give --parity, or leave it out"
        )
    in_use = [(shard, parse_url(url) if isinstance(url, str) else url) for shard, url in enumerate(urls) if url]
    for url in parse_urls(job.spare):
        try:
            # A server that this run used for a shard before may be a spare.
            spare_check(job, manifest)(url, in_use, identity=manifest.identity)
        except StoreError as error:
            raise SettingError(f"--spare: {error}") from error


def spare_check(job: TrainJob, manifest: Manifest) -> Callable[..., None]:
    """Return `check_spare` for a run.

    It is called with a server and the servers in use, and raises StoreError if that server cannot
    take a shard.
    """
    return partial(check_spare, namespace=manifest.namespace, lanes=manifest.lanes, timeout=job.store_silence)


SHOWN_STEP = 0.1  # the share of a rebuild or migration after which the user gets the next report


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A server that the user names for a shard, while a thread checks whether it can be used.

    Attributes:
        url: The server's URL, without password.
        checked: The check.
        answer: The answer to the user's request.
    """

    shard: int
    url: str
    checked: Future[None]
    answer: Future[Answer] = field(default_factory=Future)


class StoreShards:
    """The store shards of one call.

    Attributes:
        urls: The servers' URLs by shard number, with passwords, as trainers know them. "" stands
            for a removed shard.
        local: The run's own local servers. If None, the servers are not the run's own.
        own: Servers that the run can add and end by itself. None if it has none.
        protected: Whether the run has parity.
        memory: The watch of the servers' memory.
    """

    def __init__(self, call: TrainingCall, urls: Sequence[str], local: LocalStores | None, engine: Engine | None = None) -> None:
        """Take on the shards.

        Args:
            engine: Starts servers anew. If None, nothing does.
        """
        job, self._call, self.urls, self.local = call.job, call, list(urls), local
        self.protected = call.run.placement.r > 0
        self.own: OwnServers | None = None if engine is None else engine.own_servers
        # A new server is empty, so without parity its shard's rows would be lost.
        self._engine = engine if self.own is not None and self.protected and not job.no_restart else None
        self._spares = [url.plain for url in parse_urls(job.spare)] if job.spare else []
        self._checking: list[_Replacement] = []
        self._wanted: deque[tuple[int, str]] = deque()  # shards and their replacement servers
        self._reported: dict[int, ShardSnapshot] = {}  # trainer -> its last report
        # The shards' state for the trainers of the term before, until those of this one report.
        self._before_term: ShardSnapshot | None = None
        # Whether the trainers of the first term have reported all of their lanes. Before that,
        # their reports may miss some.
        self._begun = False
        self._shown: dict[int, float] = {}  # shard -> the share of its rebuild that the user has seen
        self.memory: StoreWatch | None = None

    @property
    def plain_urls(self) -> tuple[str, ...]:
        """`urls` without passwords."""
        return plain(self.urls)

    @property
    def about_to_come(self) -> list[tuple[int, str]]:
        """The shards whose servers are about to be replaced, each with its new server."""
        return [*self._wanted, *((one.shard, one.url) for one in self._checking)]

    def use(self, urls: Sequence[str]) -> None:
        """Set the URLs, since shards were added or removed."""
        self.urls[:] = urls

    def share_moved(self, version: int) -> float:
        """Return the share of rows that have moved to the placement of that version, from 0 to 1.

        It is the least share of any trainer.
        """
        # Until the members of a new term have reported, the state before it counts, too. So the
        # share is never overestimated.
        before = () if self._before_term is None else (self._before_term,)
        return min((one.migrated if one.version == version else 0.0 for one in (*self._reported.values(), *before)), default=0.0)

    def all_moved(self, trainers: Collection[int], version: int) -> bool:
        """Return whether every one of these trainers has reported that all its rows have moved."""
        return self._begun and self._reported.keys() >= set(trainers) and self.share_moved(version) >= 1.0

    def all_without(self, trainers: Collection[int], shards: Collection[int]) -> bool:
        """Return whether every one of these trainers has reported these shards as removed."""
        snapshots = [self._reported.get(trainer) for trainer in trainers]
        return all(
            snapshot is not None and all(snapshot.shards[shard].state == REMOVED for shard in shards) for snapshot in snapshots
        )

    @property
    def spares(self) -> int:
        """The number of spares that are left."""
        return len(self._spares)

    def take_spares(self, count: int) -> tuple[str, ...]:
        """Take spares, to use them otherwise than for a lost shard. Returns their URLs."""
        taken, self._spares = self._spares[:count], self._spares[count:]
        return tuple(taken)

    def add_spares(self, urls: Sequence[str]) -> None:
        """Add spares: servers that were not used after all, or that the run is about to leave."""
        self._spares += urls

    @property
    def servers_return(self) -> bool:
        """Whether a lost shard may get a server by itself: a restarted one or a spare."""
        return self._engine is not None or (self.protected and bool(self._spares))

    def restart_dead(self) -> None:
        """Have the engine start dead servers anew, empty, unless --no-restart is given or there is no parity."""
        if self._engine is None:
            return
        for shard, url in enumerate(self.urls):
            new = self._engine.new_server(shard, url, self._call.observer.may_start) if url else None
            if new is None:
                continue
            if new != url:
                self._wanted.append((shard, new))
                continue
            self._call.say(f"store shard {shard}: its server died and was restarted empty")
            self._call.events.note(ShardReplaced(shard=shard, cause="its server died and was restarted empty"))

    @property
    def together(self) -> ShardSnapshot:
        """The combined state of the shards for all trainers that reported.

        While a term is about to begin, it is no better than it was in the term before.
        """
        before = self._before_term
        return ShardSnapshot.together(self._reported.values() if before is None else (*self._reported.values(), before))

    def on_shards(self, trainer: int, shards: ShardSnapshot) -> None:
        """Record a trainer's report of the shards.

        Changes of the combined state are reported to the user. A shard that is newly lost for this
        trainer may get a spare.
        """
        before = self.together if self._reported else None
        changes = shards.changes_since(self._reported.get(trainer))
        self._reported[trainer] = shards
        self._show(before)
        for shard, status in changes.items():
            if status.state == LOST:
                self._use_spare(shard, status.url)

    def on_term(self, trainers: Collection[int]) -> None:
        """Begin a term: drop the reports of trainers that are no longer members.

        The combined state of the term before counts until the members have reported the lanes that
        they now host (`term_begins`).
        """
        self._before_term = self.together if self._reported or self._before_term is not None else None
        self._reported = {trainer: shards for trainer, shards in self._reported.items() if trainer in trainers}

    def term_begins(self) -> None:
        """Note that all trainers of the term have reported the shards for their lanes."""
        before, self._before_term, self._begun = self._before_term, None, True
        if before is not None:
            self._show(before)

    def _show(self, before: ShardSnapshot | None) -> None:
        """Report the changes of the combined state to the user."""
        after = self.together
        for shard, status in after.changes_since(before).items():
            if status.state == LOST:
                self._call.say(f"store shard {shard}: is lost; training goes on and reads its rows from parity ({status.why})")
                self._call.events.note(ShardLost(shard=shard, cause=status.why))
                self._shown[shard] = 0.0
            elif status.state == OK:
                self._call.say(f"store shard {shard}: is whole again")
                self._call.events.note(ShardRebuilt(shard=shard))
        for shard, status in enumerate(after.shards):
            if status.state == REBUILDING and status.rebuilt >= self._shown.get(shard, 0.0) + SHOWN_STEP:
                self._shown[shard] = status.rebuilt
                self._call.say(f"store shard {shard}: {status.rebuilt:.0%} rebuilt")

    def unreachable(self, event: ServerUnreachable) -> None:
        """Handle a trainer's report that a lost shard has no server. A spare may replace it."""
        if self._in_use(event.shard, event.url):
            self._call.say(f"store shard {event.shard}: no server for it yet ({event.why})")
        self._use_spare(event.shard, event.url)

    def _use_spare(self, shard: int, url: str) -> None:
        """Replace a shard's server at `url` by the next spare.

        Nothing happens if the shard has another server by now, or if local servers are restarted.
        """
        if self._spares and self.protected and self._engine is None and self._in_use(shard, url):
            self._wanted.append((shard, self._spares.pop(0)))

    def _in_use(self, shard: int, url: str) -> bool:
        """Return whether `url` is the shard's server and no replacement is pending for it."""
        return url == self.plain_urls[shard] and all(wanted != shard for wanted, _ in self._wanted)

    def want_replacement(self, request: AskReplace) -> Refused | Future[Answer]:
        """Replace a shard's server by the one that the user names, if a check allows it.

        Args:
            request: The request. Its `old` is the shard's number, or its server's URL without
                password.

        Raises:
            CacheError, RunError: The request is refused; the error is the reason.
        """
        if not self.protected:
            return Refused("the run has no parity, so a shard's rows exist nowhere else; train with --parity")
        shard = shard_named(request.old, self.plain_urls)
        url = parse_url(request.new)
        in_use = [(number, parse_url(used)) for number, used in [*enumerate(self.urls), *self.about_to_come] if used]
        # A thread does the check, since the server may not answer.
        check = spare_check(self._call.job, self._call.manifest)
        replacement = _Replacement(shard, url.plain, in_background(lambda: check(url, in_use)))
        self._checking.append(replacement)
        return replacement.answer

    def _see_checked(self) -> None:
        """Answer the requests whose servers have been checked."""
        for one in [one for one in self._checking if one.checked.done()]:
            self._checking.remove(one)
            if (error := one.checked.exception()) is not None:
                one.answer.set_exception(error)
                continue
            self._wanted.append((one.shard, one.url))
            one.answer.set_result(Replacing(one.shard, one.url))

    def take_replacement(self) -> tuple[int, str] | None:
        """Take the next replacement server into use.

        Returns:
            The shard and the new server's URL, without password. If None, there is no replacement.
        """
        self._see_checked()
        if not self._wanted:
            return None
        shard, url = self._wanted.popleft()
        self.urls[shard] = url
        self._spares = [spare for spare in self._spares if spare != url]
        self._call.events.note(ShardReplaced(shard=shard, url=self.plain_urls[shard]))
        return shard, self.plain_urls[shard]
