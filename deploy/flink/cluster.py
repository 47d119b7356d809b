"""A Flink cluster on this machine, to try `foreload prepare` on one (`make flink`, `make flink-stop`).

It has a job manager, two task managers and Beam's job server. Needs Java 17 and Maven, which
resolves the jars.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

POM = Path(__file__).with_name("pom.xml")
FOLDER = Path(__file__).resolve().parents[2] / "build" / "flink"
TASK_MANAGERS = 2
SLOTS = 2  # of a task manager
PATIENCE_SECONDS = 300.0
_JOB_MANAGER = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
_TASK_MANAGER = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
_JOB_SERVER = "org.apache.beam.runners.flink.FlinkJobServerDriver"
# Flink 1.19 reads fields of these packages, which Java 17 closes.
_OPENED = ("lang", "net", "nio", "time", "util", "util.concurrent")
_SETTINGS = {
    "jobmanager.rpc.address": "127.0.0.1",
    "jobmanager.bind-host": "127.0.0.1",
    "rest.address": "127.0.0.1",
    "rest.bind-address": "127.0.0.1",
    "taskmanager.host": "127.0.0.1",
    "taskmanager.bind-host": "127.0.0.1",
    "taskmanager.numberOfTaskSlots": SLOTS,
    "taskmanager.cpu.cores": 2.0,
    "taskmanager.memory.framework.heap.size": "128mb",
    "taskmanager.memory.framework.off-heap.size": "128mb",
    "taskmanager.memory.task.heap.size": "384mb",
    "taskmanager.memory.task.off-heap.size": "0b",
    "taskmanager.memory.network.min": "64mb",
    "taskmanager.memory.network.max": "64mb",
    "taskmanager.memory.managed.size": "256mb",
    "taskmanager.memory.jvm-metaspace.size": "256mb",
    "taskmanager.memory.jvm-overhead.min": "192mb",
    "taskmanager.memory.jvm-overhead.max": "192mb",
    # All jars are on the path of every process, so a job brings none of its own.
    "classloader.resolve-order": "parent-first",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": 10,
    "restart-strategy.fixed-delay.delay": "1 s",
}


class ClusterError(Exception):
    """The cluster cannot be started."""


def missing() -> str | None:
    """Return what this machine lacks for a cluster, or None."""
    lacking = [program for program in ("java", "mvn") if shutil.which(program) is None]
    return f"needs {' and '.join(lacking)}" if lacking else None


def resolve_jars(folder: Path) -> Path:
    """Have Maven collect the jars, unless they are there, and return their folder.

    Raises:
        ClusterError: they cannot be had.
    """
    jars, log = folder / f"jars-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}", folder / "maven.log"
    if jars.exists():
        return jars
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{jars.name}.{os.getpid()}"
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={new}"]
    with log.open("wb") as out:
        done = subprocess.run(
            ["mvn", "-B", "-q", "-f", POM, *goal], stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False
        )
    if done.returncode:
        raise ClusterError(f"Maven cannot collect the jars of {POM}: see {log}; a mirror may lack a version")
    # Another process may have been first.
    with contextlib.suppress(OSError):
        new.rename(jars)
    return jars


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cluster:
    """The processes of a cluster.

    Attributes:
        folder: the folder of its configuration, logs and process ids.
        processes: by name: job-manager, task-manager-1 and so on, job-server.
    """

    def __init__(self, folder: Path, jars: Path, settings: Mapping[str, Any]) -> None:
        """Start the processes, without waiting until they answer.

        Args:
            settings: settings of Flink, beside and before those that every cluster here has.
        """
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()
        self._rest, rpc = _free_port(), _free_port()
        ports = {"rest.port": self._rest, "jobmanager.rpc.port": rpc, "io.tmp.dirs": str(folder / "tmp")}
        for name in ("conf", "log", "tmp"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        lines = [f"{name}: {value}\n" for name, value in {**_SETTINGS, **ports, **settings}.items()]
        (folder / "conf" / "config.yaml").write_text("".join(lines), encoding="utf-8")
        opened = [f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in _OPENED]
        self._java = ["java", *opened, "-Xmx768m", "-cp", f"{jars}/*"]
        self._start("job-manager", _JOB_MANAGER, "--configDir", folder / "conf")
        for number in range(1, TASK_MANAGERS + 1):
            self.start_task_manager(number)
        # Port 0 is a free one. No expansion service: the pipeline is all Python.
        self._start(
            "job-server", _JOB_SERVER, f"--flink-master=127.0.0.1:{self._rest}", "--job-host=127.0.0.1", "--job-port=0", "--artifact-port=0",
            "--expansion-port=-1", f"--artifacts-dir={folder / 'tmp' / 'artifacts'}",
        )  # fmt: skip

    def start_task_manager(self, number: int) -> None:
        """Start a task manager, also in place of one that has ended."""
        self._start(f"task-manager-{number}", _TASK_MANAGER, "--configDir", self.folder / "conf")

    def _start(self, name: str, main: str, *arguments: object) -> None:
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self._java, main, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_ready(self, environment: Mapping[str, str] | None = None) -> list[str]:
        """Wait until all answer, and return Beam's flags for `foreload prepare`.

        Args:
            environment: further variables of the workers.

        Raises:
            ClusterError: one has ended, or does not answer in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (job_port := self._job_port()) is None or self.task_managers() < TASK_MANAGERS:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise ClusterError(f"{name} has ended: see {self.folder / 'log' / name}.log")
            if time.monotonic() > deadline:
                raise ClusterError(f"the cluster does not answer: see {self.folder / 'log'}")
            time.sleep(0.2)
        command = {"command": str(Path(sys.executable).with_name("foreload-beam-worker"))}
        worker = json.dumps(command | ({"env": dict(environment)} if environment else {}))
        return [
            "--runner=PortableRunner",
            f"--job_endpoint=localhost:{job_port}",
            f"--parallelism={SLOTS}",
            "--environment_type=PROCESS",
            f"--environment_config={worker}",
        ]

    def _job_port(self) -> int | None:
        text = (self.folder / "log" / "job-server.log").read_text(encoding="utf-8", errors="replace")
        port = re.search(r"JobService started on \S+:(\d+)", text)
        return None if port is None else int(port[1])

    @property
    def pids(self) -> dict[str, int]:
        """The process ids by name."""
        return {name: process.pid for name, process in self.processes.items()}

    @property
    def url(self) -> str:
        """The address of Flink's page and REST interface."""
        return f"http://127.0.0.1:{self._rest}"

    def task_managers(self) -> int:
        """Return how many task managers the job manager knows, 0 while it does not answer."""
        try:
            return int(self.ask("overview")["taskmanagers"])
        except OSError:
            return 0

    def ask(self, path: str) -> Any:
        """Return what Flink's REST interface answers.

        Raises:
            OSError: it does not answer.
        """
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=60) as answer:
            return json.load(answer)

    def stop(self) -> None:
        """End all processes."""
        end_processes(self.pids.values(), str(self.folder))
        for process in self.processes.values():
            process.wait()


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return Path(f"/proc/{pid}").exists()


def _belongs(pid: int, folder: str) -> bool:
    """Return whether a process, which may have got the number of another, is one of the cluster in a folder."""
    with contextlib.suppress(OSError):
        return folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end_processes(pids: Iterable[int], folder: str) -> None:
    """End the processes of the cluster in a folder, and the workers that they have started."""
    left = [pid for pid in pids if _belongs(pid, folder)]
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        for pid in left:
            # Each leads a session of its own, which has its workers too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        deadline = time.monotonic() + patience
        while (left := [pid for pid in left if _is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)


def start() -> int:
    """Start the cluster of this checkout, and print the flags for `foreload prepare`."""
    if lacking := missing():
        raise ClusterError(f"{lacking}; install them, such as with apt-get install openjdk-17-jre-headless maven")
    pids = FOLDER / "pids.json"
    if pids.exists() and any(_belongs(pid, str(FOLDER)) for pid in json.loads(pids.read_text()).values()):
        raise ClusterError("it runs already; `make flink-stop` ends it")
    print(f"collecting the jars with Maven into {FOLDER}", file=sys.stderr)
    jars = resolve_jars(FOLDER)
    shutil.rmtree(FOLDER / "log", ignore_errors=True)
    shutil.rmtree(FOLDER / "tmp", ignore_errors=True)
    print("starting Flink", file=sys.stderr)
    cluster = Cluster(FOLDER, jars, {})
    try:
        pids.write_text(json.dumps(cluster.pids))
        flags = cluster.await_ready()
    except BaseException:
        cluster.stop()
        raise
    words = " \\\n    ".join(shlex.quote(flag) for flag in flags)
    print(
        f"Flink runs; its own page is {cluster.url}. Beam's job server has no setting for the address at which it listens, so other machines "
        "reach it, too, unless a firewall keeps them off.",
        file=sys.stderr,
    )
    print(f"foreload prepare ... \\\n    {words}")
    return 0


def stop() -> int:
    """End the cluster of this checkout."""
    pids = FOLDER / "pids.json"
    if pids.exists():
        end_processes(json.loads(pids.read_text()).values(), str(FOLDER))
        pids.unlink()
    return 0


def main() -> int:
    """Start or stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("start", "stop"))
    try:
        return {"start": start, "stop": stop}[parser.parse_args().action]()
    except ClusterError as error:
        print(f"flink: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("flink: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
