"""What the `foreload` command does before anything heavy is imported: signals, where kernels are kept, the version."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from command_line import ROOT, Command
from grids import covering

import foreload
from foreload.base import kernel_cache

NOWHERE = Path("/dev/null/folder")
"""A folder that nobody can make."""

STANDS_STILL = """
import importlib, os, sys
open(os.environ["IMPORTED"], "w").close()
open(os.environ["RELEASED"], "rb", 0).read(1)
sys.path.remove(os.environ["PYTHONPATH"])
del sys.modules[__name__]
importlib.import_module(__name__)
"""


COMMANDS = {"evaluate": ["evaluate", "nothing"], "train": ["train", "{schedule}", "--run", "none", "--store", "local:1"]}


@pytest.mark.parametrize(
    ("module", "command", "name"), covering(list(product(["torch", "numpy"], COMMANDS, ["SIGINT", "SIGTERM", "SIGHUP"])), 5)
)
def test_a_signal_while_modules_are_imported_ends_the_command_in_one_line(
    command: str, module: str, name: str, tmp_path: Path
) -> None:
    """The module that is being imported stands still until the signal comes; where it goes on then, the signal is heeded behind it."""
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / f"{module}.py").write_text(STANDS_STILL)
    imported = tmp_path / "imported"
    os.mkfifo(tmp_path / "released")
    released = os.open(tmp_path / "released", os.O_RDWR)
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "stubs"), "IMPORTED": str(imported), "RELEASED": str(tmp_path / "released"),
    }  # fmt: skip
    words = [sys.executable, "-m", "foreload", *(word.format(schedule=tmp_path) for word in COMMANDS[command])]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    try:
        process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    finally:
        signal.signal(signal.SIGHUP, before)
    while not imported.exists():
        assert process.poll() is None
    process.send_signal(getattr(signal, name))
    os.write(released, b"x")
    _, err = process.communicate()
    os.close(released)
    assert (process.returncode, err) == (128 + getattr(signal, name), "foreload: stopped\n")


def test_a_command_that_is_not_disturbed_is_as_ever(tmp_path: Path) -> None:
    status, out, err = Command("--version").end()
    assert (status, out, err) == (0, f"foreload {metadata.version('foreload')}\n", "")
    assert foreload.__version__ == metadata.version("foreload")
    said = subprocess.run(
        [sys.executable, "-m", "foreload", "--version"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert said.stdout == out


def test_the_license_is_in_the_package() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture
def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package is another user's, and there is no HOME."""
    monkeypatch.setattr(kernel_cache, "_BESIDE", NOWHERE / "__pycache__")
    monkeypatch.setenv("XDG_CACHE_HOME", str(NOWHERE))
    monkeypatch.delenv(kernel_cache.VARIABLE, raising=False)


def test_kernels_are_kept_where_they_can_be(no_folders: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = kernel_cache.choose_folder()
    own = Path(os.environ[kernel_cache.VARIABLE])
    assert own.parent == tmp_path
    assert (
        said == f"no cache folder is writable, so compiled kernels are kept in {own}; set NUMBA_CACHE_DIR to use another folder"
    )
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert kernel_cache.choose_folder() is None  # of a process that was started: it is told the folder
    monkeypatch.setenv(kernel_cache.VARIABLE, str(NOWHERE))
    assert kernel_cache.choose_folder() == said
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kernel_cache.choose_folder() is None


@pytest.mark.parametrize("kind", ["others may write", "link", "file"])
def test_a_folder_that_others_may_have_written_to_is_not_read(
    kind: str, no_folders: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """numba runs what it reads there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"foreload-kernels-{os.geteuid()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        own.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        own.touch()
    else:
        own.mkdir()
        own.chmod(0o777)
    from numba.core.dispatcher import Dispatcher

    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "enable_caching", Dispatcher.enable_caching)
        said = kernel_cache.choose_folder()
        assert Dispatcher.enable_caching is kernel_cache._keep_nothing
    assert said is not None
    assert said.startswith("no cache folder is writable, so each process compiles the kernels again")
    assert kernel_cache.VARIABLE not in os.environ


def test_commands_work_where_no_folder_can_be_written(tmp_path: Path) -> None:
    """In a process of its own, whose kernels are compiled without a cache."""
    program = (
        "import pathlib, sys\n"
        "from foreload.base import kernel_cache\n"
        "assert kernel_cache._keep_nothing is not None\n"
        "from numba.core.dispatcher import Dispatcher\n"
        "setattr(Dispatcher, 'enable_caching', kernel_cache._keep_nothing)\n"
        "from foreload.base.hashing import mix\n"
        "import numpy\n"
        "print(int(mix(numpy.uint64(1))))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "10451216379200822465\n"


def test_kernels_are_compiled_again_when_what_they_call_in_another_file_has_changed(tmp_path: Path) -> None:
    """numba asks about a kernel's own file alone, which is the same after this upgrade."""
    shutil.copytree(ROOT / "foreload", tmp_path / "foreload", ignore=shutil.ignore_patterns("__pycache__"))
    program = (
        "import numpy\n"
        "from foreload.cache.parity import stripes\n"
        "print(stripes.__file__, stripes.stripe_hash(numpy.uint64(1), 2, 3))\n"
    )

    def printed(**variables: str) -> list[str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)} | variables
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout.split()

    file, before = printed()
    assert Path(file).is_relative_to(tmp_path)
    hashing = tmp_path / "foreload" / "base" / "hashing.py"
    hashing.write_text(hashing.read_text().replace("0xBF58476D1CE4E5B9", "0xBF58476D1CE4E5BB"))
    after = printed()[1]
    assert after != before
    assert after == printed(NUMBA_CACHE_DIR=str(tmp_path / "fresh"))[1]
