"""`foreload stores status`: the store shards of a run, whether it trains, rests or was broken off."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from cache.errors import CacheError
from cache.fence import read_epochs
from cache.local import LocalStores
from cache.marker import Marker
from cache.namespace import lane_key
from cache.resp import MARKER
from cache.store import Store
from cache.url import parse_url
from trainer.coordinator import ask
from trainer.run import STORES, Run

TIMEOUT = timedelta(seconds=5)


def run(path: str, store: str | None) -> dict[str, Any]:
    """Ask every shard; returns {"run", "state", "shards": [{"url", "state", ...}]}. A shard that is down is told, not raised."""
    found = Run.open(path)
    manifest, status = found.manifest, found.status
    shards: list[dict[str, Any]] = []
    lost = status.lost if status else []
    if manifest.local_stores is not None and (local := LocalStores.find(found.path / STORES)) is None:
        for shard in range(manifest.local_stores):
            saved = found.path / STORES / f"shard-{shard}.rdb"
            size = saved.stat().st_size if saved.exists() else None
            shards.append(
                {"shard": shard, "url": str(saved), "state": "at rest" if saved.exists() else "lost", "saved_bytes": size}
            )
    else:
        if manifest.local_stores is not None:
            assert local is not None
            urls = list(local.urls)
        else:
            urls = store.split(",") if store else list(manifest.store_urls)
        shards = [{"shard": shard, **_ask(url, manifest.namespace, manifest.lanes)} for shard, url in enumerate(urls)]
    training = ask(found.path, {"do": "status"}) or {}
    for told in shards:
        # The servers may be up: what they hold is not all that they should.
        if told["shard"] in lost and told["state"] in ("up", "at rest"):
            told["state"] = "degraded"
        seen = training.get("shards", {}).get(str(told["shard"]), {"state": "ok"})
        if told["state"] == "up" and seen["state"] != "ok":
            told |= seen
    return {"run": path, "namespace": manifest.namespace, "state": status.state if status else "never trained", "shards": shards}


def _ask(url: str, namespace: str, lanes: int) -> dict[str, Any]:
    try:
        with Store([url], TIMEOUT, timedelta(seconds=1)) as store:
            info = store.info(0)
            epochs = read_epochs(store, 0, namespace, lanes)
            keys = [lane_key(namespace, lane, int(epoch)) for lane, epoch in enumerate(epochs)]
            # One field of a lane's hash is the marker.
            fields = [store.command(0, "HLEN", key) for key in keys]
            markers = [store.command(0, "HGET", key, MARKER) for key in keys]
            return {
                "url": str(store.urls[0]),
                "state": "up",
                "version": info.get("redis_version"),
                "rows": sum(max(int(str(count)) - 1, 0) for count in fields),
                "markers": [str(Marker.parse(marker if isinstance(marker, bytes) else None)) for marker in markers],
                "memory_bytes": int(info["used_memory"]),
                "limit_bytes": int(info.get("maxmemory", 0)) or None,
            }
    except CacheError as error:
        return {"url": str(parse_url(url)), "state": "down", "why": str(error)}
