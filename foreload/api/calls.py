"""The functions that a forked process runs for its caller, one for each call.

Each is a generator of the parts that the caller gets, as JSON values and bytes. Its arguments are
the caller and the call's values. Imports are in the functions, so that a call loads only what it
needs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foreload.base.codec import to_stored
from foreload.base.errors import ForeloadError
from foreload.base.interrupts import Interrupts
from foreload.base.json_log import log_as
from foreload.base.process import replace_environment
from foreload.base.socket_messages import send
from foreload.trainer.run.model_code import exits_reported

ResultPart = tuple[Mapping[str, object], bytes]
"""JSON values, and the bytes of an array that they describe."""


class Caller:
    """The process that made a call.

    Args:
        reply: the socket to it.
    """

    def __init__(self, reply: socket.socket) -> None:
        self._reply = reply

    def send(self, values: Mapping[str, object], payload: bytes = b"") -> None:
        """Send a part of the result.

        Raises:
            BrokenPipeError: the caller has closed the socket.
        """
        send(self._reply, {"part": values}, payload)

    def leave(self) -> None:
        """Close the socket, in a process that was forked in turn."""
        self._reply.close()


def answer(reply: socket.socket, request: Mapping[str, Any]) -> int:
    """Run a call, and send each part of its result to the caller, then how it ended.

    The last message is empty if the call succeeded, or was interrupted, which the caller knows.
    Otherwise it has the error.

    Returns:
        The exit status of the process.
    """
    replace_environment(request["environment"])
    end: dict[str, Any] = {}
    try:
        os.chdir(request["folder"])
        with Interrupts(), exits_reported(request["call"]):
            caller = Caller(reply)
            for values, payload in CALLS[request["call"]](caller, **_with_model(request)):
                caller.send(values, payload)
    except ForeloadError as error:
        end = {"code": error.code, "message": str(error)}
    except KeyboardInterrupt:
        # The caller sent the interrupt, so it needs no error.
        pass
    except BrokenPipeError:
        # The caller has closed the socket, and wants no more parts.
        return 0
    except OSError as error:
        end = {"errno": error.errno, "message": error.strerror or str(error), "filename": error.filename}
    except Exception as error:
        traceback.print_exc()
        end = {"unforeseen": f"{type(error).__name__}: {error}"}
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        send(reply, end)
    return 2 if end else 0


def _with_model(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a call. A call that uses a model gets the path of the one that a run stands for."""
    values = dict(request["values"])
    if request["call"] in ("evaluate", "export", "export_torch", "predict", "rows"):
        from foreload.trainer.commands.chosen_model import chosen_model

        values["run"] = chosen_model(values["run"], last=values["last"])
    return values


def _prepare(_: Caller, /, settings: dict[str, Any], beam_flags: list[str], **_further: object) -> Iterator[ResultPart]:
    from foreload.pipelines.planning.options import PrepareOptions
    from foreload.pipelines.prepare import prepare

    job_file = settings.pop("job", None)
    options = PrepareOptions.of(settings, job_file)
    with contextlib.redirect_stdout(sys.stderr):
        yield prepare(options, beam_flags), b""


def _train(caller: Caller, /, job: str | None = None, **settings: Any) -> Iterator[ResultPart]:
    from foreload.trainer import storage
    from foreload.trainer.cluster.messages.faults import RunObserver
    from foreload.trainer.cluster.processes.preforked import Preforked
    from foreload.trainer.cluster.processes.starting import ChildProcess
    from foreload.trainer.commands.train import as_it_stands, call_values, train
    from foreload.trainer.commands.warm_start import started
    from foreload.trainer.job.job import TrainJob
    from foreload.trainer.job.scheduler import under_scheduler

    # The second value says where the job file wants the summary, which only the command line
    # writes.
    values, _ = call_values(settings, job)
    log_as(values.get("log_format"))
    wanted = TrainJob.of(started(as_it_stands(values)))

    class Evaluations(RunObserver):
        def on_evaluation(self, metrics: Mapping[str, Any]) -> None:
            # A caller that is gone, or has heard enough, has a clean stop on its way.
            with contextlib.suppress(OSError):
                caller.send({"evaluation": metrics})

    observer = Evaluations()
    # A process that has used an object store, or built a model to choose a start, has threads, and
    # cannot be forked.
    if under_scheduler() or storage.is_asking() or wanted.auto:
        ending = train(wanted, observer, ChildProcess)
    else:
        with contextlib.closing(Preforked(wanted.trainers + 1, caller.leave)) as processes:
            ending = train(wanted, observer, processes)
    if ending is not None and ending.no_digest is not None:
        raise ending.no_digest
    yield {"run": wanted.run, "stopped": ending is not None and ending.stopped}, b""


def _evaluate(
    _: Caller, /, run: str, store: str | None, schedule: str | None, accept_model: bool, **_further: object
) -> Iterator[ResultPart]:
    from foreload.trainer.commands import evaluate

    yield evaluate.run(run, store, schedule, accept_model), b""


def _export(
    _: Caller,
    /,
    run: str,
    store: str | None,
    of_schedule: str | None,
    accept_model: bool,
    out: str,
    since: str | None,
    **_further: object,
) -> Iterator[ResultPart]:
    from foreload.trainer.commands import export

    yield export.run(run, store, out, since, of_schedule, accept_model), b""


def _export_torch(
    _: Caller,
    /,
    run: str,
    store: str | None,
    of_schedule: str | None,
    accept_model: bool,
    out: str,
    options: Mapping[str, Any],
    **_further: object,
) -> Iterator[ResultPart]:
    from foreload.trainer.commands import export_torch
    from foreload.trainer.serving.torch_folder import TorchOptions

    yield export_torch.run(run, store, out, TorchOptions(**options), of_schedule, accept_model), b""


def _apply(_: Caller, /, export: str, to: str, key: str | None, keep: int, **_further: object) -> Iterator[ResultPart]:
    from foreload.trainer.commands import apply

    yield to_stored(apply.run(export, to, key, keep)), b""


def _digest(_: Caller, /, run: str, store: str | None, **_further: object) -> Iterator[ResultPart]:
    from foreload.trainer.commands import digest

    yield to_stored(digest.run(run, store)), b""


def _delete(
    _: Caller, /, run: str, store: str | None, folder_moved: bool, force: bool, **_further: object
) -> Iterator[ResultPart]:
    from foreload.trainer.commands import rows
    from foreload.trainer.saved.run_rows import Overrule

    yield to_stored(rows.run(run, store, Overrule(folder_moved, force))), b""


def _report(_: Caller, /, run: str, out: str | None, beside: str | None, **_further: object) -> Iterator[ResultPart]:
    from foreload.trainer.commands import report

    yield {"report": str(report.run([run, *([beside] if beside else [])], out))}, b""


def _predict(
    _: Caller, /, run: str, store: str | None, of_schedule: str | None, accept_model: bool, logits: bool, **asked: Any
) -> Iterator[ResultPart]:
    from foreload.trainer.commands import predict

    records = predict.Records(tuple(asked["sources"]), asked["format"], asked["steps_of"])
    with predict.run(run, store, records, of_schedule, logits, accept_model) as predictions:
        for batch in predictions.batches:
            yield {"shape": batch.shape}, batch.tobytes()


def _rows(
    _: Caller,
    /,
    run: str,
    store: str | None,
    of_schedule: str | None,
    table: str,
    values: list[str | int | None] | None,
    ids: list[int] | None,
    **_further: object,
) -> Iterator[ResultPart]:
    from foreload.trainer.commands import lookup

    looked_up = lookup.run(run, store, table, values, ids, of_schedule)
    shape = {"rows": len(looked_up.ids), "columns": looked_up.weights.shape[1], "step": looked_up.step}
    yield shape, looked_up.ids.tobytes() + looked_up.weights.tobytes() + looked_up.trained.tobytes()


CALLS: dict[str, Callable[..., Iterator[ResultPart]]] = {
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
