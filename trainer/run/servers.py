"""The servers of a run: the URL of each store shard by its number, and how that is stored while shards are added, removed or moved.

A shard keeps its number, and that of one that was removed is not used again: its URL is "" then. `--store` lists those that there are, in the order
of their numbers.
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
from foreload.trainer.run.event_log import ShardReplaced, read_events
from foreload.trainer.run.manifest import Manifest, Status


def by_number(urls: Iterable[str], count: int, removed: Collection[int]) -> tuple[str, ...]:
    """The URL of each of `count` shards, "" for those removed. urls: of the others, in order; exactly as many as there are."""
    given = iter(urls)
    numbered = tuple("" if shard in removed else next(given) for shard in range(count))
    assert next(given, None) is None
    return numbered


def numbered(urls: Sequence[str], placement: Placement) -> tuple[str, ...]:
    """A trainer's URLs by the numbers of the shards, whether they are given so or are those that there are, in order. Raises SettingError."""
    if len(urls) == placement.shard_count:
        return tuple(urls)
    if len(urls) == len(placement.live):
        return by_number(urls, placement.shard_count, placement.removed)
    raise SettingError(
        f"--store: must name the {len(placement.live)} store shards of the run, in the order of their numbers; got {len(urls)}"
    )


def asked(urls: Sequence[str]) -> list[str | None]:
    """The same for a Store, which asks the servers that are there."""
    return [url or None for url in urls]


def plain(urls: Sequence[str]) -> tuple[str, ...]:
    """The same without passwords."""
    return tuple(parse_url(url, {}).plain if url else "" for url in urls)


def noted(manifest: Manifest, placement: Placement) -> tuple[str, ...]:
    """The URLs of a run's shards by number, as its manifest has them, which may be a step ahead of the placement, or behind it."""
    urls = manifest.store_urls[: placement.shard_count]
    return tuple("" if shard in placement.removed else url for shard, url in enumerate(urls))


def left_over(manifest: Manifest, placement: Placement) -> dict[int, str]:
    """The URLs of shards that were removed, but whose servers may still have something of the run."""
    urls = enumerate(manifest.store_urls[: placement.shard_count])
    return {shard: url for shard, url in urls if url and shard in placement.removed}


def servers_of(run: Run, given: str | None) -> tuple[str, ...]:
    """The URLs of a run's shards by number; of one whose stores are local, of its servers that run. given: those of the command line, with passwords,
    in the order of their numbers. Raises RunError.
    """
    manifest, placement = run.manifest, run.placement
    if manifest.local_stores is not None:
        local = LocalStores.find(run.path / STORES)
        return () if local is None else local.urls[: placement.shard_count]
    if given is None:
        return noted(manifest, placement)
    urls, there = given.split(","), len(placement.live)
    if len(urls) != there:
        raise RunError(
            f"--store: must name the {there} store shards that the run has, in the order of their numbers; got {len(urls)}"
        )
    return by_number(urls, placement.shard_count, placement.removed)


def store_setting(manifest: Manifest, placement: Placement) -> str:
    """What --store is for a run as it is now."""
    if manifest.local_stores is not None:
        return f"local:{len(placement.live)}"
    return ",".join(url for url in noted(manifest, placement) if url)


def own_servers(manifest: Manifest, placement: Placement, given: str) -> str:
    """--store of a run that goes on as the same command started it, when it may have had other servers: those that it has now, by the URLs with which
    they are given, if they are. Where it never had any of the given ones, these are to have its rows from now on.
    """
    if manifest.local_stores is not None:
        return store_setting(manifest, placement) if given.startswith("local") else given
    urls = dict(zip(plain(given.split(",")), given.split(","), strict=True))
    if not urls.keys() & {*manifest.store_urls, *manifest.former_urls}:
        return given
    return ",".join(urls.get(url, url) for url in noted(manifest, placement) if url)


def with_servers(manifest: Manifest, placement: Placement, urls: Sequence[str], emptied: Collection[str] = ()) -> Manifest:
    """The manifest of a run whose shards are these. urls: by number, without passwords; not looked at where they are local.

    emptied: servers that the run no longer uses, and that have nothing of it any more.
    """
    local = None if manifest.local_stores is None else placement.shard_count
    before = dict.fromkeys((*manifest.former_urls, *manifest.store_urls))
    former = () if local else tuple(url for url in before if url and url not in urls and url not in emptied)
    changed = replace(manifest, store_urls=() if local else tuple(urls), local_stores=local, former_urls=former)
    # What was right by default for another number of shards is stated from now on.
    parity = str(Parity(placement.k, placement.r))
    return replace(changed, job=manifest.job | {"store": store_setting(changed, placement), "parity": parity})


def with_named(manifest: Manifest, placement: Placement, given: str) -> Manifest:
    """The manifest of a run that goes on with the servers of --store, in the order of their numbers. Those that it is yet to leave stay in it."""
    urls = by_number(plain(given.split(",")), placement.shard_count, placement.removed)
    left = left_over(manifest, placement)
    return with_servers(manifest, placement, [url or left.get(shard, "") for shard, url in enumerate(urls)])


def servers_had(run: Run, given: str | None) -> tuple[list[StoreUrl], list[StoreUrl]]:
    """Every server that may have rows of a run whose servers are not its own: those that it uses, and those that it used before.

    given: as in `servers_of`. The event log has servers that runs of earlier versions used. Raises RunError.
    """
    manifest = run.manifest
    used = {url.place: url for url in map(parse_url, filter(None, servers_of(run, given)))}
    replaced = [event["url"] for event in read_events(run.path) if event.get("kind") == ShardReplaced.kind and event.get("url")]
    urls = map(parse_url, (*filter(None, manifest.store_urls), *manifest.former_urls, *replaced))
    # A run that goes by `given` may reach its servers at other addresses than its manifest has.
    own = noted(manifest, run.placement) if given is not None else ()
    former = {url.place: url for url in urls if url.place not in used and url.plain not in own}
    return [*used.values()], [*former.values()]


def open_stores(run: Run, status: Status) -> LocalStores | None:
    """The local stores of a run that does not train, to be started; None if it has none. Raises CacheError where rows of `status` are missing.

    Servers that still run, since they could not save or whoever started them was killed, are used as they are.
    """
    if run.manifest.local_stores is None:
        return None
    run.go_back()
    placement = run.placement
    stores = LocalStores(placement.shard_count, run.path / STORES, adopt=True, removed=placement.removed)
    # One that is being added may have nothing yet; whether it should have, is found out by what the others have.
    missing = [shard for shard in stores.without_rows() if shard not in placement.joining]
    # A shard of which parity has the rows begins empty, and is noticed by that; so do all where none was ever written.
    if len(missing) > placement.r and any(status.batches.values()):
        raise CacheError(
            f"run {run.path}: the rows of local store shard {', '.join(map(str, missing))} {after_step(status.step)} are nowhere: neither saved in "
            f"{stores.directory} nor in a server that runs; put the files back, or delete the run with --overwrite and train it anew"
        )
    return stores
