"""What the launcher does about store shards while trainers run: it knows how each is, starts dead local servers again, and has spares and
servers that the user names take the place of others.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from cache.errors import CacheError
from cache.local import LocalStores
from cache.url import parse_urls
from trainer.faults import Witness
from trainer.job import TrainJob


class StoreShards:
    """The store shards of one call. Threads of the control socket call `want_replacement` and `states`, the launcher's own all else.

    urls: of their servers, in order, with passwords; those that trainers were told of. protected: whether there is parity.
    """

    def __init__(self, job: TrainJob, urls: Sequence[str], local: LocalStores | None, protected: bool, witness: Witness) -> None:
        self.urls = list(urls)
        self.protected, self._witness = protected, witness
        self._restarted = local if protected and not job.no_restart else None
        self._spares = [str(url) for url in parse_urls(job.spare)] if job.spare else []
        self._wanted: deque[tuple[int, str]] = deque()  # servers that are to take the place of shards'
        self._lost: dict[int, set[int]] = {}  # shard -> the trainers that go on without it
        self._states: dict[int, dict[str, Any]] = {}

    @property
    def plain_urls(self) -> tuple[str, ...]:
        """The same without passwords."""
        return tuple(url.plain for url in parse_urls(self.urls, {}))

    @property
    def servers_return(self) -> bool:
        """Whether lost shards will have a server again by themselves."""
        return self._restarted is not None or bool(self._spares)

    def restart_dead(self) -> None:
        """Start dead local servers again, empty, where that is wanted."""
        if self._restarted is None:
            return
        for shard in range(self._restarted.count):
            if self._witness.may_start(shard) and self._restarted.restart(shard):
                sys.stderr.write(f"store shard {shard}: its server died, and was started again, empty\n")

    def changed(self, trainer: int, mail: Mapping[str, Any]) -> None:
        """Note what a trainer tells of a shard: {"shard", "what": "lost", "rebuilding" or "ok", maybe "done"}; a spare may take its place."""
        shard, what = mail["shard"], mail["what"]
        self._states[shard] = {"state": what} | ({"rebuilt": mail["done"]} if "done" in mail else {})
        lost_by = self._lost.setdefault(shard, set())
        first = what == "lost" and not lost_by
        if what == "lost":
            lost_by.add(trainer)
        elif what == "ok":
            lost_by.discard(trainer)
        if first:
            sys.stderr.write(f"store shard {shard}: is lost; training goes on, its rows come from parity\n")
            if self._spares and self._restarted is None:
                self._wanted.append((shard, self._spares.pop(0)))
        elif what == "ok" and not lost_by:
            sys.stderr.write(f"store shard {shard}: is whole again\n")

    def want_replacement(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `replace` on the control socket: {"old": URL or number of a shard, "new": URL}."""
        old, new = str(request.get("old")), str(request.get("new"))
        if not self.protected:
            return {"error": "the run has no parity, so a shard's rows are nowhere else; train with --parity"}
        plain = self.plain_urls
        shard = int(old) if old.isdigit() and int(old) < len(plain) else plain.index(old) if old in plain else None
        if shard is None:
            return {"error": f"no store shard of the run is {old}; there are {', '.join(plain)}"}
        try:
            (url,) = parse_urls(new)
        except (CacheError, ValueError) as error:
            return {"error": f"cannot use {new}: {error}"}
        self._wanted.append((shard, str(url)))
        return {"replacing": shard, "by": url.plain}

    def take_replacement(self) -> tuple[int, str] | None:
        """The next shard whose server another is to take the place of from now on, and that one's URL, without password; None: there is none."""
        if not self._wanted:
            return None
        shard, url = self._wanted.popleft()
        self.urls[shard] = url
        return shard, self.plain_urls[shard]

    @property
    def states(self) -> dict[int, dict[str, Any]]:
        """Of the shards that anything was told of: {"state": "lost", "rebuilding" or "ok", "rebuilt": a share}."""
        return {shard: dict(state) for shard, state in self._states.items()}
