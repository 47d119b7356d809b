"""The global random number generators that a user's code may use: Python's, NumPy's, torch's."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator

import numpy as np
import torch

# The generator behind numpy.random's functions. NumPy offers no other access to it.
_GLOBAL = np.random.mtrand._rand


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all three generators within the context, and restore their states afterwards.

    NumPy gets the seed modulo 2**32, because it accepts no larger seeds.
    """
    of_python, of_numpy = random.getstate(), _GLOBAL.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            random.seed(seed)
            _GLOBAL.seed(seed % 2**32)
            torch.manual_seed(seed)
            yield
        finally:
            random.setstate(of_python)
            _GLOBAL.set_state(of_numpy)


def seed_torch(seed: int, device: str = "cpu") -> None:
    """Seed torch's generators of the CPU and, with "cuda", of this process's CUDA device.

    torch.manual_seed would do that, too. But it also records the caller's stack, for devices that
    may be used later. That takes 0.2 ms, and more for a deeper stack.
    """
    torch.default_generator.manual_seed(seed)
    if device == "cuda":
        torch.cuda.manual_seed(seed)


def states_beside_torch() -> dict[str, bytes]:
    """Return the states of the generators that no training step seeds, by module name."""
    return {"random": pickle.dumps(random.getstate()), "numpy.random": pickle.dumps(_GLOBAL.get_state())}
