"""The rows that a run has on servers by URL: whether its folder owns them, and their deletion.

A run's folder can be copied, and then two folders have one run id. The folder that owns the rows
has the servers' term, and the run's key on the servers names it. The rules are part of the protocol
(docs/protocol.md, Whose rows they are). The rows of local stores are in the run's folder, which
owns them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from foreload.base.at_once import at_once
from foreload.cache.client.store import Store
from foreload.cache.client.url import StoreUrl
from foreload.cache.errors import CacheError, StoreError, StoreUnavailable
from foreload.cache.protocol.shards.namespace import (
    Claim,
    FolderId,
    Holding,
    claims,
    holding_of,
    is_run,
    name_folder,
    owner,
    remove,
)
from foreload.trainer.errors import RunError, RunRefused
from foreload.trainer.run.directory import LOCK, MANIFEST, Run
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.servers import servers_had

_SILENCE = timedelta(seconds=30)  # a server may have to go through many keys
_CONNECT = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Overrule:
    """What a user says about the run's folder.

    Attributes:
        folder_moved: The folder was moved to where it is now.
        force: Delete the rows even if another folder owns them.
    """

    folder_moved: bool
    force: bool = False


def own_rows(run: Run, store: Store, moved: bool = False) -> None:
    """Check that a run's folder owns the rows on its servers, and note the folder there.

    A command calls this before it changes anything on the servers.

    Args:
        store: Open on the run's servers.
        moved: The user says that the folder was moved.

    Raises:
        RunError: The folder does not own the rows.
        StoreError: A store shard fails.
    """
    manifest = run.manifest
    if manifest.local_stores is None:
        _check(run, _claims(manifest, store), Overrule(moved))
        name_folder(store, manifest.namespace, manifest.identity, FolderId.of(run.path))


def check_current(run: Run, store: Store) -> None:
    """Raise RunError if the rows on a run's servers are of a later term than the run's folder.

    Such a folder cannot read them. Raises StoreError.
    """
    if run.manifest.local_stores is None:
        _check(run, _claims(run.manifest, store), None)


def _claims(manifest: Manifest, store: Store) -> list[Claim]:
    return claims(store, manifest.namespace, manifest.identity, manifest.lanes)


def _check(run: Run, said: Sequence[Claim], overrule: Overrule | None) -> str | None:
    """Raise RunError unless a run's folder owns the rows that servers make these claims for.

    Args:
        said: The servers' claims.
        overrule: What the user says. None for a reader, which may be another folder of the same
            term.

    Returns:
        The objection that `force` overrules. None if there is none.
    """
    here, term = FolderId.of(run.path), run.term
    owners = {claim.folder: None for claim in said if claim.folder is not None and not claim.folder.is_same(here)}
    where = f" ({', '.join(map(str, owners))})" if owners else ""
    # Not even `force` deletes the rows of a run that is in use.
    for folder in owners if overrule is not None else ():
        if _is_used(folder, run.manifest.run_id):
            raise RunError(
                f"run {run.path}: is being trained or read in {folder}, and this folder is a copy of that; stop that first"
            )
    highest = max((claim.term for claim in said), default=0)
    # An owner's term is in its folder before it is on a server. A folder with a lower term is
    # therefore not the one in which the run went on.
    if term < highest:
        if overrule is not None and overrule.force:
            return f"the rows are of term {highest}, and this folder is of term {term}: they are those of another folder{where}"
        raise RunRefused(
            f"run {run.path}: is of term {term}, and the rows on its servers are of term {highest}: the run went on in another folder{where}, and "
            "this is a copy from before; go on with that one, and delete this copy by hand (rm -r); if that folder was lost, "
            "foreload delete --force deletes the rows, and train --from begins anew from a checkpoint"
        )
    if owners and overrule is not None and not overrule.folder_moved:
        if overrule.force:
            return f"the rows are those of another folder{where}"
        raise RunRefused(
            f"run {run.path}: the rows on its servers are those of another folder{where}; if that was moved to here, add --moved; if "
            "this is a copy of it, go on with that one, and delete this copy by hand (rm -r)"
        )
    return None


def _is_used(folder: FolderId, run_id: str) -> bool:
    """Return whether a run is being trained or read in a folder, if that is on this host."""
    path = Path(folder.path)
    with contextlib.suppress(OSError, RunError):
        return FolderId.of(path).is_same(folder) and Run(path).manifest.run_id == run_id and _is_locked(path)
    return False


def _is_locked(path: Path) -> bool:
    """Return whether a process of this host trains or reads the run in a folder right now."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def check_not_training(namespace: str, store: Store, own: FolderId | None = None) -> None:
    """Raise RunError if a namespace is of a run in use on this host: its rows must not be deleted.

    A run is in use while it is being trained or read.

    Args:
        namespace: The namespace.
        store: Open on the servers.
        own: The folder of the caller's own run, which does not count. None if there is no such run.
    """
    for shard in store.used:
        # A key that another program wrote belongs to no run.
        with contextlib.suppress(StoreError):
            note = owner(store, namespace, shard)
            folder = None if note is None else note.folder
            if own is not None and folder is not None and own.is_same(folder):
                continue
            if note is not None and folder is not None and _is_used(folder, str(note.identity.get("run"))):
                raise RunError(
                    f"store {store.urls[shard]}: namespace {namespace} is of the run in {folder}, which is being trained or read; stop that first"
                )


@dataclass(slots=True)
class Server:
    """A server that may have rows.

    Attributes:
        url: Its URL.
        store: Open on the server. None if it failed.
        why: The reason why it failed.
        held: What it had of a namespace, once that is deleted.
    """

    url: StoreUrl
    store: Store | None = None
    why: str | None = None
    held: Holding | None = None

    def ask(self, question: Callable[[Store], None]) -> None:
        """Ask the server something, unless it has failed; note it if it fails now."""
        if self.store is not None:
            try:
                question(self.store)
            except StoreUnavailable as error:
                self.store, self.why = None, str(error)


@contextlib.contextmanager
def reached(used: Sequence[StoreUrl], former: Sequence[StoreUrl] = ()) -> Iterator[list[Server]]:
    """Yield servers, with open stores, or with the reason why one cannot be reached.

    Args:
        used: The servers that are in use.
        former: Servers that may belong to another program by now, so that every StoreError of
            theirs is noted as such a reason.
    """
    servers = [Server(url) for url in (*used, *former)]
    opened = at_once({place: partial(Store, [server.url], _SILENCE, _CONNECT) for place, server in enumerate(servers)})
    with contextlib.ExitStack() as stack:
        for store in opened.values():
            if isinstance(store, Store):
                stack.enter_context(store)
        for place, server in enumerate(servers):
            store = opened[place]
            if isinstance(store, Store):
                server.store = store
            elif isinstance(store, StoreUnavailable if place < len(used) else StoreError):
                server.why = str(store)
            else:
                raise store
        yield servers


def delete_rows(
    run: Run, used: Sequence[StoreUrl], former: Sequence[StoreUrl], overrule: Overrule
) -> tuple[list[Server], str | None]:
    """Delete a run's rows on all servers that may have any.

    A namespace that another run has taken since is left alone: `held` stays None. Nothing is
    deleted before all servers have been asked.

    Args:
        used: The servers that the run uses, with passwords.
        former: Servers that it used before, with passwords. They may be down, or belong to another
            program by now.
        overrule: What the user says about the run's folder.

    Returns:
        The servers, with what each had or why it failed, and the objection that `force` overruled.
        That is None if there was none.

    Raises:
        RunError: The run's folder does not own the rows.
        StoreError: A server fails.
    """
    manifest = run.manifest
    said: list[Claim] = []
    with reached(used, former) as servers:
        for server in servers:
            server.ask(lambda store: said.extend(_claims(manifest, store)))
        forced = _check(run, said, overrule)
        for server in servers:
            server.ask(partial(_delete, server, manifest))
        return servers, forced


def _delete(server: Server, manifest: Manifest, store: Store) -> None:
    holding = holding_of(store, 0, manifest.namespace)
    if holding.note is None or is_run(holding.note, manifest.identity):
        remove(store, manifest.namespace)
        server.held = holding


def delete_replaced(run: Run, given: Sequence[StoreUrl], moved: bool) -> None:
    """Delete the rows of a run whose folder a new run is about to take, on all servers it had.

    Where rows may be left is reported on stderr.

    Args:
        given: Servers with passwords.
        moved: The user says that the folder was moved.

    Raises:
        RunError: The folder does not own the rows.
    """
    if not (run.path / MANIFEST).exists():
        return
    try:
        manifest, _ = run.manifest, run.term
        if manifest.local_stores is not None:
            return
        used, former = servers_had(run, None)
    except (RunError, CacheError) as error:
        sys.stderr.write(f"foreload: warning: the servers that have rows of the old run are not known ({error})\n")
        return
    with_passwords = {url.place: url for url in given}
    servers, _ = delete_rows(run, (), [with_passwords.get(url.place, url) for url in (*used, *former)], Overrule(moved))
    for server in servers:
        if server.why is not None:
            sys.stderr.write(
                f"foreload: warning: {server.why}; so rows of the old run may be left there; when it answers again: "
                f"foreload stores delete {server.url} {manifest.namespace}\n"
            )
