"""A Ray cluster as an engine: `foreload train --engine ray`.

The process of `foreload train` is the driver, on a node of the cluster. Trainers and store servers
are actors (`ray_actors`). A trainer or server whose node is lost is started on another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from foreload.base.errors import SettingError
from foreload.base.job_token import new_token, write_token
from foreload.cache.client.url import parse_url
from foreload.cache.errors import StoreError
from foreload.trainer.adjusting.shares import Bid, Choice, Needs, Resources, Share
from foreload.trainer.adjusting.size import Size
from foreload.trainer.cluster.engines.engine import Draining, Engine
from foreload.trainer.cluster.engines.ray_actors import (
    KEEPER,
    SERVER,
    SERVERS_PLACE,
    TRAINER,
    TRAINERS_PLACE,
    Keeper,
    ServerActor,
    TrainerActor,
    end_actors,
    end_servers,
    free_place,
)
from foreload.trainer.cluster.engines.ray_places import (
    CONCURRENT_METHODS,
    PLACE_INTERVAL,
    POLL_INTERVAL,
    WAIT_REPORT_INTERVAL,
    PlacedActor,
    Places,
    RayServer,
    RayTrainer,
    bundle,
    check_fits,
    wanted,
)
from foreload.trainer.cluster.engines.ray_pool import NAMESPACE, PoolClient, PoolMember
from foreload.trainer.cluster.processes.joining_host import report
from foreload.trainer.cluster.processes.rendezvous_host import RendezvousHost
from foreload.trainer.cluster.processes.starting import TrainerStart
from foreload.trainer.compute import numerics
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import TOKEN, Run
from foreload.trainer.run.engine_record import EngineRecord, keep_password, new_password, with_passwords
from foreload.trainer.run.shard_change import ENGINE
from foreload.trainer.saved.migration import OwnServers

_CONNECT = timedelta(seconds=10)  # for reaching the cluster's head
_ADD_PATIENCE = timedelta(seconds=45)  # how long a further server may take to be there
_SERVER_BYTES = 100 << 20  # of a server's actor and process, without rows


def _taken(options: Mapping[str, Any]) -> Resources:
    """Return what an actor takes."""
    return Resources(options["num_cpus"], options.get("memory", 0))


def _not_reached(address: str, why: str) -> SettingError:
    return SettingError(
        f"--ray-address: no Ray cluster is reached at {address} ({why}); start one here with `ray start --head`, or give the address of its "
        "head, HOST:PORT"
    )


def _check_reached(address: str) -> None:
    """Raise SettingError if nothing listens at HOST:PORT. Ray itself would try it for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT.total_seconds()).close()
        except OSError as error:
            raise _not_reached(address, str(error)) from error


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster while entered.

    Args:
        address: Of the cluster. If None, that in RAY_ADDRESS, or the cluster of this machine.

    Raises:
        SettingError: There is no cluster.
    """
    _check_reached(address or os.environ.get("RAY_ADDRESS", ""))
    # Ray puts a handler of its own in place of that of `Interrupts`.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # A placement group is found by its name in the same namespace alone.
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise _not_reached(address or "auto", f"{why}; if the cluster wants a token, set RAY_AUTH_MODE=token") from error
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def ended(run: Path, record: EngineRecord) -> Iterator[None]:
    """See `opened.ended`."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(connected(record.address))
        except SettingError:
            report(
                f"warning: the Ray cluster at {record.address} is not reached; if it still runs, actors of the run may be left there, in "
                f"namespace {record.namespace}"
            )
            yield
            return
        keeper: Any = None
        with contextlib.suppress(ValueError):
            keeper = ray.get_actor(KEEPER, namespace=record.namespace)
            call, here = secrets.token_hex(8), ray.get_runtime_context().get_node_id()
            if ray.get(keeper.take.remote(call, here, os.getpid(), None)) not in ("taken", "elsewhere"):
                raise RunError(f"run {run}: is being trained, or its trainers are still stopping; stop it with Ctrl-C first")
            stack.callback(lambda: keeper.release.remote(call))
        yield
        _end_all(record, keeper)


def _end_all(record: EngineRecord, keeper: Any) -> None:
    """End all actors of a run that does not train.

    Args:
        keeper: The run's keeper. None if it has none.
    """
    end_servers(record)
    if keeper is not None:
        ray.kill(keeper)


class _KeptRendezvous(RendezvousHost):
    """The rendezvous host that a run's keeper holds."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper
        self.address = ray.get(keeper.open_rendezvous.remote())

    def await_ready(self) -> None:
        """See RendezvousHost. The keeper has waited."""

    def close(self) -> None:
        """See RendezvousHost."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._keeper.close_rendezvous.remote())


class RayEngine(Engine):
    """A Ray cluster, which is connected, as the engine of one call.

    Attributes:
        machines: As in Engine: the nodes' ids.
        word: As in OwnServers.
    """

    word = ENGINE

    def __init__(self, job: TrainJob) -> None:
        self._job, self._run = job, Path(job.run).absolute()
        self.machines: dict[int, str] = {}
        self._record: EngineRecord | None = None
        self._keeper: Any = None
        self._call = secrets.token_hex(8)
        self._here = ray.get_runtime_context().get_node_id()
        self._trainer_options: dict[str, Any] = {"num_cpus": job.threads}
        self._server_options: dict[str, Any] = {"num_cpus": 1}
        self._trainer_places, self._server_places = Places(None, 0, tuple), Places(None, 0, tuple)
        self._servers: dict[str, RayServer] = {}  # by URL without password
        self._coming: dict[int, RayServer] = {}  # by the shard whose server they replace
        self._spares: list[RayServer] = []
        self._changing = threading.Lock()  # held while servers change during training
        self._drained: frozenset[str] = frozenset()  # nodes
        self._trainers: list[RayTrainer] = []
        self._pool: PoolClient | None = None  # once the job takes part
        self._looked_at = 0.0

    # What the launcher asks, before training begins.

    def take(self) -> None:
        """See Engine. Also takes the run's lease, if the run has processes on the cluster."""
        self._record = EngineRecord.read(self._run)
        if self._record is not None:
            self._take_lease(self._record.namespace)

    def _take_lease(self, namespace: str) -> None:
        options = {"name": KEEPER, "namespace": namespace, "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
        place = NodeAffinitySchedulingStrategy(self._here, soft=False)
        kind: Any = ray.remote(Keeper)
        abandon, said = self._job.abandon_after, False
        while True:
            keeper = kind.options(max_concurrency=CONCURRENT_METHODS, scheduling_strategy=place, **options).remote(
                str(self._run), namespace
            )
            try:
                taken = ray.get(
                    keeper.take.remote(self._call, self._here, os.getpid(), None if abandon is None else abandon.seconds)
                )
            except ray.exceptions.RayActorError:
                taken = "gone"
            if taken == "taken":
                self._keeper = keeper
                return
            if taken == "used":
                raise RunError(f"run {self._run}: is being trained by another driver of the cluster; stop that with Ctrl-C first")
            if taken == "elsewhere":
                ray.kill(keeper)
            elif taken == "stopping" and not said:
                said = True
                report(f"run {self._run}: the driver that trained it has died; waiting until its trainers have stopped")
            time.sleep(PLACE_INTERVAL.total_seconds())

    def check_room(self, server_bytes: int, trainer_bytes: int) -> None:
        """See Engine."""
        self._server_options["memory"], self._trainer_options["memory"] = _SERVER_BYTES + server_bytes, trainer_bytes
        if self._job.store.engine:
            check_fits("--store", self._server_options)
        else:
            self._given_password()
        check_fits("--trainers", self._trainer_options)

    def _given_password(self) -> str | None:
        """Return the password of servers that --store names, None if they want none.

        Raises:
            SettingError: They have several.
        """
        passwords = {parse_url(url).password for url in self._job.store.urls}
        if len(passwords) > 1:
            raise SettingError(
                "--store: all servers must want the same password, with --engine ray; give it in FORELOAD_STORE_PASSWORD, or use --store engine:N"
            )
        return passwords.pop()

    def start_servers(self, count: int) -> tuple[str, ...]:
        """See Engine. Waits until the cluster has room for them, apart from each other."""
        if self._record is not None:
            # Of a run that was overwritten just now, or that never began to train.
            _end_all(self._record, self._keeper)
        keep_password(self._run, new_password())
        self._begin_record()
        self._await_share(Size(self._job.trainers, count))
        self._server_places = self._reserved(SERVERS_PLACE, self._server_options, count + self._job.spare_servers, "--store")
        started = [self._new_server(shard) for shard in range(count)]
        self._await_up(started)
        self._servers = {str(server.url): server for server in started}
        if len({server.node for server in started}) < count:
            report("warning: some store shards share a node; the loss of that node may lose more shards than parity covers")
        self._start_spares()
        self._write()
        return with_passwords(self._run, list(self._servers))

    def find_servers(self, urls: Sequence[str], server_bytes: int) -> tuple[tuple[str, ...], int]:
        """See Engine."""
        self._server_options["memory"] = _SERVER_BYTES + server_bytes
        if self._record is None:
            return tuple(urls), 0
        # Of a call that died while shards came or went.
        stray = {url: name for url, name in self._record.servers.items() if url not in urls}
        end_actors(self._record.namespace, [*stray.values()])
        ended: dict[int, RayServer] = {}
        for shard, url in enumerate(urls):
            name = self._record.servers.get(url)
            if name is None and url not in self._record.ended:
                continue
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                handle: Any = None if name is None else ray.get_actor(name, namespace=self._record.namespace)
                if handle is not None and ray.get(handle.pid.remote()) is not None:
                    self._servers[url] = RayServer(None, str(name), url, handle, ray.get(handle.place.remote()).node)
                    continue
            if name is not None:
                # Its actor may outlive the server.
                end_actors(self._record.namespace, [name])
            ended[shard] = self._new_server(shard)
        self._await_up(list(ended.values()))
        for shard, server in ended.items():
            report(f"store shard {shard}: its server has ended; {server.url} takes its place")
            self._servers[str(server.url)] = server
        if self._servers:
            self._start_spares()
        self._write(*stray, *(urls[shard] for shard in ended))
        found = [str(ended[shard].url) if shard in ended else url for shard, url in enumerate(urls)]
        return with_passwords(self._run, found), len(ended)

    def reserve_trainers(self, trainer_bytes: int) -> None:
        """See Engine."""
        # Trainers on other nodes read the password of servers that somebody else runs.
        if not self._servers and (password := self._given_password()) is not None:
            keep_password(self._run, password)
        if self._record is None:
            self._begin_record()
        assert self._record is not None
        write_token(self._run / TOKEN, new_token())
        self._trainer_options["memory"] = trainer_bytes
        self._await_share(Size(self._job.trainers, len(self._servers)))
        free_place(self._record, TRAINERS_PLACE)
        self._trainer_places = self._reserved(TRAINERS_PLACE, self._trainer_options, self._job.trainers, "--trainers")
        nodes = placement_group_table(self._trainer_places.group)["bundles_to_node_id"]
        self.machines.clear()
        self.machines.update({trainer: nodes[trainer] for trainer in range(self._job.trainers)})

    def _begin_record(self) -> None:
        namespace = f"foreload-{self._run.name}-{self._call}"
        self._record = EngineRecord("ray", ray.get_runtime_context().gcs_address, namespace)
        self._record.write(self._run)
        self._take_lease(namespace)

    def close(self) -> None:
        """Give the lease back. The servers stay, unless the run has never trained."""
        for server in self._coming.values():
            server.end()
        keeper = self._keeper
        self._release()
        if self._record is None:
            return
        free_place(self._record, TRAINERS_PLACE)
        if Run(self._run).status is None:
            _end_all(self._record, keeper)

    def _release(self) -> None:
        if self._keeper is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._keeper.release.remote(self._call))
            self._keeper = None

    # What the coordinator asks.

    @property
    def own_servers(self) -> OwnServers | None:
        """See Engine."""
        return self if self._servers else None

    @property
    def needs(self) -> Needs | None:
        """See Engine. Of the servers, only those count that the engine has started."""
        if self._job.auto is not True:
            return None
        has_servers = bool(self._servers or self._job.store.engine)
        server = _taken(self._server_options) if has_servers else Resources()
        return Needs(_taken(self._trainer_options), server, server.times(self._job.spare_servers))

    def ask_share(self, least: Size, choices: Sequence[Choice]) -> Share | None:
        """See Engine."""
        return None if self._pool is None else self._pool.ask(self._bid(least, choices))

    def _bid(self, least: Size, choices: Sequence[Choice]) -> Bid:
        assert self.needs is not None
        self._trainers = [trainer for trainer in self._trainers if not trainer.is_over]
        reserved = 0 if self._trainer_places.group is None else self._job.trainers
        count = len(self._servers) + len(self._coming)
        if self._server_places.group is not None:
            # So many were reserved, at the start of the run.
            count = max(count, least.shards)
        uses = Size(max(len(self._trainers), reserved), count)
        weight = 1.0 if self._job.pool is None or self._job.pool.weight is None else self._job.pool.weight
        takes = self.needs.of(uses) if uses.trainers or uses.shards else Resources()
        return Bid(weight, self.needs.of(least), takes, tuple(choices))

    def _await_share(self, least: Size) -> None:
        """Take part in the pool, unless that was done. Waits until the job may begin."""
        if self.needs is not None and self._pool is None:
            assert self._record is not None
            self._pool = PoolClient(PoolMember(str(self._run), self._record.namespace, self._call))
            self._pool.await_share(self._bid(least, ()))

    def draining(self) -> Draining:
        """See Engine. Ray has been asked to drain these nodes, as before a spot machine is taken away."""
        if not (nodes := self._drained_nodes()):
            return Draining()
        with self._changing:
            servers = frozenset(url for url, server in self._servers.items() if server.node in nodes)
        return Draining(frozenset(trainer for trainer, node in self.machines.items() if node in nodes), servers)

    def _drained_nodes(self) -> frozenset[str]:
        if time.monotonic() - self._looked_at >= PLACE_INTERVAL.total_seconds():
            self._looked_at = time.monotonic()
            # Ray's own libraries ask for them in this way; there is no public one.
            self._drained = frozenset(ray._private.state.state.get_draining_nodes())
        return self._drained

    def add(self, shard: int) -> str:
        """See OwnServers. Uses a spare server if there is one."""
        with self._changing:
            server = self._spares.pop(0) if self._spares else self._new_server(shard)
        self._await_up([server], _ADD_PATIENCE)
        with self._changing:
            self._servers[str(server.url)] = server
            self._write()
        return with_passwords(self._run, [str(server.url)])[0]

    def take_back(self, shard: int, url: str) -> None:
        """See OwnServers."""
        self.remove(shard, url)

    def remove(self, shard: int, url: str) -> None:
        """See OwnServers."""
        before = parse_url(url, {}).plain
        with self._changing:
            if (server := self._servers.pop(before, None)) is not None:
                server.end()
                self._write(before)

    def rendezvous_host(self, address: str) -> RendezvousHost:
        """See Engine. The keeper holds it, on the node of the driver."""
        return _KeptRendezvous(self._keeper)

    def start_trainer(self, start: TrainerStart, held: Sequence[int]) -> RayTrainer:
        """See Engine."""
        variables = numerics.environment(self._job.cpu_capability, self._job.threads)

        def begin(actor: PlacedActor) -> Any:
            assert actor.placed is not None
            self.machines[start.trainer] = actor.placed.node
            return actor.handle.run.remote(
                str(Path.cwd()), str(self._run), start.trainer, start.rendezvous, start.plan, variables
            )

        what, name = f"trainer {start.trainer}", f"{TRAINER}-{start.trainer}"
        actor = self._actor(what, name, TrainerActor, self._trainer_options, self._trainer_places)
        self._trainers.append(RayTrainer(actor, begin))
        return self._trainers[-1]

    def new_server(self, shard: int, url: str, may_start: Callable[[int], bool]) -> str | None:
        """See Engine. It is a spare, or one that is started on another node."""
        with self._changing:
            return self._new_one(shard, url, may_start)

    def _new_one(self, shard: int, url: str, may_start: Callable[[int], bool]) -> str | None:
        server, coming = self._servers.get(parse_url(url, {}).plain), self._coming.get(shard)
        if coming is None:
            if server is None or not may_start(shard) or (how := server.ended()) is None:
                return None
            report(f"store shard {shard}: its server is gone: {how}; another one is started")
            self._coming[shard] = self._spares.pop(0) if self._spares else self._new_server(shard)
            server.end()
            return None
        if coming.failed is not None:
            report(f"store shard {shard}: no other server for it yet: {coming.failed}")
            coming.end()
            self._coming[shard] = self._new_server(shard)
            return None
        if not coming.is_up(self._run):
            return None
        del self._coming[shard]
        self._servers[str(coming.url)] = coming
        before = parse_url(url, {}).plain
        self._servers.pop(before, None)
        self._write(before)
        return with_passwords(self._run, [str(coming.url)])[0]

    # The rest is its own.

    def _actor(self, what: str, name: str, kind: type, options: Mapping[str, Any], places: Places) -> PlacedActor:
        assert self._record is not None
        return PlacedActor(what, kind, options, places, self._record.namespace, f"{name}-{secrets.token_hex(4)}")

    def _new_server(self, shard: int | None) -> RayServer:
        """Start a server for a shard, or a spare one."""
        what, name = ("spare server", f"{SERVER}-spare") if shard is None else (f"store shard {shard}", f"{SERVER}-{shard}")
        return RayServer(self._actor(what, name, ServerActor, self._server_options, self._server_places))

    def _start_spares(self) -> None:
        assert self._record is not None
        # Those of an earlier call may be on nodes that are gone, or be more than are wanted now.
        end_actors(self._record.namespace, self._record.spares)
        self._spares = [self._new_server(None) for _ in range(self._job.spare_servers)]
        self._await_up(self._spares)

    def _await_up(self, servers: Sequence[RayServer], patience: timedelta | None = None) -> None:
        """Wait until servers run.

        Raises:
            StoreError: One cannot be started, or not in this time. All of them are ended.
        """
        until = None if patience is None else time.monotonic() + patience.total_seconds()
        while coming := [server for server in servers if not server.is_up(self._run)]:
            late = until is not None and time.monotonic() > until
            if failed := [server for server in coming if late or server.failed is not None]:
                for server in servers:
                    server.end()
                raise StoreError(f"{failed[0].what}: no server: {failed[0].failed or 'the cluster has no room for one'}")
            time.sleep(POLL_INTERVAL.total_seconds())

    def _write(self, *ended: str) -> None:
        """Note the servers in the run's folder.

        Args:
            ended: URLs of servers that others have replaced.
        """
        assert self._record is not None
        servers = {url: server.name for url, server in self._servers.items()}
        spares = tuple(spare.name for spare in self._spares)
        self._record = replace(self._record, servers=servers, spares=spares, ended=(*self._record.ended, *ended))
        self._record.write(self._run)

    def _reserved(self, name: str, options: Mapping[str, Any], count: int, flag: str) -> Places:
        """Reserve places for actors, on as many nodes as there are.

        Raises:
            SettingError: No node of the cluster is large enough for one.
        """
        assert self._record is not None
        check_fits(flag, options)
        group = placement_group(
            [bundle(options)] * count, strategy="SPREAD", name=f"{self._record.namespace}-{name}", lifetime="detached"
        )
        while not group.wait(WAIT_REPORT_INTERVAL.total_seconds()):
            free = ray.available_resources()
            report(
                f"{flag}: waiting until the cluster has room for {count} of {wanted(options)} each; "
                f"{free.get('CPU', 0):g} cores are free; Ctrl-C ends the wait"
            )
        return Places(group, count, self._drained_nodes)
