"""Settings under which the same operations give the same bits, and the fingerprint by which trainers agree on them.

`set_environment` must come before the first computation of torch in a process, best before torch is imported; hence torch is
imported in functions here. MKL_CBWR is MKL's setting for results that can be repeated (conditional numerical reproducibility). On AMD processors MKL
does not follow MKL_CBWR=AVX2 or AVX512 and says AUTO,STRICT: the same slice has the same bits then, and that is enough
(docs/definitions.md, What is asked of torch). Measured for MKL_CBWR on a Cascade Lake CPU, with Linear layers of 1 to 128 outputs: under
AVX2,STRICT a row's result is the same wherever it stands in memory and in its slice, with any number of threads; under AVX2 without STRICT,
COMPATIBLE and the rest it depends on its place in the slice. STRICT takes no more time. AVX512,STRICT keeps the same promise in half the time or a
little more (large layers: 372 to 391 ms instead of 622 to 813), on hosts that have it.
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

LINEAR = "FORELOAD_LINEAR"  # variable: whose products layers are; torch's own choice where it is not set
ENVIRONMENTS = {
    "avx2": {"MKL_CBWR": "AVX2,STRICT", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"MKL_CBWR": "AVX512,STRICT", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
ENVIRONMENTS["avx512-onednn"] = ENVIRONMENTS["avx512"] | {LINEAR: "onednn"}
"""By --cpu-capability, the variables that are set unless the user's environment has them. The capability is given, not detected: otherwise hosts of
two kinds could never join one run."""
# What cuBLAS needs to give the same bits each time, by its documentation.
_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# Tensors of a step are of the same sizes in every step: glibc is set to keep their memory, in huge pages, instead of giving it back and
# faulting it in again. Read when a process starts, so it is in force in what the launcher starts. Other C libraries ignore it.
_KEEP_MEMORY = {"hugetlb": 1, **KEEPS_FREED}

_REMEDY = {
    "threads": "give the run's number with --threads",
    "linear": "give the run's --cpu-capability",
    "mkl_cbwr": "set MKL_CBWR alike on all hosts",
    "cpu_capability": "give the run's with --cpu-capability, and set ATEN_CPU_CAPABILITY alike on all hosts",
    "onednn_isa": "set ONEDNN_MAX_CPU_ISA alike on all hosts",
    "torch": "install the run's version of torch",
    "device": "use the run's kind of device",
    "flush_to_zero": "start the trainer without what switches it on",
    "probe": "its arithmetic differs for another reason; use hosts of one kind",
}
# MKL's own numbers for the branch of code that MKL_CBWR asks for, and the arguments of mkl_serv_cbwr_get.
_CBWR_BRANCHES = {
    1: "off", 2: "AUTO", 3: "COMPATIBLE", 4: "SSE2", 6: "SSSE3", 7: "SSE4_1", 8: "SSE4_2", 9: "AVX", 10: "AVX2", 11: "AVX512_MIC",
    12: "AVX512", 13: "AVX512_MIC_E1", 14: "AVX512_E1",
}  # fmt: skip
_CBWR_BRANCH, _CBWR_ALL, _CBWR_STRICT = 1, -1, 0x10000


def environment(cpu_capability: str = "avx2", threads: int = 1) -> dict[str, str]:
    """Environment variables, name to value, for a process under these settings; those that are set already keep their values, but for the threads.

    threads: that one operation of torch uses. They are set here too, since torch.set_num_threads reaches MKL in the calling thread only.
    """
    tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in _KEEP_MEMORY.items())
    wanted = {"GLIBC_TUNABLES": tunables} | ENVIRONMENTS[cpu_capability] | _CUBLAS
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | {"OMP_NUM_THREADS": str(threads)}


def set_environment(cpu_capability: str = "avx2", threads: int = 1) -> None:
    """Put this process, and those that it starts, under `environment`."""
    os.environ.update(environment(cpu_capability, threads))


def check_machine(device: str = "cpu") -> None:
    """Raise SettingError where torch is asked for what this machine lacks: a CUDA device, or instructions, the first of which would kill the process.

    Nothing is computed here, so that this process can fork others which use the device.
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
    """Put this process under the settings: environment, threads, device, deterministic algorithms, denormals kept. Raises SettingError.

    device: cpu, cuda, or, of several, as cuda:1.
    """
    set_environment(cpu_capability, threads)
    check_machine(device)
    import torch

    torch.set_num_threads(threads)
    if os.environ.get(LINEAR) == "onednn":
        from foreload.trainer.compute import onednn

        onednn.take_over()
    torch.set_flush_denormal(False)
    # As torch.use_deterministic_algorithms(True) does, which imports torch's compiler, for two seconds, to tell it the same.
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.set_deterministic_debug_mode("error")
    # Filling every new tensor would only cost time: nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        if ":" in device:
            torch.cuda.set_device(device)


def _mkl_cbwr() -> str:
    """MKL_CBWR as MKL follows it, or as it is set where MKL cannot be asked."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        branch, flags = library.mkl_serv_cbwr_get(_CBWR_BRANCH), library.mkl_serv_cbwr_get(_CBWR_ALL)
    except (OSError, AttributeError):
        return os.environ.get("MKL_CBWR", "")
    return _CBWR_BRANCHES.get(branch, str(branch)) + (",STRICT" if flags & _CBWR_STRICT else "")


def _probe(device: str) -> str:
    """A hash of the bits of a small computation whose result depends on the order of its sums and on approximations."""
    import torch

    x = ((torch.arange(37 * 29, dtype=torch.float32) % 101 - 50) / 37).view(37, 29).to(device)
    hidden = ((torch.arange(29 * 16, dtype=torch.float32) % 89 - 44) / 53).view(16, 29).to(device).requires_grad_()
    last = ((torch.arange(16, dtype=torch.float32) - 7) / 11).view(1, 16).to(device)
    logits = torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(x, hidden)), last).squeeze(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, (x[:, 0] > 0).float(), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, [hidden])
    results = [logits, loss, gradient, torch.sigmoid(x), torch.exp(x), torch.sqrt(x.abs()), x.flatten().sum()]
    if LINEAR in os.environ:
        # As large as layers are: how oneDNN cuts their sums may depend on the processor's caches.
        large = (torch.arange(1024 * 256, dtype=torch.float32).view(256, 1024).to(device) % 103 - 51) / 41
        results.append(torch.nn.functional.linear(large, large))
    h = hashlib.sha256()
    for result in results:
        h.update(result.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def fingerprint(device: str = "cpu") -> dict[str, str]:
    """What the bits of torch's results depend on, as it is in force in this process after set_up.

    numba and numpy are left out: what they compute for the model is exact, or correctly rounded operation by operation.
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
    """The fields in which two fingerprints differ; the probe, which says least, last."""
    fields = sorted(one.keys() | other.keys(), key=lambda name: (name == "probe", name))
    return [field for field in fields if one.get(field) != other.get(field)]


def check(mine: Mapping[str, str], run: Mapping[str, str], goes_on: str | None = None) -> None:
    """Raise FingerprintError, naming the first field that differs, unless this trainer's fingerprint is the run's.

    mine, run: as `fingerprint` gives them; goes_on: the flag with which the run goes on, where its fingerprint is that of an earlier call, so
    that --accept-numerics is a remedy.
    """
    for field in differing(mine, run):
        here, there = mine.get(field, "nothing"), run.get(field, "nothing")
        remedy = _REMEDY.get(field, "use the run's version of foreload")
        if goes_on is not None:
            remedy += f", or go on in these numerics with {goes_on} --accept-numerics: the run then says from which step on"
        raise FingerprintError(f"numerics fingerprint: {field} is {here} here and {there} in the run; {remedy}")


def mixed_text(fingerprints: Sequence[Mapping[str, Any]]) -> str:
    """A line about a run that went on in other numerics. fingerprints: {"step": its first, "fingerprint": ...} of each, in order, two at least."""
    since = [
        f"{now['step']} ({', '.join(differing(now['fingerprint'], before['fingerprint']))})"
        for before, now in itertools.pairwise(fingerprints)
    ]
    return f"of mixed numerics since step {', and again '.join(since)}"
