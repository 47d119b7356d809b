"""Read the dense part of a stopped run's model, without torch.

It is one safetensors file with parameters and optimizer state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from foreload.trainer.errors import RunError

PARAMETER, STATE, STEP = "parameter/", "state/", "step"


def read_dense(path: Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return parameters by name and optimizer state by "<parameter>/<key>", float32.

    Raises:
        RunError: the file is missing, damaged, or of another step than `step`.
    """
    parameters: dict[str, np.ndarray] = {}
    state: dict[str, np.ndarray] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            saved_step = (file.metadata() or {}).get(STEP)
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                target, prefix = (parameters, PARAMETER) if name.startswith(PARAMETER) else (state, STATE)
                target[name.removeprefix(prefix)] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read ({error}); restore the run's folder or train anew with --overwrite") from error
    if saved_step != str(step):
        raise RunError(
            f"{path}: must be from step {step}; it is from step {saved_step}; restore the run's folder or train anew with --overwrite"
        )
    return parameters, state
