"""`foreload stores list`, `foreload stores delete` and `foreload delete`: what runs have rows on servers, and the end of those."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_urls
from foreload.cache.protocol.holdings import Holding, all_holdings, holding_of
from foreload.cache.protocol.namespace import check_name, remove
from foreload.trainer.cluster.messages.control import training_status
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import Run, locked
from foreload.trainer.run.servers import servers_had
from foreload.trainer.saved.run_rows import Overrule, Server, check_not_training, delete_rows, reached


def listed(urls: str) -> dict[str, Any]:
    """{"servers": [{"url", "namespaces", "why"}]}; namespaces: {"namespace", "shard", "shards", "run", "lanes", "rows", "bytes"} each.

    rows: with parity rows; run: the id that the run's manifest.json has; why: where a server cannot be reached. Raises StoreError.
    """

    with reached(parse_urls(urls)) as servers:
        return {"servers": [_listed(server) for server in servers]}


def _listed(server: Server) -> dict[str, Any]:
    held: list[Holding] = []
    server.ask(lambda store: held.extend(all_holdings(store, 0)))
    return {"url": str(server.url), "namespaces": [_told(holding) for holding in held], "why": server.why}


def deleted(urls: str, namespace: str, force: bool = False) -> dict[str, Any]:
    """Remove a namespace from servers, whatever run it is of: {"namespace", "shards": [{"url", "deleted", "why"}]}.

    deleted: what was there, as `listed` has it; why: where it cannot be reached. force: even under a run that trains on this host. Raises RunError,
    StoreError.
    """
    check_name(namespace)
    with reached(parse_urls(urls)) as servers:
        for server in servers if not force else ():
            server.ask(partial(check_not_training, namespace))
        for server in servers:
            server.ask(partial(_delete, server, namespace))
    return {"namespace": namespace, "shards": [_entry(server) for server in servers]}


def _delete(server: Server, namespace: str, store: Store) -> None:
    server.held = holding_of(store, 0, namespace)
    remove(store, namespace)


def run(path: str, urls: str | None, overrule: Overrule) -> dict[str, Any]:
    """Delete a run: {"run", "namespace", "shards", "local_stores", "kept", "forced"}.

    shards: as of `deleted`, of every server that the run uses or used; deleted and why are both None where another run has taken the namespace.
    kept: the files in its folder that are not the run's. forced: what `force` overruled, in words; else None. urls: those of its servers with
    passwords; by default the run's. Raises RunError for a run that trains, and for a folder that does not own the rows; StoreError where a server
    refuses.
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
    return {
        "run": path,
        "namespace": manifest.namespace,
        "shards": [_entry(server) for server in servers],
        "local_stores": local_stores,
        "kept": kept,
        "forced": forced,
    }


def _entry(server: Server) -> dict[str, Any]:
    """A server as an entry of `deleted`'s shards."""
    return {"url": str(server.url), "deleted": None if server.held is None else _told(server.held), "why": server.why}


def _told(holding: Holding) -> dict[str, Any]:
    note = holding.note
    return {
        "namespace": holding.namespace,
        "shard": note and note.shard,
        "shards": note and note.shards,
        "run": note and note.identity.get("run"),
        "lanes": holding.lanes,
        "rows": holding.rows,
        "bytes": holding.bytes,
    }


def listed_text(found: dict[str, Any]) -> str:
    """What `listed` found, a line for each namespace of each server."""
    lines = []
    for server in found["servers"]:
        if server["why"] or not server["namespaces"]:
            lines.append(f"{server['url']}  {'down  ' + server['why'] if server['why'] else 'no run has rows here'}")
        for held in server["namespaces"]:
            whose = (
                f"shard {held['shard']} of {held['shards']} of run {held['run']}"
                if held["run"]
                else "of no run, its note is gone"
            )
            lines.append(f"{server['url']}  namespace {held['namespace']}, {whose}: {_size(held)}")
    return "\n".join(lines)


def deleted_text(found: dict[str, Any]) -> str:
    """What `deleted` or `run` did, a line for each server, and for the folder."""
    namespace = found["namespace"]
    lines = [f"forced  {found['forced']}"] if found.get("forced") else []
    for shard in found["shards"]:
        if shard["why"]:
            lines.append(f"left  {shard['url']}: {shard['why']}; later: foreload stores delete {shard['url']} {namespace}")
        elif shard["deleted"] is None:
            lines.append(f"left  {shard['url']}: namespace {namespace} is another run's there")
        elif shard["deleted"]["run"] is None and not shard["deleted"]["lanes"]:
            lines.append(f"{shard['url']}: nothing of namespace {namespace} was there")
        else:
            lines.append(f"deleted  {shard['url']}: namespace {namespace}, {_size(shard['deleted'])}")
    if found.get("local_stores"):
        lines.append(f"deleted  its {found['local_stores']} local store shards")
    if "run" in found:
        kept = ", ".join(found["kept"][:3]) + (" and others" if len(found["kept"]) > 3 else "")
        lines.append(f"deleted  {found['run']}" + (f", but for files that are not the run's: {kept}" if kept else ""))
    return "\n".join(lines)


def _size(held: dict[str, Any]) -> str:
    size = "" if held["bytes"] is None else f", {held['bytes'] / 2**20:,.1f} MiB"
    return f"{held['rows']:,} rows, with parity rows, of {held['lanes']} lanes{size}"
