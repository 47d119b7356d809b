"""`foreload stores list`, `foreload stores delete` and `foreload delete`.

They list the runs that have rows on servers, and delete such rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_urls
from foreload.cache.protocol.shards.namespace import Holding, all_holdings, check_name, holding_of, remove
from foreload.trainer.cluster.engines.opened import ended
from foreload.trainer.cluster.messages.control import training_status
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import Run, locked
from foreload.trainer.run.servers import servers_had
from foreload.trainer.saved.run_rows import Overrule, Server, check_not_training, delete_rows, reached


@dataclass(frozen=True, slots=True)
class Held:
    """What a namespace has on a server.

    If the run's note on the server was lost, `shard`, `shards` and `run` are None.

    Attributes:
        shard: the number of the server's shard in the run.
        shards: the number of the run's shards.
        run: the run's id, as in its manifest.json.
        lanes: the number of lanes.
        rows: the number of rows, parity rows included.
        bytes: their memory. If None, the server does not report it.
    """

    namespace: str
    shard: int | None
    shards: int | None
    run: str | None
    lanes: int
    rows: int
    bytes: int | None

    @classmethod
    def of(cls, holding: Holding) -> Held:
        """Return what the client found, as a Held."""
        note = holding.note
        shard, shards, run = (None, None, None) if note is None else (note.shard, note.shards, note.identity.get("run"))
        return cls(holding.namespace, shard, shards, run, holding.lanes, holding.rows, holding.bytes)

    @property
    def owner(self) -> str:
        """The run and the shard that own the rows, in words."""
        return f"shard {self.shard} of {self.shards} of run {self.run}" if self.run else "of no run: its note was lost"

    def text(self) -> str:
        """Return the numbers of rows, lanes and bytes, in words."""
        size = "" if self.bytes is None else f", {self.bytes / 2**20:,.1f} MiB"
        return f"{self.rows:,} rows, with parity rows, of {self.lanes} lanes{size}"


@dataclass(frozen=True, slots=True)
class ServerRows:
    """The namespaces that have rows on a server.

    Attributes:
        why: the reason why the server cannot be reached; None if it can.
    """

    url: str
    namespaces: list[Held]
    why: str | None

    def text(self) -> str:
        """Return a line for each namespace, or one line if there is none."""
        if self.why or not self.namespaces:
            return f"{self.url}  {f'down  {self.why}' if self.why else 'no run has rows here'}"
        return "\n".join(f"{self.url}  namespace {one.namespace}, {one.owner}: {one.text()}" for one in self.namespaces)


@dataclass(frozen=True, slots=True)
class Listed:
    """The rows that servers have."""

    servers: list[ServerRows]

    def text(self) -> str:
        """Return the lines of all servers."""
        return "\n".join(server.text() for server in self.servers)


@dataclass(frozen=True, slots=True)
class ShardDeleted:
    """The rows that were deleted on a server.

    If both `deleted` and `why` are None, another run has taken the namespace there.

    Attributes:
        deleted: what was deleted.
        why: the reason why the server could not be reached.
    """

    url: str
    deleted: Held | None
    why: str | None

    @classmethod
    def of(cls, server: Server) -> ShardDeleted:
        """Return what the server had before it was deleted."""
        return cls(str(server.url), None if server.held is None else Held.of(server.held), server.why)

    def text(self, namespace: str) -> str:
        """Return the result as one line."""
        if self.why:
            return f"left  {self.url}: {self.why}; later: foreload stores delete {self.url} {namespace}"
        if self.deleted is None:
            return f"left  {self.url}: namespace {namespace} there belongs to another run"
        if self.deleted.run is None and not self.deleted.lanes:
            return f"{self.url}: has nothing in namespace {namespace}"
        return f"deleted  {self.url}: namespace {namespace}, {self.deleted.text()}"


@dataclass(frozen=True, slots=True)
class NamespaceDeleted:
    """The rows of a namespace that were deleted."""

    namespace: str
    shards: list[ShardDeleted]

    def text(self) -> str:
        """Return a line for each server."""
        return "\n".join(shard.text(self.namespace) for shard in self.shards)


@dataclass(frozen=True, slots=True)
class RunDeleted:
    """A run that was deleted.

    Attributes:
        shards: the result for every server that the run uses or used.
        local_stores: how many local store shards were deleted. If None, the run had none.
        kept: files that stay in the run's folder because they are not the run's.
        forced: what --force overruled, in words; None if nothing.
    """

    run: str
    namespace: str
    shards: list[ShardDeleted]
    local_stores: int | None
    kept: list[str]
    forced: str | None

    def text(self) -> str:
        """Return the result for the terminal."""
        lines = [f"forced  {self.forced}"] if self.forced else []
        lines += [shard.text(self.namespace) for shard in self.shards]
        if self.local_stores:
            lines.append(f"deleted  its {self.local_stores} local store shards")
        kept = ", ".join(self.kept[:3]) + (" and others" if len(self.kept) > 3 else "")
        return "\n".join([*lines, f"deleted  {self.run}" + (f", except files that are not the run's: {kept}" if kept else "")])


def listed(urls: str) -> Listed:
    """List the namespaces that have rows on servers.

    Raises:
        StoreError: a server refuses.
    """
    with reached(parse_urls(urls)) as servers:
        return Listed([_listed(server) for server in servers])


def _listed(server: Server) -> ServerRows:
    held: list[Holding] = []
    server.ask(lambda store: held.extend(all_holdings(store, 0)))
    return ServerRows(str(server.url), [Held.of(holding) for holding in held], server.why)


def deleted(urls: str, namespace: str, force: bool = False) -> NamespaceDeleted:
    """Delete a namespace from servers, whichever run it belongs to.

    Args:
        force: whether to delete it even if its run trains on this host.

    Raises:
        RunError: the namespace's run trains on this host.
        StoreError: a server refuses.
    """
    check_name(namespace)
    with reached(parse_urls(urls)) as servers:
        for server in servers if not force else ():
            server.ask(partial(check_not_training, namespace))
        for server in servers:
            server.ask(partial(_delete, server, namespace))
    return NamespaceDeleted(namespace, [ShardDeleted.of(server) for server in servers])


def _delete(server: Server, namespace: str, store: Store) -> None:
    server.held = holding_of(store, 0, namespace)
    remove(store, namespace)


def run(path: str, urls: str | None, overrule: Overrule) -> RunDeleted:
    """Delete a run: its rows, its local servers and its folder.

    Args:
        urls: the URLs of its servers, with passwords. If None, the run's own.

    Raises:
        RunError: the run trains, or its folder does not own the rows.
        StoreError: a server refuses.
    """
    deleted_run = Run.open(path)
    if training_status(deleted_run.path) is not None:
        raise RunError(f"run {path}: is being trained; stop it with Ctrl-C first")
    manifest, servers, forced = deleted_run.manifest, list[Server](), None
    with locked(deleted_run.path), ended(deleted_run.path):
        local_stores = None if manifest.local_stores is None else len(deleted_run.placement.live)
        if local_stores is None:
            servers, forced = delete_rows(deleted_run, *servers_had(deleted_run, urls), overrule)
        deleted_run.delete()
    kept = sorted(item.name for item in Path(path).iterdir()) if Path(path).exists() else []
    return RunDeleted(path, manifest.namespace, [ShardDeleted.of(server) for server in servers], local_stores, kept, forced)
