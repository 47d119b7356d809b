"""Non-negative least squares: the fit of a sum of terms none of which can take time away."""

from __future__ import annotations

import numpy as np

_TOLERANCE = 1e-10


def non_negative_fit(terms: np.ndarray, values: np.ndarray, shared: float = 0.0) -> np.ndarray:
    """The coefficients float64 [n], none below 0, for which |terms @ coefficients - values| is least (Lawson and Hanson 1974, chapter 23).

    terms: [m, n]; values: [m]. A term that is 0 throughout gets 0. shared: with more than 0, terms that cannot be told apart share what they explain
    (ridge regression, of terms scaled to length 1), where else one of them might get all.
    """
    scales = np.linalg.norm(terms, axis=0)
    scales[scales == 0] = 1.0
    matrix = terms / scales
    size = matrix.shape[1]
    if shared:
        matrix, values = np.concatenate([matrix, np.sqrt(shared) * np.eye(size)]), np.concatenate([values, np.zeros(size)])
    passive = np.zeros(size, bool)
    solution = np.zeros(size)
    gradient = matrix.T @ values
    for _ in range(10 * size):
        candidates = np.where(passive, -np.inf, gradient)
        best = int(np.argmax(candidates)) if size else 0
        if not size or candidates[best] <= _TOLERANCE * max(np.abs(values).max(initial=0.0), 1e-300):
            break
        passive[best] = True
        while True:
            trial = np.zeros(size)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], values, rcond=None)[0]
            below = passive & (trial <= 0)
            if not below.any():
                break
            # Towards the unconstrained solution as far as nothing falls below 0; what comes to 0 leaves.
            ratios = solution[below] / np.maximum(solution[below] - trial[below], 1e-300)
            solution = solution + ratios.min() * (trial - solution)
            passive &= solution > _TOLERANCE
            solution[~passive] = 0.0
            if not passive.any():
                break
        solution = np.where(passive, trial, 0.0)
        gradient = matrix.T @ (values - matrix @ solution)
    result: np.ndarray = solution / scales
    return result
