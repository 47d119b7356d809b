"""The servers of a run: the URL of each store shard by its number, across changes of the shards.

A shard keeps its number. The number of a removed shard is not used again, and its URL is "".
`--store` lists the URLs of the existing shards in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from foreload.base.errors import SettingError
from foreload.cache.client.local import LocalStores
from foreload.cache.client.url import StoreUrl, parse_url
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.trainer.errors import RunError, after_step
from foreload.trainer.job.job_values import Parity
from foreload.trainer.run.directory import STORES, Run
from foreload.trainer.run.engine_record import EngineRecord, with_passwords
from foreload.trainer.run.event_log import ShardReplaced, read_events
from foreload.trainer.run.manifest import Manifest, Status


def by_number(urls: Iterable[str], count: int, removed: Collection[int]) -> tuple[str, ...]:
    """Return the URL of each of `count` shards, "" for the removed ones.

    Args:
        urls: exactly the URLs of the other shards, in the order of their numbers.
    """
    given = iter(urls)
    numbered = tuple("" if shard in removed else next(given) for shard in range(count))
    assert next(given, None) is None
    return numbered


def numbered(urls: Sequence[str], placement: Placement) -> tuple[str, ...]:
    """Return a trainer's URLs by shard number.

    Args:
        urls: the URLs by shard number, or only those of the existing shards in order.

    Raises:
        SettingError: the number of URLs is wrong.
    """
    if len(urls) == placement.shard_count:
        return tuple(urls)
    if len(urls) == len(placement.live):
        return by_number(urls, placement.shard_count, placement.removed)
    raise SettingError(
        f"--store: must name the {len(placement.live)} store shards of the run, in the order of their numbers; got {len(urls)}"
    )


def asked(urls: Sequence[str]) -> list[str | None]:
    """Convert URLs by number for a Store: None for a removed shard, which is not connected to."""
    return [url or None for url in urls]


def plain(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs without passwords; "" stays."""
    return tuple(parse_url(url, {}).plain if url else "" for url in urls)


def noted(manifest: Manifest, placement: Placement) -> tuple[str, ...]:
    """Return the URLs of a run's shards by number, from its manifest.

    The manifest may be one change ahead of the placement, or behind it.
    """
    urls = manifest.store_urls[: placement.shard_count]
    return tuple("" if shard in placement.removed else url for shard, url in enumerate(urls))


def left_over(manifest: Manifest, placement: Placement) -> dict[int, str]:
    """Return the URLs of removed shards whose servers may still have data of the run."""
    urls = enumerate(manifest.store_urls[: placement.shard_count])
    return {shard: url for shard, url in urls if url and shard in placement.removed}


def servers_of(run: Run, given: str | None) -> tuple[str, ...]:
    """Return the URLs of a run's shards by number.

    For local stores, these are the URLs of the running servers.

    Args:
        given: the URLs on the command line, with passwords, in the order of the shards' numbers. If
            None, the manifest's URLs are used, and passwords that an engine has set.

    Raises:
        RunError: `given` has the wrong number of URLs.
    """
    manifest, placement = run.manifest, run.placement
    if manifest.local_stores is not None:
        local = LocalStores.find(run.path / STORES)
        return () if local is None else local.urls[: placement.shard_count]
    if given is None:
        return with_passwords(run.path, noted(manifest, placement))
    urls, there = given.split(","), len(placement.live)
    if len(urls) != there:
        raise RunError(
            f"--store: must name the {there} store shards that the run has, in the order of their numbers; got {len(urls)}"
        )
    return by_number(urls, placement.shard_count, placement.removed)


def store_setting(manifest: Manifest, placement: Placement) -> str:
    """Return the value of --store for a run in its present state."""
    if manifest.local_stores is not None:
        return f"local:{len(placement.live)}"
    return ",".join(url for url in noted(manifest, placement) if url)


def own_servers(manifest: Manifest, placement: Placement, given: str) -> str:
    """Return the --store of a run that the same command started, and now resumes.

    The run may use other servers by now. If it ever used any of the given ones, the result has its
    present servers, with the given URL, and so the password, of each server that `given` names.
    Otherwise the result is `given`: the rows are to live on these servers from now on.

    Args:
        given: the --store of the command.
    """
    if manifest.local_stores is not None:
        return store_setting(manifest, placement) if given.startswith("local") else given
    if given.startswith("engine"):
        return store_setting(manifest, placement)
    urls = dict(zip(plain(given.split(",")), given.split(","), strict=True))
    if not urls.keys() & {*manifest.store_urls, *manifest.former_urls}:
        return given
    return ",".join(urls.get(url, url) for url in noted(manifest, placement) if url)


def with_servers(manifest: Manifest, placement: Placement, urls: Sequence[str], emptied: Collection[str] = ()) -> Manifest:
    """Return the manifest of a run whose shards are on these servers.

    Args:
        urls: the URLs by number, without passwords; ignored for local stores.
        emptied: servers that the run no longer uses and that hold none of its data.
    """
    local = None if manifest.local_stores is None else placement.shard_count
    before = dict.fromkeys((*manifest.former_urls, *manifest.store_urls))
    former = () if local else tuple(url for url in before if url and url not in urls and url not in emptied)
    changed = replace(manifest, store_urls=() if local else tuple(urls), local_stores=local, former_urls=former)
    # The default parity depends on the number of shards, so it is stated explicitly from now on.
    parity = str(Parity(placement.k, placement.r))
    return replace(changed, job=manifest.job | {"store": store_setting(changed, placement), "parity": parity})


def with_named(manifest: Manifest, placement: Placement, given: str) -> Manifest:
    """Return the manifest of a run that is resumed with the servers of --store.

    Servers that the run has yet to leave stay in the manifest.

    Args:
        given: the URLs in the order of the shards' numbers.
    """
    urls = by_number(plain(given.split(",")), placement.shard_count, placement.removed)
    left = left_over(manifest, placement)
    return with_servers(manifest, placement, [url or left.get(shard, "") for shard, url in enumerate(urls)])


def servers_had(run: Run, given: str | None) -> tuple[list[StoreUrl], list[StoreUrl]]:
    """Return the servers that the run uses, and those it used before.

    Both may have rows of the run.

    This is for runs without local stores. The event log names servers that runs of earlier versions
    used.

    Args:
        given: as in `servers_of`.

    Raises:
        RunError: as in `servers_of`.
    """
    manifest = run.manifest
    used = {url.place: url for url in map(parse_url, filter(None, servers_of(run, given)))}
    replaced = [event["url"] for event in read_events(run.path) if event.get("kind") == ShardReplaced.kind and event.get("url")]
    record = EngineRecord.read(run.path)
    ended = () if record is None else record.ended
    others = [url for url in (*filter(None, manifest.store_urls), *manifest.former_urls, *replaced) if url not in ended]
    urls = map(parse_url, with_passwords(run.path, others))
    # The servers in `given` may have other addresses than the same servers in the manifest.
    own = noted(manifest, run.placement) if given is not None else ()
    former = {url.place: url for url in urls if url.place not in used and url.plain not in own}
    return [*used.values()], [*former.values()]


def open_stores(run: Run, status: Status) -> LocalStores | None:
    """Return the local stores of a stopped run, ready to be started.

    Servers that still run, because they could not save or the process that started them was killed,
    are used as they are.

    Returns:
        The stores, or None if the run has none.

    Raises:
        CacheError: rows of `status` are neither saved nor in a running server.
    """
    if run.manifest.local_stores is None:
        return None
    run.go_back()
    placement = run.placement
    stores = LocalStores(placement.shard_count, run.path / STORES, adopt=True, removed=placement.removed)
    # A shard that is being added may have no rows yet. If it should have some, the rows of the
    # other shards show that.
    missing = [shard for shard in stores.without_rows() if shard not in placement.joining]
    # A shard without rows starts empty, which is noticed, and its rows are decoded from parity. If
    # nothing was ever written, all shards start empty.
    if len(missing) > placement.r and any(status.batches.values()):
        raise CacheError(
            f"run {run.path}: the rows of local store shard {', '.join(map(str, missing))} {after_step(status.step)} exist nowhere: neither saved in "
            f"{stores.directory} nor in a running server; put the files back, or delete the run with --overwrite and train it anew"
        )
    return stores
