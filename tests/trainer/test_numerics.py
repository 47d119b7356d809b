"""The numerics settings, in a process of their own: what they promise, and the fingerprint's refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from trainer.errors import FingerprintError
from trainer.numerics import ENVIRONMENTS, check

# Every check in one process, since the settings come into force once and importing torch takes seconds.
SCRIPT = """
import json, sys
from trainer import numerics
numerics.set_up(int(sys.argv[1]), cpu_capability=sys.argv[2])
import torch

def linear(inputs, outputs):
    torch.manual_seed(inputs)
    return torch.nn.Linear(inputs, outputs)

def at(offset, x):
    memory = torch.zeros(x.numel() + 64)
    view = memory[offset : offset + x.numel()].view_as(x)
    return view.copy_(x)

differ = []
for inputs, outputs in [(64, 1), (63, 1), (32, 1), (13, 64), (367, 64)]:
    layer = linear(inputs, outputs)
    for samples in (7, 64):
        x = torch.randn(samples, inputs)
        whole = layer(x).detach()
        def run(given):
            given = given.detach().requires_grad_()
            y = layer(given)
            return [y.detach(), *torch.autograd.grad(y.square().sum(), [given, *layer.parameters()])]
        first = run(x)
        for offset in (1, 4, 11):
            if not all(torch.equal(a, b) for a, b in zip(first, run(at(offset, x)))):
                differ.append(["address", inputs, outputs, samples, offset])
        for start in range(0, samples, 5):
            if not torch.equal(layer(x[start : start + 11].clone()), whole[start : start + 11]):
                differ.append(["slice", inputs, outputs, samples, start])
print(json.dumps({"differ": differ, "fingerprint": numerics.fingerprint(), "again": numerics.fingerprint(),
                  "deterministic": torch.are_deterministic_algorithms_enabled(), "filled": torch.utils.deterministic.fill_uninitialized_memory}))
"""


def measured(threads: int, cpu_capability: str = "avx2", **environment: str) -> dict[str, object]:
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENTS["avx2"]}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(threads), cpu_capability],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cpu_capability", ["avx2", "avx512"])
def test_a_linear_layer_gives_the_same_bits_at_every_address_and_in_every_slice(threads: int, cpu_capability: str) -> None:
    if cpu_capability == "avx512" and not torch.cpu._is_avx512_supported():
        pytest.skip("needs a processor with avx512")
    found = measured(threads, cpu_capability)
    assert found["differ"] == []
    assert found["fingerprint"] == found["again"]
    assert found["deterministic"] is True
    assert found["filled"] is False
    fingerprint = found["fingerprint"]
    assert isinstance(fingerprint, dict)
    assert fingerprint["threads"] == str(threads)
    assert fingerprint["flush_to_zero"] == "off"
    assert fingerprint["device"] == "cpu"
    assert fingerprint["cpu_capability"] == cpu_capability.upper()
    assert fingerprint["mkl_cbwr"] == f"{cpu_capability.upper()},STRICT"


def test_the_users_environment_wins_and_shows_in_the_fingerprint() -> None:
    found = measured(1, MKL_CBWR="COMPATIBLE", ATEN_CPU_CAPABILITY="default")
    fingerprint = found["fingerprint"]
    assert isinstance(fingerprint, dict)
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
