"""Serve a training run's figures to Prometheus, while it trains.

The coordinator publishes its figures about once a second. A thread answers each request with what
was published last, so requests never reach the coordinator's own objects.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from foreload.base.errors import SettingError
from foreload.trainer.compute.reports import SUMMED, Totals
from foreload.trainer.run.report import LastCheckpoint

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from prometheus_client.core import Metric

PUBLISH_SECONDS = 1.0
STALLED_SECONDS = 30.0  # without a turn of the coordinator's loop, after which it counts as stalled
_REQUEST_SECONDS = 10.0  # for a client to send its request


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """A store shard.

    Attributes:
        rebuilt: the share of its rows that is rebuilt, if its state is "rebuilding".
        used_bytes: the memory that its server uses. If None, it was not measured.
        limit_bytes: the server's memory limit, or None if it has none.
    """

    shard: int
    state: str
    rebuilt: float
    used_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run's figures at one moment.

    Attributes:
        step: the last step that all trainers have finished.
        end_step: the step after the schedule's last one, as far as it is known.
        lost: how many trainers this call has lost and survived.
        loss: the mean loss of that step's samples, or None if this call has finished none.
        evaluated: the step of the last evaluation, or None if this call has made none.
        metrics: (evaluation set, metric) -> value, of the last evaluation.
        exposed: how many lanes have no complete replica, or None if the run has no replicas.
        seeded: the share of the replicas' slots that is seeded, or None if it is not known.
        migrated: the share of rows that have moved; 1 if no migration is under way.
        checkpoint: None if this call has saved none.
        stop_by: the step by which training must stop, since store servers will be full, or None.
        adjusted: how many changes --auto has made in this call, and how many of them were found to
            pay ("paid") or not ("unpaid").
    """

    run: str
    namespace: str
    state: Literal["starting", "training", "ending"]
    step: int
    end_step: int
    term: int
    trainers: int
    lost: int
    totals: Totals
    loss: float | None
    evaluated: int | None = None
    metrics: Mapping[tuple[str, str], float] = field(default_factory=dict)
    shards: tuple[ShardFigures, ...] = ()
    exposed: int | None = None
    seeded: float | None = None
    migrated: float = 1.0
    checkpoints_saved: int = 0
    checkpoints_failed: int = 0
    checkpoint: LastCheckpoint | None = None
    stop_by: int | None = None
    adjusted: Mapping[str, int] = field(default_factory=dict)


# Label values, and the sample. A sample that is None is left out.
_Samples = Iterable[tuple[tuple[str, ...], float | None]]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, with a sample for each combination of its labels' values.

    Attributes:
        name: its name. Prometheus adds "_total" to that of a counter.
    """

    name: str
    help: str
    samples: Callable[[RunFigures], _Samples]
    labels: tuple[str, ...] = ()
    counter: bool = False


def _one(read: Callable[[RunFigures], float | None]) -> Callable[[RunFigures], _Samples]:
    return lambda figures: [((), read(figures))]


def _of_checkpoint(read: Callable[[LastCheckpoint], float]) -> Callable[[RunFigures], _Samples]:
    return _one(lambda figures: None if figures.checkpoint is None else read(figures.checkpoint))


def _summed(prefix: str) -> Callable[[RunFigures], _Samples]:
    """Return the sums of the figures whose names begin with `prefix`, labelled by the rest."""
    names = [figure.name for figure in SUMMED if figure.name.startswith(prefix)]
    kinds = [(name.removeprefix(prefix).lstrip("_") or "all", name) for name in names]
    return lambda figures: [((kind,), getattr(figures.totals, name)) for kind, name in kinds]


FAMILIES: tuple[Family, ...] = (
    Family("foreload_run_info", "The run.", lambda f: [((f.run, f.namespace, f.state), 1)], ("run", "namespace", "state")),
    Family("foreload_step", "The last step that all trainers have finished.", _one(lambda f: f.step)),
    Family(
        "foreload_end_step", "The step after the last one of the schedule, as far as it is known.", _one(lambda f: f.end_step)
    ),
    Family("foreload_steps", "Steps trained, over all calls of the run.", _one(lambda f: f.totals.steps), counter=True),
    Family("foreload_samples", "Samples trained.", _one(lambda f: f.totals.samples), counter=True),
    Family("foreload_loss", "The mean loss over the samples of the last step.", _one(lambda f: f.loss)),
    Family("foreload_step_seconds", "Time of the steps: all of it, and its parts.", _summed("seconds"), ("part",), counter=True),
    Family("foreload_rows", "Rows of the steps, by what happened to them.", _summed("rows"), ("kind",), counter=True),
    Family("foreload_sent_bytes", "Bytes between trainers.", _one(lambda f: f.totals.bytes_sent), counter=True),
    Family("foreload_evaluation_step", "The step of the last evaluation.", _one(lambda f: f.evaluated)),
    Family("foreload_evaluation", "Metrics of the last evaluation.", lambda f: list(f.metrics.items()), ("set", "metric")),
    Family("foreload_term", "The term; each change of the trainers begins one.", _one(lambda f: f.term)),
    Family("foreload_trainers", "Trainers of the term.", _one(lambda f: f.trainers)),
    Family("foreload_trainers_lost", "Trainers that this call has lost and survived.", _one(lambda f: f.lost), counter=True),
    Family("foreload_lanes_exposed", "Lanes without a complete replica on another trainer.", _one(lambda f: f.exposed)),
    Family("foreload_replicas_seeded_ratio", "Share of the replicas' slots that is seeded.", _one(lambda f: f.seeded)),
    Family(
        "foreload_shard_state",
        "State of each store shard.",
        lambda f: [((str(one.shard), one.state), 1) for one in f.shards],
        ("shard", "state"),
    ),
    Family(
        "foreload_shard_rebuilt_ratio",
        "Share of the rows that is rebuilt, of a shard that is being rebuilt.",
        lambda f: [((str(one.shard),), one.rebuilt) for one in f.shards if one.state == "rebuilding"],
        ("shard",),
    ),
    Family(
        "foreload_shard_memory_bytes",
        "Memory that a shard's server uses, if it has a limit.",
        lambda f: [((str(one.shard),), one.used_bytes) for one in f.shards],
        ("shard",),
    ),
    Family(
        "foreload_shard_memory_limit_bytes",
        "The limit of that memory.",
        lambda f: [((str(one.shard),), one.limit_bytes) for one in f.shards],
        ("shard",),
    ),
    Family(
        "foreload_store_full_step", "The step by which training must stop, since servers will be full.", _one(lambda f: f.stop_by)
    ),
    Family("foreload_migrated_ratio", "Share of the rows that have moved, of a migration.", _one(lambda f: f.migrated)),
    Family(
        "foreload_adjustments",
        "Changes by --auto in this call: all made, and those found to pay or not.",
        lambda f: [((result,), count) for result, count in f.adjusted.items()],
        ("result",),
        counter=True,
    ),
    Family("foreload_checkpoints_saved", "Checkpoints saved in this call.", _one(lambda f: f.checkpoints_saved), counter=True),
    Family(
        "foreload_checkpoints_failed",
        "Checkpoints that could not be saved in this call.",
        _one(lambda f: f.checkpoints_failed),
        counter=True,
    ),
    Family("foreload_checkpoint_step", "The step of the last checkpoint.", _of_checkpoint(lambda one: one.step)),
    Family("foreload_checkpoint_timestamp_seconds", "When it was saved.", _of_checkpoint(lambda one: one.at)),
    Family("foreload_checkpoint_bytes", "The size of its own files.", _of_checkpoint(lambda one: one.bytes)),
    Family(
        "foreload_checkpoint_stalled_seconds", "How long training stood still for it.", _of_checkpoint(lambda one: one.stalled)
    ),
)


class MetricsServer:
    """An HTTP server with /metrics for Prometheus and /healthz for a supervisor.

    Attributes:
        url: where Prometheus finds the metrics.
    """

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to listen.

        Args:
            port: if 0, a free port is used.

        Raises:
            SettingError: the address cannot be used, or prometheus-client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise SettingError("--metrics: needs prometheus-client; install it with pip install 'foreload[metrics]'") from error
        self._clock = clock
        self._figures: RunFigures | None = None
        self._due = 0.0
        # When the coordinator's loop was last seen. None while it need not run.
        self._seen: float | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = _http_server(self, registry, host, port)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise SettingError(f"--metrics: cannot listen on {host} port {port} ({why}); give another address") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="metrics", daemon=True
        )
        self._thread.start()

    def poll(self, figures: Callable[[], RunFigures]) -> None:
        """Note that the coordinator's loop runs, and publish its figures if they are due."""
        now = self._seen = self._clock()
        if now >= self._due:
            self._due = now + PUBLISH_SECONDS
            self._figures = figures()

    def rest(self) -> None:
        """Note that the coordinator's loop need not run until the next `poll`."""
        self._seen = None

    def conclude(self, figures: RunFigures) -> None:
        """Publish the last figures."""
        self._figures = figures

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return an HTTP status, 200 or 503, and what /healthz says."""
        figures, seen = self._figures, self._seen
        silent = 0.0 if seen is None else self._clock() - seen
        state = "starting" if figures is None else figures.state
        about = {"state": state, "step": None if figures is None else figures.step, "silent_seconds": round(silent, 3)}
        return (503 if silent > STALLED_SECONDS else 200), about

    def describe(self) -> list[Metric]:
        """Return nothing. Otherwise the registry would ask for samples to know the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its samples, for prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._figures
        if figures is None:
            return
        for family in FAMILIES:
            kind = CounterMetricFamily if family.counter else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.labels)
            for labels, value in family.samples(figures):
                if value is not None:
                    metric.add_metric(labels, value)
            yield metric


def _http_server(metrics: MetricsServer, registry: Any, host: str, port: int) -> ThreadingHTTPServer:
    # The modules that only this server needs are loaded here, since few runs have one.
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from socketserver import TCPServer

    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path == "/healthz":
                status, about = metrics.health()
                self._answer(status, "application/json", json.dumps(about).encode())
            else:
                self._answer(404, "text/plain", b"there are /metrics and /healthz\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            # A client that went away is none of the run's business.
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: stderr is the user's."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            """Bind the socket. HTTPServer would also look the host's name up, which may take long."""
            TCPServer.server_bind(self)
            self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing if a client broke the connection off."""
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)

    return Server((host, port), Handler)
