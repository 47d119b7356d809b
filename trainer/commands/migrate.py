"""`foreload stores add`, `remove` and `move`: migrate a run's rows to other store shards.

If the run trains, its trainers migrate the rows during training. If it is stopped, this command
does. A change is done in the steps of `run.shard_change`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from foreload.base.progress import progress_bar
from foreload.cache.client.local import clear_removed
from foreload.cache.client.store import Store
from foreload.cache.parity.placement import Placement
from foreload.trainer.cluster.messages.control import AskMove, Refused, ask
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import layouts_of
from foreload.trainer.memory.seen_servers import check_room
from foreload.trainer.run.directory import STORES, Run, locked
from foreload.trainer.run.engine_record import with_passwords
from foreload.trainer.run.event_log import EventLog, RowsMove, RowsMoved
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.servers import plain
from foreload.trainer.run.shard_change import ShardChange, ShardProgram, Step
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.migration import LocalServers, NewServers, check_whole
from foreload.trainer.saved.run_rows import own_rows
from foreload.trainer.saved.stopped_stores import StoppedServers, opened_rows, stopped_servers
from foreload.trainer.saved.stopped_traffic import PATIENCE, stopped_traffic

# The launcher checks the new servers before it answers.
_ASK_TIMEOUT = timedelta(minutes=1)
REBUILT_BY_RESUME = "foreload train --resume, with a server there, rebuilds it"
_SHARES = 1000  # units of the progress bar


@dataclass(frozen=True, slots=True)
class Moves:
    """A migration that has begun or is complete.

    Attributes:
        joining: the numbers of the shards that are added.
        leaving: the numbers of the shards that are removed.
        moved: the share of rows that have moved, 0 to 1.
    """

    run: str
    joining: tuple[int, ...]
    leaving: tuple[int, ...]
    moved: float

    def text(self) -> str:
        """Describe the migration for the terminal."""
        joins, leaves = (", ".join(map(str, which)) for which in (self.joining, self.leaving))
        said = [f"shard {joins} joins"] * bool(joins) + [f"shard {leaves} leaves"] * bool(leaves)
        through = "all rows have moved" if self.moved == 1.0 else "rows are moving; foreload stores status shows how far"
        return f"{', '.join(said)}: {through}"


def run(path: str, store: str | None, change: ShardChange, folder_moved: bool = False) -> Moves:
    """Add store shards, or remove or move one.

    If the run trains, the call returns when the migration begins. If it is stopped, the call
    returns when all rows have moved. After a crash, the same call or --resume continues the
    migration.

    Args:
        path: the folder of the run.
        store: the URLs, with passwords, of the run's present servers. If None, the run's own.
        folder_moved: whether the user states that the run's folder was moved.

    Raises:
        RunError: the change cannot be made, or another one is under way.
        CacheError: a server failed.
    """
    asked_run = Run.open(path)
    answer = ask(asked_run.path, AskMove(change.change, change.shard, change.urls), _ASK_TIMEOUT)
    if isinstance(answer, Refused):
        raise RunError(f"stores {change.change}: {answer.error}")
    if answer is not None:
        return Moves(path, answer.joining, answer.leaving, 0.0)
    with locked(asked_run.path) as lock:
        before = _migrate_stopped(Run.open(path, lock), store, change, folder_moved)
    return Moves(path, before.joining, before.leaving, 1.0)


def _migrate_stopped(moved: Run, store: str | None, change: ShardChange, folder_moved: bool) -> Placement:
    """Migrate the rows of a stopped run. Returns the placement by which they moved."""
    status = _status_of(moved)
    with stopped_servers(moved, status, store) as servers:
        servers.changed = True
        with _opened(moved, status, servers.urls) as opened:
            own_rows(moved, opened, folder_moved)
            servers.of_the_stop = True
        driver = _Driver(moved, status, servers)
        # An earlier call may have crashed before these steps.
        driver.go_on(Step.LEAVE, Step.NAME)
        if not moved.placement.migrating:
            driver.ask(change)
        elif not change.is_under_way(moved.placement, servers.urls):
            raise RunError(
                f"stores {change.change}: its rows are already moving to other store shards, as an earlier command asked; repeat that "
                "command, or use --resume, to finish it"
            )
        driver.go_on(Step.NAME, Step.PLACE, Step.MOVE)
    # Local stores save their rows as the block above is left. What they save fits the migrating
    # placement and the settled one, which is published only now.
    before = moved.placement
    driver.go_on(*Step)
    return before


class _Driver:
    """Does the steps of a change of store shards (`run.shard_change`) of a stopped run.

    Args:
        servers: the running servers of the run's shards.
    """

    def __init__(self, moved: Run, status: Status, servers: StoppedServers) -> None:
        self._run, self._status, self._urls = moved, status, servers.urls
        manifest, schedule = moved.manifest, schedule_of(moved)
        room = partial(check_room, manifest, schedule, layouts_of(manifest.training_job, schedule.header.features))
        own = None if servers.local is None else LocalServers(servers.local)
        self._new = NewServers(manifest, manifest.training_job.store_silence, own, room)
        self._named = manifest.store_urls or plain(servers.urls)
        self._events = EventLog(moved.path, status.step, status.term + 1)
        self._program, self._migrated = ShardProgram.found(manifest, moved.placement), False

    def ask(self, change: ShardChange) -> None:
        """Prepare the servers for a change. `go_on` then begins the change."""
        placement = change.placement_after(self._run.placement, self._urls)
        self._urls = self._new.made_ready(change.urls, placement, self._urls)
        self._named = plain(self._urls)
        self._program = self._program.ask(placement)

    def go_on(self, *steps: Step) -> None:
        """Do the next steps, as long as each is one of `steps`."""
        while (step := self._program.next_step(self._migrated, unused=True)) is not None and step in steps:
            program, placement = self._program, self._program.placement
            if step is Step.NAME:
                self._run.write_manifest(program.named_in(self._run.manifest, self._named))
                self._program = program.name()
            elif step is Step.PLACE:
                self._program = program.place()
                placement = self._publish()
                self._events.note(RowsMove(joining=placement.joining, leaving=placement.leaving))
            elif step is Step.MOVE:
                self._move()
                self._migrated = True
            elif step is Step.COMPLETE:
                self._program = program.complete(self._named)
                self._publish()
                self._events.note(RowsMoved(joining=placement.joining, leaving=placement.leaving))
            elif self._run.manifest.local_stores is not None:
                clear_removed(self._run.path / STORES, placement.removed)
                self._program = program.leave(())
            else:
                emptied = self._new.leave(self._with_passwords(program.leaving))
                self._program = program.leave(plain([*emptied]))

    def _with_passwords(self, urls: Mapping[int, str]) -> dict[int, str]:
        """Return the URLs of servers, by number, with the passwords that they want."""
        known = {shard: url for shard, url in enumerate(self._urls) if url}
        of_engine = with_passwords(self._run.path, [*urls.values()])
        return {shard: known.get(shard, url) for shard, url in zip(urls, of_engine, strict=True)}

    def _publish(self) -> Placement:
        """Publish the program's placement.

        The placement of the local stores' last save is deleted: their next save fits the published
        one, however far the migration comes.
        """
        self._run.write_placement(self._program.placement)
        self._run.forget_saved_placement()
        return self._program.placement

    def _move(self) -> None:
        """Move all rows, as the owner of every lane."""
        with (
            _opened(self._run, self._status, self._urls) as opened,
            stopped_traffic(self._run, opened) as traffic,
            progress_bar(_SHARES, "") as bar,
        ):
            check_whole(traffic.shards.lost, (), REBUILT_BY_RESUME)
            while traffic.shards.migrated < 1.0:
                traffic.repair_shards(PATIENCE)
                shards = traffic.shards
                bar.update(int(shards.migrated * _SHARES) - bar.n)
                check_whole(shards.lost, (), REBUILT_BY_RESUME)


def _status_of(moved: Run) -> Status:
    """Return the status of a run whose rows can move.

    Raises:
        RunError: the run never stopped cleanly, or lacks shards.
    """
    status = moved.saved_status()
    if status.step < moved.manifest.stages[0].first_step:
        raise RunError(
            f"run {moved.path}: never stopped cleanly, so it has no rows to move; resume it with --resume, and ask again while it trains"
        )
    check_whole(status.lost, (), REBUILT_BY_RESUME)
    return status


def _opened(moved: Run, status: Status, urls: Sequence[str]) -> AbstractContextManager[Store]:
    """Open the servers of a run, which must have all of its rows.

    Raises:
        RunError: a server lacks rows of the run, and must be made whole first.
        CacheError: a server failed.
    """
    return opened_rows(moved, status, urls, moved.manifest.training_job.store_silence)
