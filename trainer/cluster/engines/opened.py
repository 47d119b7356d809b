"""Which engine a job has, and what can be asked of engines while nothing trains.

Ray is imported only for jobs that use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from foreload.base.errors import SettingError
from foreload.trainer.adjusting.shares import PoolState
from foreload.trainer.cluster.engines.engine import Engine
from foreload.trainer.cluster.engines.local_engine import JoinedEngine, LocalEngine
from foreload.trainer.cluster.processes.starting import StartProcess
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.engine_record import EngineRecord


@contextlib.contextmanager
def engine_of(job: TrainJob, start: StartProcess) -> Iterator[Engine]:
    """Open a job's engine while entered.

    Args:
        start: Starts processes on this machine.

    Raises:
        SettingError: The engine cannot be reached, or is not installed.
    """
    with contextlib.ExitStack() as stack:
        engine: Engine
        if job.engine == "ray":
            ray_engine = _of_ray()
            stack.enter_context(ray_engine.connected(job.ray_address))
            engine = ray_engine.RayEngine(job)
        else:
            engine = LocalEngine(start) if job.coordinator is None else JoinedEngine(start, job)
        stack.callback(engine.close)
        yield engine


@contextlib.contextmanager
def ended(run: Path) -> Iterator[None]:
    """End the processes that an engine keeps for a stopped run, when the context is left without an error.

    Raises:
        RunError: The run is being trained.
        SettingError: The engine is not installed.
    """
    record = EngineRecord.read(run)
    if record is None:
        yield
        return
    with _of_ray().ended(run, record):
        yield


def pool_state(address: str | None) -> PoolState | None:
    """Return the jobs that share a Ray cluster. None if no job has shared it yet.

    Args:
        address: As --ray-address.

    Raises:
        SettingError: The cluster cannot be reached, or Ray is not installed.
    """
    ray_engine = _of_ray()
    from foreload.trainer.cluster.engines import ray_pool

    with ray_engine.connected(address):
        return ray_pool.state()


def _of_ray() -> ModuleType:
    try:
        from foreload.trainer.cluster.engines import ray_engine
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise SettingError("--engine: ray is not installed; pip install 'foreload[ray]', on all nodes") from error
    return ray_engine
