"""`foreload beam-worker`: what it asks a runner, and what Beam's worker is told (tests/pipelines/test_flink.py has it work for Flink)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc, endpoints_pb2
from apache_beam.runners.worker.data_plane import _GrpcDataChannel
from command_line import free_port, refused
from google.protobuf import json_format, text_format

from foreload.pipelines.beam import worker
from foreload.pipelines.beam.pipeline import pass_over_closed_channels
from foreload.pipelines.beam.worker import WorkerFlags, worker_environment

OPTIONS = {"beam:option:job_name:v1": "prepare", "beam:option:parallelism:v1": 4}


class Provision(beam_provision_api_pb2_grpc.ProvisionServiceServicer):
    """A runner's service. asked_by: the ids of the workers that asked."""

    def __init__(self) -> None:
        self.asked_by: list[str] = []

    def GetProvisionInfo(self, request: Any, context: Any) -> Any:
        self.asked_by.append(dict(context.invocation_metadata())["worker_id"])
        info = beam_provision_api_pb2.ProvisionInfo(
            logging_endpoint=endpoints_pb2.ApiServiceDescriptor(url="logging:1"),
            control_endpoint=endpoints_pb2.ApiServiceDescriptor(url="control:1"),
            runner_capabilities=["beam:one", "beam:two"],
        )
        json_format.ParseDict(OPTIONS, info.pipeline_options)
        return beam_provision_api_pb2.GetProvisionInfoResponse(info=info)


@pytest.fixture
def provision() -> Iterator[tuple[Provision, str]]:
    """A service, and its address."""
    service, server, port = Provision(), grpc.server(ThreadPoolExecutor(1)), free_port()
    beam_provision_api_pb2_grpc.add_ProvisionServiceServicer_to_server(service, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("given", [{}, {"control_endpoint": "flag:2", "logging_endpoint": "flag:3"}])
def test_a_worker_is_told_what_the_runner_says_and_the_flags_first(
    given: dict[str, str], provision: tuple[Provision, str]
) -> None:
    service, address = provision
    told = worker_environment(WorkerFlags("7-1", address, **given))
    assert service.asked_by == ["7-1"]
    assert told["WORKER_ID"] == "7-1"
    assert json.loads(told["PIPELINE_OPTIONS"]) == OPTIONS
    assert told["RUNNER_CAPABILITIES"].split() == ["beam:one", "beam:two"]
    for name, url in (
        ("CONTROL", given.get("control_endpoint", "control:1")),
        ("LOGGING", given.get("logging_endpoint", "logging:1")),
    ):
        place = text_format.Parse(told[f"{name}_API_SERVICE_DESCRIPTOR"], endpoints_pb2.ApiServiceDescriptor())
        assert place.url == url
    assert "STATUS_API_SERVICE_DESCRIPTOR" not in told


class Closed(grpc.RpcError):
    """What a connection that the other side has closed raises."""


@pytest.mark.parametrize(("raised", "told"), [(Closed, False), (ValueError, True)])
def test_connections_that_a_runner_closes_are_passed_over(
    raised: type[Exception], told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hooked: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda ended: hooked.append(ended.exc_type))
    pass_over_closed_channels()

    def fail(_: int) -> None:
        raise raised("closed")

    reader = threading.Thread(target=_GrpcDataChannel()._read_inputs, args=(map(fail, [0]),))
    reader.start()
    reader.join()
    assert bool(hooked) is bool(caplog.records) is told


def test_a_runner_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PATIENCE_SECONDS", 0.1)
    line = refused("beam-worker", "--id=1", f"--provision_endpoint=127.0.0.1:{free_port()}")
    assert line.startswith("--provision_endpoint: must be the address of a runner's provision service; 127.0.0.1:")
    assert "does not answer (DEADLINE_EXCEEDED); a runner starts this command, see docs/flink.md" in line
