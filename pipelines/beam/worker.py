"""`foreload beam-worker`: a worker process of a Beam pipeline, on a machine that has this package.

A runner such as Flink starts it (`--environment_type=PROCESS`) as it would start `boot`, which
exists only in Beam's Docker images, with the same flags. Source: containers/boot.go of Beam's
Python SDK.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import grpc
from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc, endpoints_pb2
from apache_beam.runners.worker.worker_id_interceptor import WorkerIdInterceptor
from google.protobuf import json_format, text_format

from foreload.base.errors import SettingError

_PATIENCE_SECONDS = 120.0
_HARNESS = "apache_beam.runners.worker.sdk_worker_main"


@dataclass(frozen=True, slots=True)
class WorkerFlags:
    """What the runner starts a worker with.

    Attributes:
        id: the id that the runner gave to the worker.
        provision_endpoint: HOST:PORT of the service that has the options of the pipeline.
        logging_endpoint, control_endpoint: HOST:PORT. If "", the provision service says it.
    """

    id: str
    provision_endpoint: str
    logging_endpoint: str = ""
    control_endpoint: str = ""


def become_worker(flags: WorkerFlags) -> NoReturn:
    """Replace this process by Beam's worker.

    Raises:
        SettingError: the provision service does not answer.
    """
    os.environ.update(worker_environment(flags))
    os.execv(sys.executable, [sys.executable, "-m", _HARNESS])


def worker_environment(flags: WorkerFlags) -> Mapping[str, str]:
    """Return the variables from which Beam's worker reads how to run.

    Raises:
        SettingError: the provision service does not answer.
    """
    info = _provision_info(flags)
    endpoints = {
        "LOGGING": flags.logging_endpoint or info.logging_endpoint.url,
        "CONTROL": flags.control_endpoint or info.control_endpoint.url,
        "STATUS": info.status_endpoint.url,
    }
    return {
        "WORKER_ID": flags.id,
        "PIPELINE_OPTIONS": json_format.MessageToJson(info.pipeline_options),
        "RUNNER_CAPABILITIES": " ".join(info.runner_capabilities),
        **{
            f"{name}_API_SERVICE_DESCRIPTOR": text_format.MessageToString(endpoints_pb2.ApiServiceDescriptor(url=url))
            for name, url in endpoints.items()
            if url
        },
    }


def _provision_info(flags: WorkerFlags) -> beam_provision_api_pb2.ProvisionInfo:
    with grpc.insecure_channel(flags.provision_endpoint) as channel:
        service = beam_provision_api_pb2_grpc.ProvisionServiceStub(grpc.intercept_channel(channel, WorkerIdInterceptor(flags.id)))
        try:
            return service.GetProvisionInfo(
                beam_provision_api_pb2.GetProvisionInfoRequest(), timeout=_PATIENCE_SECONDS, wait_for_ready=True
            ).info
        except grpc.RpcError as error:
            raise SettingError(
                f"--provision_endpoint: must be the address of a runner's provision service; {flags.provision_endpoint} does not answer "
                f"({error.code().name}); a runner starts this command, see docs/flink.md"
            ) from error
