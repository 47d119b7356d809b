"""What a forked process does for its caller: one function per call, a generator of what the caller gets, as JSON values and bytes.

Each takes the call's values, and a function that closes the socket to the caller, for processes that are forked in turn. Imports are in the
functions, so that a call loads only what it needs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foreload.base.errors import ForeloadError
from foreload.base.forking import replace_environment
from foreload.base.interrupts import Interrupts
from foreload.base.socket_messages import send
from foreload.trainer.run.own_exit import exits_told

Part = tuple[dict[str, Any], bytes]
"""JSON values, and the bytes of an array that they describe."""


def answer(reply: socket.socket, request: Mapping[str, Any]) -> int:
    """Do what a request asks for, sending each piece and then how it ended; returns the exit status.

    The last message is empty where the call succeeded, or was interrupted, which the caller knows; else it has the error.
    """
    replace_environment(request["environment"])
    end: dict[str, Any] = {}
    try:
        os.chdir(request["folder"])
        with Interrupts(), exits_told(request["call"]):
            for values, payload in CALLS[request["call"]](request["values"], reply.close):
                send(reply, {"part": values}, payload)
    except ForeloadError as error:
        end = {"code": error.code, "message": str(error)}
    except KeyboardInterrupt:
        pass  # the caller knows
    except BrokenPipeError:
        return 0  # the caller wants no more
    except OSError as error:
        end = {"errno": error.errno, "message": error.strerror or str(error), "filename": error.filename}
    except Exception as error:
        traceback.print_exc()
        end = {"unforeseen": f"{type(error).__name__}: {error}"}
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        send(reply, end)
    return 2 if end else 0


def _prepare(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.pipelines.planning.options import PrepareOptions
    from foreload.pipelines.prepare import prepare

    given: dict[str, Any] = values["settings"]
    job_file = given.pop("job", None)
    options = PrepareOptions.of(given, job_file)
    with contextlib.redirect_stdout(sys.stderr):
        yield prepare(options, values["beam_flags"]), b""


def _train(values: dict[str, Any], leave: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer import storage
    from foreload.trainer.cluster.processes.preforked import Preforked
    from foreload.trainer.cluster.processes.starting import ChildProcess
    from foreload.trainer.commands.train import as_it_stands, call_values, train
    from foreload.trainer.job.job import TrainJob
    from foreload.trainer.job.scheduler import under_scheduler

    job_file = values.pop("job", None)
    # The second is where the file wants the summary, which is written for the command line only.
    values, _ = call_values(values, job_file)
    job = TrainJob.of(as_it_stands(values))
    # A process that has asked an object store has threads, and cannot be forked.
    if under_scheduler() or storage.is_asking():
        ending = train(job, start_process=ChildProcess)
    else:
        with contextlib.closing(Preforked(job.trainers + 1, leave)) as processes:
            ending = train(job, start_process=processes)
    if ending is not None and ending.no_digest is not None:
        raise ending.no_digest
    yield {"run": job.run, "stopped": ending is not None and ending.stopped}, b""


def _evaluate(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import evaluate

    yield evaluate.run(values["run"], values["store"], values["schedule"], values["accept_model"]), b""


def _export(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import export

    yield (
        export.run(values["run"], values["store"], values["out"], values["since"], values["of_schedule"], values["accept_model"]),
        b"",
    )


def _export_torch(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import export_torch
    from foreload.trainer.serving.torch_folder import TorchOptions

    options = TorchOptions(**values["options"])
    yield (
        export_torch.run(values["run"], values["store"], values["out"], options, values["of_schedule"], values["accept_model"]),
        b"",
    )


def _apply(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import apply

    yield apply.run(values["export"], values["to"], values["key"], values["keep"]), b""


def _digest(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import digest

    yield digest.run(values["run"], values["store"]), b""


def _delete(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import rows
    from foreload.trainer.saved.run_rows import Overrule

    yield rows.run(values["run"], values["store"], Overrule(values["folder_moved"], values["force"])), b""


def _report(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import report

    places = [values["run"], *([values["beside"]] if values["beside"] else [])]
    yield {"report": str(report.run(places, values["out"]))}, b""


def _predict(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import predict

    records = predict.Records(tuple(values["sources"]), values["format"], values["steps_of"])
    with predict.run(
        values["run"], values["store"], records, values["of_schedule"], values["logits"], values["accept_model"]
    ) as predictions:
        for batch in predictions.batches:
            yield {"shape": batch.shape}, batch.tobytes()


def _rows(values: dict[str, Any], _: Callable[[], None]) -> Iterator[Part]:
    from foreload.trainer.commands import lookup

    looked_up = lookup.run(
        values["run"], values["store"], values["table"], values["values"], values["ids"], values["of_schedule"]
    )
    shape = {"rows": len(looked_up.ids), "columns": looked_up.weights.shape[1], "step": looked_up.step}
    yield shape, looked_up.ids.tobytes() + looked_up.weights.tobytes() + looked_up.trained.tobytes()


CALLS: dict[str, Callable[[dict[str, Any], Callable[[], None]], Iterator[Part]]] = {
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
    "export_torch": _export_torch,
    "apply": _apply,
    "digest": _digest,
    "predict": _predict,
    "rows": _rows,
    "delete": _delete,
    "report": _report,
}
