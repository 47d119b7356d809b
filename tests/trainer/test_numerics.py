"""The numerics settings, in a process of their own: what they promise, and that another fingerprint is refused by name."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from foreload.trainer.compute.numerics import ENVIRONMENTS, check
from foreload.trainer.errors import FingerprintError

# Every check in one process, since the settings come into force once and importing torch takes seconds. Arguments: threads, the processor's
# instructions, and "grid" for all of it. It prints what differed: between addresses of memory and threads (`differ`), and between places of a row in
# a slice (`by_place`).
SCRIPT = """
import hashlib, json, sys, threading
from foreload.trainer.compute import numerics
numerics.set_environment(sys.argv[2], int(sys.argv[1]))
import torch
numerics.set_up(int(sys.argv[1]), cpu_capability=sys.argv[2])

def at(offset, x):
    memory = torch.empty(x.numel() + 16)
    return memory[offset : offset + x.numel()].view_as(x).copy_(x)

def linear(offset, x, weight, bias, gradient):
    x, weight, bias = (at(offset, t).requires_grad_() for t in (x, weight, bias))
    y = torch.nn.functional.linear(x, weight, bias)
    return [y.detach(), *torch.autograd.grad(y, [x, weight, bias], at(offset, gradient))]

def others(offset, x, weight, bias, gradient):
    x = at(offset, x).requires_grad_()
    found = [x.exp(), x.sigmoid(), x.tanh(), x.abs().sqrt(), x.abs().log1p(), x.sum(0), x.sum(1), x.softmax(1),
             torch.bmm(x[:, None, :8], x[:, :8, None]),
             torch.nn.functional.binary_cross_entropy_with_logits(x[:, 0], (x[:, -1] > 0).float(), reduction="sum")]
    return [*(t.detach() for t in found), *torch.autograd.grad(sum(t.sum() for t in found), [x])]

def alike(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))

bits, differ, by_place = hashlib.sha256(), [], []
for inputs, outputs in [(64, 1), (63, 1), (32, 1), (13, 64), (367, 64), (1024, 256)] if "grid" in sys.argv else []:
    torch.manual_seed(inputs)
    layer = torch.nn.Linear(inputs, outputs)
    for samples in (1, 7, 64, 129):
        x, gradient = torch.randn(samples, inputs), torch.randn(samples, outputs)
        given = (x, layer.weight.detach(), layer.bias.detach(), gradient)
        for operation in (linear, others):
            size = [operation.__name__, samples, inputs, outputs]
            first = operation(0, *given)
            for result in first:
                bits.update(result.contiguous().numpy().tobytes())
            for offset in range(16):
                if not alike(first, operation(offset, *given)):
                    differ.append([*size, "address", 4 * offset])
            elsewhere = []
            thread = threading.Thread(target=lambda: elsewhere.extend(operation(0, *given)))
            thread.start()
            thread.join()
            if not alike(first, elsewhere):
                differ.append([*size, "thread"])
        whole = linear(0, *given)[0]
        for start in range(0, samples, 5) if samples in (7, 64) else ():
            if not torch.equal(layer(x[start : start + 11].clone()), whole[start : start + 11]):
                by_place.append([samples, inputs, outputs, start])
print(json.dumps({"bits": bits.hexdigest(), "differ": differ, "by_place": by_place,
                  "fingerprint": numerics.fingerprint(), "again": numerics.fingerprint(),
                  "deterministic": torch.are_deterministic_algorithms_enabled(), "filled": torch.utils.deterministic.fill_uninitialized_memory}))
"""
GRID = [
    (1, "avx2"), pytest.param(2, "avx2", marks=pytest.mark.full), pytest.param(1, "avx512", marks=pytest.mark.full), (1, "avx512-onednn"),
    (2, "avx512"), pytest.param(2, "avx512-onednn", marks=pytest.mark.full),
]  # fmt: skip


@functools.cache
def measured(threads: int, cpu_capability: str, process: int) -> dict[str, Any]:
    """What a process of its own finds over the grid; process: which of several that are alike."""
    if cpu_capability.startswith("avx512") and not torch.cpu._is_avx512_supported():
        pytest.skip("this processor has no avx512")
    return said_by_script(threads, cpu_capability, "grid")


def said_by_script(threads: int, cpu_capability: str, *further: str, **environment: str) -> dict[str, Any]:
    """What SCRIPT says under such settings. further: "grid", or nothing for the fingerprint alone."""
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENTS["avx512-onednn"]}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(threads), cpu_capability, *further],
        # Threads that wait leave the processor to others: it changes no bit, and is quicker where the machine is busy.
        env=inherited | {"OMP_WAIT_POLICY": "passive"} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize(("threads", "cpu_capability"), GRID)
def test_the_same_slice_gives_the_same_bits_at_every_address_in_every_thread_and_process(
    threads: int, cpu_capability: str
) -> None:
    measurement = measured(threads, cpu_capability, process=0)
    assert measurement["differ"] == []
    assert measurement["bits"] == measured(threads, cpu_capability, process=1)["bits"]
    assert measurement["fingerprint"] == measurement["again"]
    assert measurement["deterministic"] is True
    assert measurement["filled"] is False
    fingerprint = measurement["fingerprint"]
    assert fingerprint["threads"] == str(threads)
    assert fingerprint["flush_to_zero"] == "off"
    assert fingerprint["device"] == "cpu"
    assert fingerprint["cpu_capability"] == cpu_capability.upper().partition("-")[0]
    assert fingerprint.get("linear", "") == cpu_capability.partition("-")[2]


@pytest.mark.parametrize(("threads", "cpu_capability"), GRID)
def test_where_mkl_follows_the_branch_a_row_does_not_depend_on_its_place_in_the_slice(threads: int, cpu_capability: str) -> None:
    measurement = measured(threads, cpu_capability, process=0)
    followed, asked = measurement["fingerprint"]["mkl_cbwr"], ENVIRONMENTS[cpu_capability]["MKL_CBWR"]
    if "linear" in measurement["fingerprint"]:
        pytest.skip("layers are not MKL's products here")
    if followed != asked:
        pytest.skip(f"MKL follows {followed} on this processor, asked for {asked}: exactness needs no more than the same slices")
    assert measurement["by_place"] == []


def test_the_users_environment_wins_and_shows_in_the_fingerprint() -> None:
    fingerprint = said_by_script(1, "avx2", MKL_CBWR="COMPATIBLE", ATEN_CPU_CAPABILITY="default")["fingerprint"]
    assert fingerprint["mkl_cbwr"] == "COMPATIBLE"
    assert fingerprint["cpu_capability"] in ("DEFAULT", "NO AVX")


def test_a_difference_is_refused_by_name() -> None:
    run = {"threads": "1", "torch": "2.13.0", "probe": "abc"}
    check(run, dict(run))
    with pytest.raises(FingerprintError, match="threads is 2 here and 1 in the run; give the run's number with --threads"):
        check(run | {"threads": "2", "probe": "def"}, run)
    with pytest.raises(FingerprintError, match="probe is def here"):
        check(run | {"probe": "def"}, run)
    with pytest.raises(FingerprintError, match="torch is nothing here"):
        check({"threads": "1", "probe": "abc"}, run)
