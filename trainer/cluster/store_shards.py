"""What the launcher does about store shards while trainers run: it knows how each is, starts dead local servers again, and has spares and
servers that the user names take the place of others.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from foreload.cache.client.local import LocalStores
from foreload.cache.client.url import StoreUrl, parse_url, parse_urls
from foreload.cache.errors import CacheError
from foreload.cache.protocol.server_probe import ShardChange
from foreload.trainer.cluster.control import AskReplace, Refused, Replacing, ShardStatus
from foreload.trainer.cluster.faults import RunObserver
from foreload.trainer.run.job import TrainJob

SHOWN_STEP = 0.1  # the share of a rebuild after which the user is told again


@dataclass(frozen=True, slots=True)
class ShardState:
    """What a trainer told of a shard, and how much of it is rebuilt, from 0 to 1."""

    what: Literal["lost", "rebuilding", "ok"]
    rebuilt: float


class StoreShards:
    """The store shards of one call. Threads of the control socket call `want_replacement` and `states`, the launcher's own all else.

    urls: of their servers, in order, with passwords; those that trainers were told of. protected: whether there is parity. check: called with a
    server that the user names to take a shard's place, and with those in use and the numbers of their shards; raises StoreError where it cannot.
    """

    def __init__(
        self,
        job: TrainJob,
        urls: Sequence[str],
        local: LocalStores | None,
        protected: bool,
        observer: RunObserver,
        check: Callable[[StoreUrl, Sequence[tuple[int, StoreUrl]]], None],
    ) -> None:
        self.urls = list(urls)
        self.protected, self._observer, self._check = protected, observer, check
        self._restarted = local if protected and not job.no_restart else None
        self._spares = [url.plain for url in parse_urls(job.spare)] if job.spare else []
        self._wanted: deque[tuple[int, str]] = deque()  # servers that are to take the place of shards'
        self._states: dict[int, dict[int, ShardState]] = {}  # shard -> trainer -> what that one told last
        self._shown: dict[int, float] = {}  # shard -> how much of its rebuild the user was told of

    @property
    def plain_urls(self) -> tuple[str, ...]:
        """`urls` without passwords."""
        return tuple(url.plain for url in parse_urls(self.urls, {}))

    @property
    def servers_return(self) -> bool:
        """Whether a lost shard may get a server again without its user: its own, started again, or a spare."""
        return self._restarted is not None or bool(self._spares)

    def restart_dead(self) -> None:
        """Start dead local servers again, empty, where that is wanted."""
        if self._restarted is None:
            return
        for shard in range(self._restarted.count):
            if self._observer.may_start(shard) and self._restarted.restart(shard):
                sys.stderr.write(f"store shard {shard}: its server died, and was started again, empty\n")

    def changed(self, trainer: int, change: ShardChange) -> None:
        """Note what became of a shard for a trainer; a spare may take its place."""
        shard = change.shard
        # Whether it is of the server in use, and not of one that another takes the place of.
        in_use = change.url == self.plain_urls[shard] and all(wanted != shard for wanted, _ in list(self._wanted))
        if change.what == "unreachable":
            if in_use:
                sys.stderr.write(f"store shard {shard}: no server for it yet ({change.why})\n")
        else:
            self._note(trainer, shard, ShardState(change.what, 0.0), change.why)
        if change.what in ("lost", "unreachable") and in_use and self._spares and self._restarted is None:
            self._wanted.append((shard, self._spares.pop(0)))

    def rebuilding(self, trainer: int, shard: int, share: float) -> None:
        """Note how much of a shard is rebuilt for a trainer."""
        self._note(trainer, shard, ShardState("rebuilding", share))

    def _note(self, trainer: int, shard: int, state: ShardState, why: str = "") -> None:
        """Note what a trainer tells, and tell the user where that changes how the shard is for all trainers together."""
        before = self._state(shard)
        self._states.setdefault(shard, {})[trainer] = state
        after = self._state(shard)
        if after.what == "lost" != before.what:
            sys.stderr.write(f"store shard {shard}: is lost; training goes on, its rows come from parity ({why})\n")
            self._shown[shard] = 0.0
        elif after.what == "ok" != before.what:
            sys.stderr.write(f"store shard {shard}: is whole again\n")
        elif after.what == "rebuilding" and after.rebuilt >= self._shown.get(shard, 0.0) + SHOWN_STEP:
            self._shown[shard] = after.rebuilt
            sys.stderr.write(f"store shard {shard}: {after.rebuilt:.0%} rebuilt\n")

    def _state(self, shard: int) -> ShardState:
        """How a shard is for all trainers together: the worst that any told, and the least that any has rebuilt."""
        told = self._states.get(shard, {}).values()
        worst_first: tuple[Literal["lost", "rebuilding"], ...] = ("lost", "rebuilding")
        for what in worst_first:
            of_these = [state.rebuilt for state in told if state.what == what]
            if of_these:
                return ShardState(what, min(of_these))
        return ShardState("ok", 1.0)

    def want_replacement(self, request: AskReplace) -> Replacing | Refused:
        """Have a server take the place of a shard's, if it can. request.old: the shard's number, or its server's URL without password."""
        old = request.old
        if not self.protected:
            return Refused("the run has no parity, so a shard's rows are nowhere else; train with --parity")
        plain = self.plain_urls
        shard = int(old) if old.isdigit() and int(old) < len(plain) else plain.index(old) if old in plain else None
        if shard is None:
            return Refused(f"no store shard of the run is {old}; there are {', '.join(plain)}")
        try:
            url = parse_url(request.new)
            in_use = [*enumerate(self.urls), *list(self._wanted)]
            self._check(url, [(number, parse_url(used)) for number, used in in_use])
        except CacheError as error:
            return Refused(str(error))
        self._wanted.append((shard, url.plain))
        return Replacing(shard, url.plain)

    def take_replacement(self) -> tuple[int, str] | None:
        """The next shard whose server another is to take the place of from now on, and that one's URL, without password; None: there is none."""
        if not self._wanted:
            return None
        shard, url = self._wanted.popleft()
        self.urls[shard] = url
        self._spares = [spare for spare in self._spares if spare != url]
        return shard, self.plain_urls[shard]

    @property
    def states(self) -> dict[int, ShardStatus]:
        """How each shard is of which trainers told anything, by its number."""
        states = {shard: self._state(shard) for shard in list(self._states)}
        return {
            shard: ShardStatus(state.what, state.rebuilt if state.what == "rebuilding" else None)
            for shard, state in states.items()
        }
