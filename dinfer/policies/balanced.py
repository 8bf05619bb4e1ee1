"""Thresholds of each side: fixed, or balanced within the static threshold's error (DynamicInfer, method 3).

The paper lowers theta_g (the GPU computes resident neurons that were not predicted) and raises theta_c (the
CPU drops predicted ones of the least score) while Err(theta_g, theta_c) <= Err(theta) and the slower side
gets faster. Its error model is one of Bernoulli errors of average size: what a skipped neuron costs is its
probability of being active.

Scores are not in a trace's sets, so their distribution is taken from the predictor's quality (ours): scores
of inactive neurons are normal with mean 0 and variance 1, of active ones normal with mean ``d`` and variance
1, and the static threshold is where recall and the share of false positives are the given ones. All is then
counts: which neurons of a layer are added or dropped does not matter for time or error.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.errors import InputError

ADDED, RECOVERED, DROPPED, LOST = range(4)


@njit
def balance(table, costs, hits, spare, misses):
    """Levels (theta_gpu, theta_cpu) of one layer by the believed ``costs``; (0, 0) is the static threshold.

    ``table`` [4, levels] of this layer, ``hits`` predicted neurons resident, ``spare`` the other residents,
    ``misses`` predicted neurons that are not resident. Greedy, as in the paper: theta_gpu goes down by a
    level, theta_cpu goes up as far as the error allows; stops when max(t_gpu N_gpu, t_cpu N_cpu + t_sync)
    falls no more.
    """
    low, high = 0, 0
    best = _slower(table, costs, hits, spare, misses, 0, 0)
    for level in range(1, table.shape[1]):
        up = high
        while up + 1 < table.shape[1] and table[3, up + 1] * misses <= table[1, level] * spare:
            up += 1
        seconds = _slower(table, costs, hits, spare, misses, level, up)
        if seconds < best:
            best, low, high = seconds, level, up
        elif seconds > best:  # the GPU is the slower side now, and only gets slower
            break
    return low, high


@njit
def added_neurons(table, low, spare):
    """Resident neurons that the GPU computes besides the predicted at level ``low``."""
    return np.int64(np.rint(table[0, low] * spare)) if low > 0 else np.int64(0)


@njit
def dropped_neurons(table, high, misses):
    """Predicted neurons that the CPU leaves out at level ``high``."""
    return np.int64(np.rint(table[2, high] * misses)) if high > 0 else np.int64(0)


@njit
def _slower(table, costs, hits, spare, misses, low, high):
    on_gpu, on_cpu = hits + added_neurons(table, low, spare), misses - dropped_neurons(table, high, misses)
    cpu = (
        costs.cpu_fixed_seconds + on_cpu * costs.cpu_neuron_seconds + costs.merge_seconds
        if on_cpu > 0
        else 0.0
    )
    return max(costs.gpu_fixed_seconds + on_gpu * costs.gpu_neuron_seconds, cpu)


@dataclass(frozen=True)
class Fixed:
    """The static threshold on both sides (PowerInfer)."""

    name: ClassVar[str] = "fixed"
    step: ClassVar[object] = staticmethod(balance)

    def init(self, recall: np.ndarray, false: np.ndarray, density: np.ndarray) -> np.ndarray:
        """No level to go to: float64 [layer, 4, 1], zeros."""
        return np.zeros((len(density), 4, 1))


@dataclass(frozen=True)
class Balanced:
    """Load-aware thresholds; ``levels`` of ``width`` (in the scores' standard deviations) each way. Both
    ours."""

    levels: int = 24
    width: float = 0.125
    name: ClassVar[str] = "balanced"
    step: ClassVar[object] = staticmethod(balance)

    def __post_init__(self) -> None:
        if self.levels < 1 or not self.width > 0:
            raise InputError(
                f"balanced: levels {self.levels} must be at least 1 and width {self.width} positive"
            )

    def init(self, recall: np.ndarray, false: np.ndarray, density: np.ndarray) -> np.ndarray:
        """Tables float64 [layer, 4, levels + 1] of a predictor's ``recall``, ``false`` positive share and
        ``density``.

        Rows: ADDED, RECOVERED are the share of the neurons not predicted that a level takes in, and the
        probability of being active that they hold; DROPPED, LOST the same of the predicted ones that it
        leaves out. Raises InputError for values outside 0 to 1.
        """
        from scipy.special import ndtr, ndtri

        recall, false, density = (np.asarray(v, float)[:, None] for v in (recall, false, density))
        for name, values in (("recall", recall), ("false", false), ("density", density)):
            if not ((values > 0) & (values < 1)).all():
                raise InputError(
                    f"balanced: {name} is {values.ravel().tolist()}; each must be between 0 and 1"
                )
        threshold = -ndtri(false)
        apart = threshold + ndtri(recall)
        move = np.arange(self.levels + 1) * self.width

        def mass(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            active = density * (ndtr(high - apart) - ndtr(low - apart))
            return active + (1 - density) * (ndtr(high) - ndtr(low)), active

        added, recovered = mass(threshold - move, threshold + 0 * move)
        dropped, lost = mass(threshold + 0 * move, threshold + move)
        predicted = density * recall + (1 - density) * false
        return np.stack(
            [added / (1 - predicted), recovered / (1 - predicted), dropped / predicted, lost / predicted],
            axis=1,
        )
