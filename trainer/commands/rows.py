"""`foreload stores list`, `foreload stores delete` and `foreload delete`: what runs have rows on servers, and the end of those."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_urls
from foreload.cache.protocol.shards.namespace import Holding, all_holdings, check_name, holding_of, remove
from foreload.trainer.cluster.messages.control import training_status
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import Run, locked
from foreload.trainer.run.servers import servers_had
from foreload.trainer.saved.run_rows import Overrule, Server, check_not_training, delete_rows, reached


@dataclass(frozen=True, slots=True)
class Held:
    """What a namespace has on a server. run: the id that the run's manifest.json has; shard, shards, run: None where its note is gone; rows: with
    parity rows; bytes: None where the server does not report it.
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
        """What a client found."""
        note = holding.note
        shard, shards, run = (None, None, None) if note is None else (note.shard, note.shards, note.identity.get("run"))
        return cls(holding.namespace, shard, shards, run, holding.lanes, holding.rows, holding.bytes)

    @property
    def owner(self) -> str:
        """Whose it is, in words."""
        return f"shard {self.shard} of {self.shards} of run {self.run}" if self.run else "of no run, its note is gone"

    def text(self) -> str:
        """How much it is."""
        size = "" if self.bytes is None else f", {self.bytes / 2**20:,.1f} MiB"
        return f"{self.rows:,} rows, with parity rows, of {self.lanes} lanes{size}"


@dataclass(frozen=True, slots=True)
class ServerRows:
    """What namespaces have rows on a server; why: where it cannot be reached."""

    url: str
    namespaces: list[Held]
    why: str | None

    def text(self) -> str:
        """A line for each namespace, or one."""
        if self.why or not self.namespaces:
            return f"{self.url}  {f'down  {self.why}' if self.why else 'no run has rows here'}"
        return "\n".join(f"{self.url}  namespace {one.namespace}, {one.owner}: {one.text()}" for one in self.namespaces)


@dataclass(frozen=True, slots=True)
class Listed:
    """What servers have."""

    servers: list[ServerRows]

    def text(self) -> str:
        """For a person."""
        return "\n".join(server.text() for server in self.servers)


@dataclass(frozen=True, slots=True)
class ShardDeleted:
    """What was deleted on a server; why: it cannot be reached. Both None: another run has taken the namespace there."""

    url: str
    deleted: Held | None
    why: str | None

    @classmethod
    def of(cls, server: Server) -> ShardDeleted:
        """What a server had, which is deleted."""
        return cls(str(server.url), None if server.held is None else Held.of(server.held), server.why)

    def text(self, namespace: str) -> str:
        """As a line."""
        if self.why:
            return f"left  {self.url}: {self.why}; later: foreload stores delete {self.url} {namespace}"
        if self.deleted is None:
            return f"left  {self.url}: namespace {namespace} is another run's there"
        if self.deleted.run is None and not self.deleted.lanes:
            return f"{self.url}: nothing of namespace {namespace} was there"
        return f"deleted  {self.url}: namespace {namespace}, {self.deleted.text()}"


@dataclass(frozen=True, slots=True)
class NamespaceDeleted:
    """What was deleted of a namespace."""

    namespace: str
    shards: list[ShardDeleted]

    def text(self) -> str:
        """For a person."""
        return "\n".join(shard.text(self.namespace) for shard in self.shards)


@dataclass(frozen=True, slots=True)
class RunDeleted:
    """What was deleted of a run. shards: of every server that it uses or used; kept: the files in its folder that are not the run's; forced: what
    `force` overruled, in words, else None.
    """

    run: str
    namespace: str
    shards: list[ShardDeleted]
    local_stores: int | None
    kept: list[str]
    forced: str | None

    def text(self) -> str:
        """For a person."""
        lines = [f"forced  {self.forced}"] if self.forced else []
        lines += [shard.text(self.namespace) for shard in self.shards]
        if self.local_stores:
            lines.append(f"deleted  its {self.local_stores} local store shards")
        kept = ", ".join(self.kept[:3]) + (" and others" if len(self.kept) > 3 else "")
        return "\n".join([*lines, f"deleted  {self.run}" + (f", but for files that are not the run's: {kept}" if kept else "")])


def listed(urls: str) -> Listed:
    """What namespaces have rows on servers. Raises StoreError."""
    with reached(parse_urls(urls)) as servers:
        return Listed([_listed(server) for server in servers])


def _listed(server: Server) -> ServerRows:
    held: list[Holding] = []
    server.ask(lambda store: held.extend(all_holdings(store, 0)))
    return ServerRows(str(server.url), [Held.of(holding) for holding in held], server.why)


def deleted(urls: str, namespace: str, force: bool = False) -> NamespaceDeleted:
    """Remove a namespace from servers, whatever run it is of. force: even under a run that trains on this host. Raises RunError, StoreError."""
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
    """Delete a run. urls: those of its servers with passwords; by default the run's.

    Raises RunError for a run that trains, and for a folder that does not own the rows; StoreError where a server refuses.
    """
    deleted_run = Run.open(path)
    if training_status(deleted_run.path) is not None:
        raise RunError(f"run {path}: is being trained; stop it with Ctrl-C first")
    manifest, servers, forced = deleted_run.manifest, list[Server](), None
    with locked(deleted_run.path):
        local_stores = None if manifest.local_stores is None else len(deleted_run.placement.live)
        if local_stores is None:
            servers, forced = delete_rows(deleted_run, *servers_had(deleted_run, urls), overrule)
        deleted_run.delete()
    kept = sorted(item.name for item in Path(path).iterdir()) if Path(path).exists() else []
    return RunDeleted(path, manifest.namespace, [ShardDeleted.of(server) for server in servers], local_stores, kept, forced)
