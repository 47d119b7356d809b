"""`foreload stores add`, `remove` and `move`: a run's rows move to other store shards, beside its training or at rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from foreload.cache.client.local import clear_removed
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.trainer.cluster.messages.control import AskMove, Refused, ask
from foreload.trainer.errors import RunError
from foreload.trainer.job.job_layouts import layouts_of
from foreload.trainer.memory.seen_servers import check_room
from foreload.trainer.run.directory import STORES, Run, locked
from foreload.trainer.run.event_log import EventLog, RowsMove, RowsMoved
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.progress_bar import progress_bar
from foreload.trainer.run.servers import left_over, plain, with_servers
from foreload.trainer.run.shard_change import ShardChange
from foreload.trainer.saved.at_rest import opened_rows, servers_at_rest
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.migration import NewServers, check_whole
from foreload.trainer.saved.owned_at_rest import PATIENCE, owned_at_rest
from foreload.trainer.saved.run_rows import own_rows

_ASK_TIMEOUT = timedelta(minutes=1)  # the launcher looks at the new servers first
REBUILT_BY_RESUME = "foreload train --resume, with a server there, rebuilds it"
_SHARES = 1000  # that the progress bar has


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows move, or have. joining, leaving: numbers of shards; moved: the share that has."""

    run: str
    joining: tuple[int, ...]
    leaving: tuple[int, ...]
    moved: float

    def text(self) -> str:
        """For a person."""
        joins, leaves = (", ".join(map(str, which)) for which in (self.joining, self.leaving))
        said = [f"shard {joins} joins"] * bool(joins) + [f"shard {leaves} leaves"] * bool(leaves)
        through = "all rows have moved" if self.moved == 1.0 else "rows move; foreload stores status tells how far that is"
        return f"{', '.join(said)}: {through}"


def run(path: str, store: str | None, change: ShardChange, folder_moved: bool = False) -> Moves:
    """Have shards added, or one removed or moved.

    Where the run trains, rows move while it does, and this returns as they begin to; else when all have moved. store: URLs with passwords of the
    servers that the run has. folder_moved: the user says that the run's folder was. Raises RunError and CacheError; what is broken off goes on with
    the same call, or with --resume.
    """
    asked_run = Run.open(path)
    answer = ask(asked_run.path, AskMove(change.change, change.shard, change.urls), _ASK_TIMEOUT)
    if isinstance(answer, Refused):
        raise RunError(f"stores {change.change}: {answer.error}")
    if answer is not None:
        return Moves(path, answer.joining, answer.leaving, 0.0)
    with locked(asked_run.path) as lock:
        before = _move_at_rest(Run.open(path, lock), store, change, folder_moved)
    return Moves(path, before.joining, before.leaving, 1.0)


def _move_at_rest(moved: Run, store: str | None, change: ShardChange, folder_moved: bool) -> Placement:
    """Move the rows of a run that does not train; returns the placement by which they did."""
    status = _status_of(moved)
    events = EventLog(moved.path, status.step, status.term + 1)
    with servers_at_rest(moved, status, store) as at_rest:
        at_rest.changed = True
        urls = at_rest.urls
        with _opened(moved, status, urls) as opened:
            own_rows(moved, opened, folder_moved)
            at_rest.of_the_stop = True
        manifest, schedule = moved.manifest, schedule_of(moved)
        room = partial(check_room, manifest, schedule, layouts_of(manifest.training_job, schedule.header.features))
        servers = NewServers(manifest, manifest.training_job.store_silence, at_rest.local, room)
        if not moved.placement.migrating:
            placement = change.placement_after(moved.placement, urls)
            urls = servers.made_ready(change.urls, placement, urls)
            moved.write_manifest(with_servers(moved.manifest, placement, plain(urls)))
            moved.write_placement(placement)
            # Whatever of this comes to pass, it goes with that.
            moved.forget_saved_placement()
            events.note(RowsMove(joining=placement.joining, leaving=placement.leaving))
        elif not change.is_under_way(moved.placement, urls):
            raise RunError(
                f"stores {change.change}: its rows are on their way to other store shards already, as an earlier command asked; the same "
                "command, or --resume, goes on with that"
            )
        with _opened(moved, status, urls) as opened:
            _move(moved, opened)
    # What local stores save goes with either placement until then.
    before = moved.placement
    moved.write_placement(before.completed())
    moved.forget_saved_placement()
    events.note(RowsMoved(joining=before.joining, leaving=before.leaving))
    _leave(moved, servers)
    return before


def _status_of(moved: Run) -> Status:
    """The status of a run whose rows can move. Raises RunError for one that has none, or lacks shards."""
    status = moved.saved_status()
    if status.step < moved.manifest.stages[0].first_step:
        raise RunError(
            f"run {moved.path}: never stopped cleanly, so it has no rows to move; --resume it, and ask while it trains"
        )
    check_whole(status.lost, (), REBUILT_BY_RESUME)
    return status


def _opened(moved: Run, status: Status, urls: Sequence[str]) -> AbstractContextManager[Store]:
    """The servers of a run, with all of its rows. Raises RunError and CacheError where one lacks any: it is made whole first."""
    return opened_rows(moved, status, urls, moved.manifest.training_job.store_silence)


def _move(moved: Run, opened: Store) -> None:
    """Move all rows, as the owner of every lane."""
    with owned_at_rest(moved, opened) as traffic, progress_bar(_SHARES, "") as bar:
        check_whole(traffic.shards.lost, (), REBUILT_BY_RESUME)
        while traffic.shards.migrated < 1.0:
            traffic.repair_shards(PATIENCE)
            shards = traffic.shards
            bar.update(int(shards.migrated * _SHARES) - bar.n)
            check_whole(shards.lost, (), REBUILT_BY_RESUME)


def _leave(moved: Run, servers: NewServers) -> None:
    """Remove what a run has on servers that are none of its any more, and forget them."""
    manifest, placement = moved.manifest, moved.placement
    emptied = []
    for shard, url in left_over(manifest, placement).items():
        if (why := servers.leave(url)) is None:
            emptied.append(url)
        else:
            sys.stderr.write(f"store shard {shard}: is removed, but not all of it: {why}\n")
    if manifest.local_stores is not None:
        clear_removed(moved.path / STORES, placement.removed)
    urls = [url if shard in placement.live else "" for shard, url in enumerate(manifest.store_urls)]
    moved.write_manifest(with_servers(manifest, placement, urls, emptied))
