"""The servers of --spare, which take the place of a lost store shard's: whether they can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from foreload.base.errors import SettingError
from foreload.cache.client.url import StoreUrl, parse_url, parse_urls
from foreload.cache.errors import StoreError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.shards.spare import check_spare
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.manifest import Manifest


def check_spares(job: TrainJob, manifest: Manifest, urls: Sequence[StoreUrl | str], placement: Placement) -> None:
    """Raise SettingError for what is wrong with them before anything is started or deleted. urls: of the run's shards, by number."""
    if job.spare is None:
        return
    if not placement.r:
        raise SettingError("--spare: needs parity, for a shard's rows are nowhere else without; give --parity, or leave it out")
    in_use = [(shard, parse_url(url) if isinstance(url, str) else url) for shard, url in enumerate(urls) if url]
    for url in parse_urls(job.spare):
        try:
            # One that had a shard before may have it again.
            spare_check(job, manifest)(url, in_use, identity=manifest.identity)
        except StoreError as error:
            raise SettingError(f"--spare: {error}") from error


def spare_check(job: TrainJob, manifest: Manifest) -> Callable[..., None]:
    """`check_spare` for a run: called with a server and those in use, it raises StoreError where the server cannot take a shard."""
    return partial(check_spare, namespace=manifest.namespace, lanes=manifest.lanes, timeout=job.store_silence)
