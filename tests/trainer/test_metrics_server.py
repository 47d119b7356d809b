"""What a training run serves to Prometheus: its own figures, published about once a second, and no more than that."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import refused
from docs_pages import ROOT, table_fields
from held import Hold
from prometheus_client.parser import text_string_to_metric_families
from small_job import arguments, summary, synthetic_schedule
from waiting import DEADLINE_SECONDS

from foreload.base.errors import SettingError
from foreload.trainer.compute.reports import Totals
from foreload.trainer.job.job_values import Place
from foreload.trainer.run.metrics_server import FAMILIES, STALLED_SECONDS, MetricsServer, RunFigures, ShardFigures

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
FIGURES = RunFigures("first", "first", "training", 7, 100, 1, 2, 0, Totals(steps=8, samples=1024), 0.5)
NAMES = {f"{family.name}_total" if family.counter else family.name for family in FAMILIES}


def read(url: str) -> tuple[int, str]:
    """The HTTP status of an answer, and its text."""
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scraped(url: str) -> Samples:
    """All samples, by name and labels."""
    status, text = read(url)
    assert status == 200, text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def now() -> list[float]:
    """The time of the server's clock."""
    return [100.0]


@pytest.fixture
def server(now: list[float]) -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1", 0, lambda: now[0])
    yield made
    made.close()


def test_figures_are_published_at_most_once_a_second(server: MetricsServer, now: list[float]) -> None:
    taken: list[int] = []

    def figures(step: int) -> Callable[[], RunFigures]:
        def take() -> RunFigures:
            taken.append(step)
            return replace(FIGURES, step=step)

        return take

    assert scraped(server.url) == {}  # nothing was published yet
    for step, moment in enumerate((100.0, 100.5, 100.9, 101.0, 103.0, 103.1)):
        now[0] = moment
        server.poll(figures(step))
    assert taken == [0, 3, 4]
    assert value(scraped(server.url), "foreload_step") == 4


def test_a_supervisor_learns_whether_the_coordinator_stalls(server: MetricsServer, now: list[float]) -> None:
    health = server.url.replace("/metrics", "/healthz")
    assert read(health) == (200, '{"state": "starting", "step": null, "silent_seconds": 0.0}')
    server.poll(lambda: FIGURES)
    now[0] += STALLED_SECONDS
    assert read(health) == (200, '{"state": "training", "step": 7, "silent_seconds": 30.0}')
    now[0] += 1
    assert read(health)[0] == 503
    server.rest()  # what follows may take long, and is no stall
    server.conclude(replace(FIGURES, state="ending"))
    assert read(health) == (200, '{"state": "ending", "step": 7, "silent_seconds": 0.0}')
    assert read(server.url.replace("metrics", "other"))[0] == 404


def test_a_sample_without_a_value_is_left_out(server: MetricsServer) -> None:
    server.conclude(replace(FIGURES, loss=None, shards=(ShardFigures(0, "ok", 1.0), ShardFigures(2, "rebuilding", 0.25, 9, 10))))
    samples = scraped(server.url)
    assert ("foreload_loss", ()) not in samples
    assert value(samples, "foreload_shard_state", shard="2", state="rebuilding") == 1
    assert {key: sample for key, sample in samples.items() if key[0] == "foreload_shard_rebuilt_ratio"} == {
        ("foreload_shard_rebuilt_ratio", (("shard", "2"),)): 0.25
    }
    assert {key[1] for key in samples if key[0] == "foreload_shard_memory_limit_bytes"} == {(("shard", "2"),)}


def test_a_client_that_goes_away_harms_nothing(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    server.conclude(FIGURES)
    before = set(threading.enumerate())
    host, port = "127.0.0.1", int(server.url.split(":")[2].split("/")[0])
    for sent in (b"", b"GET /metrics HTTP/1.1\r\n", b"\x00\xff" * 100 + b"\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, port)) as client:
            client.sendall(sent)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert value(scraped(server.url), "foreload_step") == 7
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_SECONDS)
    assert capfd.readouterr().err == ""


def test_a_fault_of_the_server_itself_is_shown(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    server.conclude(replace(FIGURES, run="\udcff"))  # what UTF-8 cannot have; the coordinator replaces it
    with pytest.raises(OSError, match="without response"):
        urllib.request.urlopen(server.url, timeout=DEADLINE_SECONDS)
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_SECONDS)
    assert "UnicodeEncodeError" in capfd.readouterr().err


def test_an_address_that_is_taken_is_refused_before_anything_is_made(server: MetricsServer, tmp_path: Path) -> None:
    port = server.url.split(":")[2].split("/")[0]
    schedule = synthetic_schedule(tmp_path, 300)
    error = refused(*arguments(schedule, tmp_path / "run", "--store", "local:1", "--metrics", port))
    assert error == f"--metrics: cannot listen on 127.0.0.1 port {port} (Address already in use); give another address"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "place"),
    [("9100", ("127.0.0.1", 9100)), (9100, ("127.0.0.1", 9100)), ("0", ("127.0.0.1", 0)), ("::1:0", None), ("[::1]:80", ("::1", 80)),
     ("0.0.0.0:9100", ("0.0.0.0", 9100)), ("h:0", ("h", 0)), ("", None), (":", None), (":9100", None), ("h:", None), ("65536", None), ("x", None),
     ("-1", None), (True, None)],
)  # fmt: skip
def test_an_address_is_a_port_or_a_host_and_a_port(given: object, place: tuple[str, int] | None) -> None:
    if place is not None:
        assert Place.parse_local("--metrics", given) == place
    else:
        with pytest.raises(SettingError, match=r"--metrics: must be "):
            Place.parse_local("--metrics", given)


def test_a_run_serves_what_it_reports_in_its_folder(tmp_path: Path, hold: Hold) -> None:
    schedule, run = synthetic_schedule(tmp_path, 6000, further="--eval-fraction 0.1 --epochs 2"), tmp_path / "run"
    job = hold(arguments(schedule, run, "--store", "local:3", "--trainers", "2", "--metrics", "0"), 20)
    job.until(lambda: "metrics for Prometheus: http://127.0.0.1:" in job.said)
    announced = re.search(r"http://\S+", job.said)
    assert announced is not None
    url = announced[0]
    job.until(lambda: scraped(url).get(("foreload_step", ())) == job.step)
    samples = scraped(url)
    # The file may lack what was not written to the disk yet, and end in the middle of a line.
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
    steps = [line for line in lines if line["kind"] == "step"]
    assert value(samples, "foreload_steps_total") == job.step + 1
    assert value(samples, "foreload_samples_total") == 128 * (job.step + 1)
    assert value(samples, "foreload_trainers") == 2
    assert value(samples, "foreload_run_info", run=str(run), namespace="run", state="training") == 1
    assert [value(samples, "foreload_shard_state", shard=str(shard), state="ok") for shard in range(3)] == [1, 1, 1]
    assert all(line["step"] <= job.step for line in steps)
    assert value(samples, "foreload_rows_total", kind="used") >= sum(line["rows_used"] for line in steps)
    job.process.terminate()
    job.schedule.release()
    assert job.end()[0] == 128 + signal.SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=DEADLINE_SECONDS)
    assert summary(run)["steps"] >= value(samples, "foreload_steps_total")


def test_the_page_lists_every_metric() -> None:
    assert table_fields(ROOT / "docs" / "monitoring.md", "The metrics") == NAMES


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("127.evil.com", False),
        ("::", False),
    ],
)
def test_only_loopback_addresses_pass_for_such(host: str, loopback: bool) -> None:
    assert Place(host, 1).is_loopback is loopback


@pytest.mark.parametrize("file", ["prometheus/foreload.rules.yml", "grafana/foreload.json"])
def test_alerts_and_dashboard_name_metrics_that_there_are(file: str) -> None:
    named = set(re.findall(r"foreload_\w+", (ROOT / "deploy" / file).read_text(encoding="utf-8")))
    assert named, file
    assert named <= NAMES


def test_the_dashboard_is_one_of_panels_that_lie_beside_each_other() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "foreload.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's prometheus")
def test_alerts_fire_when_they_are_to() -> None:
    tests = ROOT / "deploy" / "prometheus" / "foreload.rules.test.yml"
    done = subprocess.run(
        ["promtool", "test", "rules", tests.name], cwd=tests.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
