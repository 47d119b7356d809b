"""Settings under which the same operations give the same bits, and the numerics fingerprint.

Trainers compare their fingerprints to make sure that they have the same settings. `set_environment`
must run before torch's first computation in a process, and preferably before torch is imported.
Therefore the functions here import torch themselves.

MKL_CBWR is MKL's setting for reproducible results (conditional numerical reproducibility). On AMD
processors MKL does not follow MKL_CBWR=AVX2 or AVX512 and reports AUTO,STRICT. The same slice has
the same bits then, and that is enough (docs/definitions.md, What is asked of torch).

MKL_CBWR was measured on a Cascade Lake CPU, with Linear layers of 1 to 128 outputs. Under
AVX2,STRICT a row's result is the same wherever the row stands in memory and in its slice, with any
number of threads. Under AVX2 without STRICT, COMPATIBLE and the other values, it depends on the
row's place in the slice. STRICT takes no more time. AVX512,STRICT gives the same guarantee in half
the time or a little more (large layers: 372 to 391 ms instead of 622 to 813), on hosts that have
AVX-512.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreload.base.errors import SettingError
from foreload.base.process import KEEPS_FREED
from foreload.trainer.errors import FingerprintError

# The environment variable that selects the library for products of layers. If it is not set, torch
# chooses.
LINEAR = "FORELOAD_LINEAR"
ENVIRONMENTS = {
    "avx2": {"MKL_CBWR": "AVX2,STRICT", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"MKL_CBWR": "AVX512,STRICT", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
ENVIRONMENTS["avx512-onednn"] = ENVIRONMENTS["avx512"] | {LINEAR: "onednn"}
"""For each --cpu-capability, the variables that are set unless the user's environment has them.

The user gives the capability. If it were detected, hosts of two kinds could never join one run.
"""
# By its documentation, cuBLAS needs this to give the same bits each time.
_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# A step's tensors have the same sizes in every step. These settings make glibc keep their memory,
# in huge pages, instead of returning it to the kernel and faulting it in again. glibc reads them
# when a process starts, so they are in force in the processes that the launcher starts. Other C
# libraries ignore them.
_KEEP_MEMORY = {"hugetlb": 1, **KEEPS_FREED}

_REMEDY = {
    "threads": "give the run's number with --threads",
    "linear": "give the run's --cpu-capability",
    "mkl_cbwr": "set MKL_CBWR alike on all hosts",
    "cpu_capability": "give the run's with --cpu-capability, and set ATEN_CPU_CAPABILITY alike on all hosts",
    "onednn_isa": "set ONEDNN_MAX_CPU_ISA alike on all hosts",
    "torch": "install the run's version of torch",
    "device": "use the run's kind of device",
    "flush_to_zero": "start the trainer without the setting that enables it",
    "probe": "its arithmetic differs for another reason; use hosts of one kind",
}
# MKL's numbers for the code branches that MKL_CBWR selects, and the arguments of mkl_serv_cbwr_get.
_CBWR_BRANCHES = {
    1: "off", 2: "AUTO", 3: "COMPATIBLE", 4: "SSE2", 6: "SSSE3", 7: "SSE4_1", 8: "SSE4_2", 9: "AVX", 10: "AVX2", 11: "AVX512_MIC",
    12: "AVX512", 13: "AVX512_MIC_E1", 14: "AVX512_E1",
}  # fmt: skip
_CBWR_BRANCH, _CBWR_ALL, _CBWR_STRICT = 1, -1, 0x10000


def environment(cpu_capability: str = "avx2", threads: int = 1) -> dict[str, str]:
    """Return the environment variables, name to value, for a process under these settings.

    Variables that are set already keep their values, except for the number of threads.

    Args:
        cpu_capability: a key of ENVIRONMENTS.
        threads: the number of threads of one operation of torch. They are set here too, since
            torch.set_num_threads reaches MKL only in the calling thread.
    """
    tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in _KEEP_MEMORY.items())
    wanted = {"GLIBC_TUNABLES": tunables} | ENVIRONMENTS[cpu_capability] | _CUBLAS
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | {"OMP_NUM_THREADS": str(threads)}


def set_environment(cpu_capability: str = "avx2", threads: int = 1) -> None:
    """Put this process, and the processes that it starts, under `environment`."""
    os.environ.update(environment(cpu_capability, threads))


def check_machine(device: str = "cpu") -> None:
    """Check that this machine has the device and the instructions that are configured.

    Missing instructions would kill the process at their first use. Nothing is computed here, so
    that this process can fork others that use the device.

    Raises:
        SettingError: the machine has no CUDA device, or lacks the instructions.
    """
    import torch

    if device.startswith("cuda") and not torch.cuda.device_count():
        raise SettingError(
            f"--device: cuda needs a CUDA device, and torch {torch.__version__} finds none on this machine; give cpu, or install a driver "
            "and a build of torch for it"
        )
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx512" and not torch.cpu._is_avx512_supported():
        raise SettingError(
            "--cpu-capability: this machine's processor has no avx512; give avx2, on all hosts of the run, "
            "with --accept-numerics if it began with avx512"
        )


def set_up(threads: int, device: str = "cpu", cpu_capability: str = "avx2") -> None:
    """Put this process under the settings.

    They are the environment, threads, device and deterministic algorithms. Denormals are kept.

    Args:
        threads: the number of threads of one operation of torch.
        device: cpu, cuda or, if there are several, for example cuda:1.
        cpu_capability: a key of ENVIRONMENTS.

    Raises:
        SettingError: this machine lacks what the settings need.
    """
    set_environment(cpu_capability, threads)
    check_machine(device)
    import torch

    torch.set_num_threads(threads)
    if os.environ.get(LINEAR) == "onednn":
        from foreload.trainer.compute import onednn

        onednn.take_over()
    torch.set_flush_denormal(False)
    # These two lines replace torch.use_deterministic_algorithms(True). That function also imports
    # torch's compiler to configure it, which takes two seconds.
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.set_deterministic_debug_mode("error")
    # Filling every new tensor would only cost time, since no code here reads values that it has not
    # written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        if ":" in device:
            torch.cuda.set_device(device)


def _mkl_cbwr() -> str:
    """Return the MKL_CBWR that MKL follows, or the variable's value if MKL cannot be queried."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        branch, flags = library.mkl_serv_cbwr_get(_CBWR_BRANCH), library.mkl_serv_cbwr_get(_CBWR_ALL)
    except (OSError, AttributeError):
        return os.environ.get("MKL_CBWR", "")
    return _CBWR_BRANCHES.get(branch, str(branch)) + (",STRICT" if flags & _CBWR_STRICT else "")


def _probe(device: str) -> str:
    """Return a hash of the bits of a small computation.

    Its result depends on the order of its sums and on approximations.
    """
    import torch

    x = ((torch.arange(37 * 29, dtype=torch.float32) % 101 - 50) / 37).view(37, 29).to(device)
    hidden = ((torch.arange(29 * 16, dtype=torch.float32) % 89 - 44) / 53).view(16, 29).to(device).requires_grad_()
    last = ((torch.arange(16, dtype=torch.float32) - 7) / 11).view(1, 16).to(device)
    logits = torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(x, hidden)), last).squeeze(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, (x[:, 0] > 0).float(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, [hidden])
    results = [logits, loss, gradient, torch.sigmoid(x), torch.exp(x), torch.sqrt(x.abs()), x.flatten().sum()]
    if LINEAR in os.environ:
        # This is as large as real layers. How oneDNN cuts their sums may depend on the processor's
        # caches.
        large = (torch.arange(1024 * 256, dtype=torch.float32).view(256, 1024).to(device) % 103 - 51) / 41
        results.append(torch.nn.functional.linear(large, large))
    h = hashlib.sha256()
    for result in results:
        h.update(result.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def fingerprint(device: str = "cpu") -> dict[str, str]:
    """Return what the bits of torch's results depend on, as it is in this process after `set_up`.

    numba and numpy are left out: what they compute for the model is exact, or correctly rounded
    operation by operation.
    """
    import torch

    denormals_kept = bool((torch.full((1,), 2e-39) * 0.5 > 0).item())
    linear = {"linear": os.environ[LINEAR]} if LINEAR in os.environ else {}
    return linear | {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": str(torch.get_num_threads()),
        "mkl_cbwr": _mkl_cbwr(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "flush_to_zero": "off" if denormals_kept else "on",
        "probe": _probe(device),
    }


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the fields in which two fingerprints differ.

    The probe comes last, since it says least.
    """
    fields = sorted(one.keys() | other.keys(), key=lambda name: (name == "probe", name))
    return [field for field in fields if one.get(field) != other.get(field)]


def check(mine: Mapping[str, str], run: Mapping[str, str], goes_on: str | None = None) -> None:
    """Check that this trainer's fingerprint is that of the run.

    Args:
        mine: the fingerprint of this process.
        run: the fingerprint of the run.
        goes_on: the flag with which the run continues, if its fingerprint is that of an earlier
            call. Then the error also suggests --accept-numerics. If None, it does not.

    Raises:
        FingerprintError: they differ. The error names the first field that does.
    """
    for field in differing(mine, run):
        here, there = mine.get(field, "nothing"), run.get(field, "nothing")
        remedy = _REMEDY.get(field, "use the run's version of foreload")
        if goes_on is not None:
            remedy += f", or accept these numerics with {goes_on} --accept-numerics: the run then records from which step on"
        raise FingerprintError(f"numerics fingerprint: {field} is {here} here and {there} in the run; {remedy}")


def mixed_text(fingerprints: Sequence[Mapping[str, Any]]) -> str:
    """Return a line about a run that continued under other numerics.

    Args:
        fingerprints: two or more, in order, each with "step", its first step, and "fingerprint".
    """
    since = [
        f"{now['step']} ({', '.join(differing(now['fingerprint'], before['fingerprint']))})"
        for before, now in itertools.pairwise(fingerprints)
    ]
    return f"of mixed numerics since step {', and again '.join(since)}"
