"""`foreload stores list`, `foreload stores delete` and `foreload delete`: what runs have rows on servers, and the end of those."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from foreload.cache.client.store import Store
from foreload.cache.client.url import StoreUrl, parse_urls
from foreload.cache.errors import StoreUnavailable
from foreload.cache.protocol.holdings import Holding, all_holdings, holding_of
from foreload.cache.protocol.namespace import check_name, remove
from foreload.trainer.cluster.control import training_status
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import Run, locked

TIMEOUT = timedelta(seconds=30)  # a server may have many keys to go through
_CONNECT = timedelta(seconds=1)


def listed(urls: str) -> dict[str, Any]:
    """{"servers": [{"url", "namespaces", "why"}]}; namespaces: {"namespace", "shard", "shards", "run", "lanes", "rows", "bytes"} each.

    rows: with parity rows; run: the id that the run's manifest.json has; why: where a server cannot be reached. Raises StoreError.
    """

    def namespaces(store: Store) -> dict[str, Any]:
        return {"namespaces": [_told(holding) for holding in all_holdings(store, 0)]}

    return {"servers": [{"namespaces": []} | _asked(url, namespaces) for url in parse_urls(urls)]}


def deleted(urls: str, namespace: str) -> dict[str, Any]:
    """Remove a namespace from servers, whatever run it is of: {"namespace", "shards": [{"url", "deleted", "why"}]}.

    deleted: what was there, as `listed` has it; why: where it cannot be reached. Raises StoreError.
    """
    check_name(namespace)
    return {"namespace": namespace, "shards": [_delete(url, namespace, None) for url in parse_urls(urls)]}


def run(path: str, urls: str | None) -> dict[str, Any]:
    """Delete a run: {"run", "namespace", "shards": as of `deleted`, "local_stores", "kept": the files in its folder that are not the run's}.

    deleted and why are both None for a shard where another run has taken the namespace. urls: those of its servers with passwords; by default the
    run's. Raises RunError for a run that trains, StoreError where a server refuses.
    """
    deleted_run = Run.open(path)
    if training_status(deleted_run.path) is not None:
        raise RunError(f"run {path}: is being trained; stop it with Ctrl-C first")
    manifest = deleted_run.manifest
    shards = []
    with locked(deleted_run.path):
        local_stores = None if manifest.local_stores is None else len(deleted_run.placement.live)
        if manifest.local_stores is None:
            shards = [
                _delete(url, manifest.namespace, manifest.identity)
                for url in parse_urls(urls or ",".join(url for url in manifest.store_urls if url))
            ]
        deleted_run.delete()
    kept = sorted(item.name for item in Path(path).iterdir()) if Path(path).exists() else []
    return {
        "run": path,
        "namespace": manifest.namespace,
        "shards": shards,
        "local_stores": local_stores,
        "kept": kept,
    }


def _delete(url: StoreUrl, namespace: str, identity: dict[str, Any] | None) -> dict[str, Any]:
    """Remove a namespace from a server; returns an entry of `deleted`'s shards. identity: of the run whose rows these must be; None for any."""

    def removed(store: Store) -> dict[str, Any]:
        holding = holding_of(store, 0, namespace)
        if identity is not None and holding.note is not None and holding.note["identity"] != identity:
            return {}
        remove(store, namespace)
        return {"deleted": _told(holding)}

    return {"deleted": None} | _asked(url, removed)


def _asked(url: StoreUrl, question: Callable[[Store], dict[str, Any]]) -> dict[str, Any]:
    """What a server answers, beside its URL; why it cannot be reached is part of that, and no error."""
    try:
        with Store([url], TIMEOUT, _CONNECT) as store:
            return {"url": str(url), "why": None} | question(store)
    except StoreUnavailable as error:
        return {"url": str(url), "why": str(error)}


def _told(holding: Holding) -> dict[str, Any]:
    note = holding.note or {}
    return {
        "namespace": holding.namespace,
        "shard": note.get("shard"),
        "shards": note.get("shards"),
        "run": note.get("identity", {}).get("run"),
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
    lines = []
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
