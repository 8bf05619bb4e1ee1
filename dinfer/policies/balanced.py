"""Thresholds of each side: fixed, or balanced within the static threshold's error (DynamicInfer, method 3).

The paper lowers theta_g (the GPU computes resident neurons below the static threshold) and raises theta_c (the
CPU drops neurons of the least score above it) while Err(theta_g, theta_c) <= Err(theta) and the slower side
gets faster. What a level changes, in neurons and in error, are tables; where they come from differs:

Of a recorded trace (``Levels``, solve/levels.py) the error is measured: neurons that are left out change a
layer's output by the sum of their values times their down columns, which point in nearly orthogonal directions,
so that its square is the sum of the squared contributions (|value| times the column's norm). On SmolLM2 the
two differ by 0 to 6% at 60% sparsity, token by token by 3 to 5% (the first layer: 12 and 9%).

Of a synthetic one (``Balanced.init``, ours) scores are not in its sets, so their distribution is taken from the
predictor's quality: scores of inactive neurons are normal with mean 0 and variance 1, of active ones normal with
mean ``d`` and variance 1, and the static threshold is where recall and the share of false positives are the given
ones. The error is then the paper's, one of Bernoulli errors of average size: what a skipped neuron costs is its
probability of being active.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit, types

from dinfer.errors import InputError
from dinfer.policies.window import COSTS, cpu_seconds, gpu_seconds

ADDED, RECOVERED, DROPPED, LOST, SKIPPED = range(5)
_TABLE, _COUNT = types.float64[:, ::1], types.int64


@njit
def added_neurons(table, low, spare):
    """Resident neurons that the GPU computes besides the predicted at level ``low``."""
    return np.int64(np.rint(table[0, low] * spare)) if low > 0 else np.int64(0)


@njit
def dropped_neurons(table, high, misses):
    """Predicted neurons that the CPU leaves out at level ``high``."""
    return np.int64(np.rint(table[2, high] * misses)) if high > 0 else np.int64(0)


@njit
def unread_neurons(table, high, cold):
    """Cold neurons by how much fewer the CPU examines at level ``high``: one whose up stays unread is half of one."""
    return np.int64(np.rint(table[4, high] * cold / 2)) if high > 0 else np.int64(0)


@njit
def _slower(table, costs, hits, spare, misses, cold, low, high):
    on_gpu, on_cpu = hits + added_neurons(table, low, spare), misses - dropped_neurons(table, high, misses)
    examined = cold - unread_neurons(table, high, cold)
    empty = cold * costs.cpu_gate_seconds + on_cpu == 0
    cpu = 0.0 if empty else cpu_seconds(costs, examined, on_cpu) + costs.merge_seconds
    return max(gpu_seconds(costs, hits + spare, on_gpu), cpu)


@njit(types.UniTuple(_COUNT, 2)(_TABLE, COSTS, _COUNT, _COUNT, _COUNT, _COUNT), cache=True)
def balance(table, costs, hits, spare, misses, cold):
    """Levels (theta_gpu, theta_cpu) of one layer by the believed ``costs``; (0, 0) is the static threshold.

    ``table`` [5, levels] of this layer, ``hits`` neurons above the static threshold that are resident, ``spare`` the
    other residents, ``misses`` neurons above it that are not resident, of ``cold`` in all. Greedy, as in the paper:
    theta_gpu goes down by a level, theta_cpu goes up as far as the error allows; stops when
    max(t_gpu N_gpu, t_cpu N_cpu + t_sync) falls no more.
    """
    low, high = 0, 0
    best = _slower(table, costs, hits, spare, misses, cold, 0, 0)
    for level in range(1, table.shape[1]):
        up = high
        while up + 1 < table.shape[1] and table[3, up + 1] * misses <= table[1, level] * spare:
            up += 1
        seconds = _slower(table, costs, hits, spare, misses, cold, level, up)
        if seconds < best:
            best, low, high = seconds, level, up
        elif seconds > best:  # the GPU is the slower side now, and only gets slower
            break
    return low, high


@dataclass(frozen=True, eq=False)
class Levels:
    """A plan's thresholds of each side, level by level; level 0 is the static threshold.

    ``gpu``, ``cpu`` float32 [layer, levels]: theta of each side, the GPU's of a neuron's value, the CPU's of its
    activated gate, besides the static one of its value (0: none): what the gate alone rules out saves the CPU
    reading up too, two thirds of a neuron in place of one. Of ReLU kinds both are of the gate, as the static one is.
    ``tables`` float64 [layer, 5, levels] are what ``balance`` reads: ADDED, DROPPED and SKIPPED in shares of neurons,
    RECOVERED and LOST in squared contributions a neuron.
    ``expected`` int64 [layer, 4]: hits, spare, misses and cold neurons of a mean token, by which activation that
    computes its gates decides, as it does not know a token's counts beforehand.
    """

    gpu: np.ndarray
    cpu: np.ndarray
    tables: np.ndarray
    expected: np.ndarray

    def __post_init__(self) -> None:
        layers, _, levels = self.tables.shape
        shapes = {"gpu": (layers, levels), "cpu": (layers, levels), "tables": (layers, 5, levels)}
        for name, shape in {**shapes, "expected": (layers, 4)}.items():
            if getattr(self, name).shape != shape:
                raise InputError(f"levels: {name} has shape {getattr(self, name).shape}; it must be {shape}")

    def choose(self, costs: object) -> np.ndarray:
        """Levels int64 [layer, 2] (theta_gpu, theta_cpu) of a mean token by the believed LayerCosts ``costs``."""
        layers = zip(self.tables, self.expected.tolist(), strict=True)
        return np.array([balance(table, costs, *counts) for table, counts in layers], np.int64)

    def thresholds(self, chosen: np.ndarray) -> np.ndarray:
        """theta float32 [layer, 2] of the GPU and the CPU at the levels ``chosen`` int64 [layer, 2]."""
        layers = np.arange(len(chosen))
        return np.stack([self.gpu[layers, chosen[:, 0]], self.cpu[layers, chosen[:, 1]]], axis=1)

    def unread(self, chosen: np.ndarray) -> list[int]:
        """By how many neurons fewer the CPU examines in each layer at the levels ``chosen``, as ``balance`` counts."""
        cold = self.expected[:, 3].tolist()
        return [unread_neurons(*each) for each in zip(self.tables, chosen[:, 1].tolist(), cold, strict=True)]

    def relative_error(self, chosen: np.ndarray) -> np.ndarray:
        """Squared contributions [layer] that the levels ``chosen`` lose on the CPU less those that the GPU wins back.

        At most 0 by what was recorded: Err(theta_g, theta_c) - Err(theta) of a mean token.
        """
        layers, (_, spare, misses, _) = np.arange(len(chosen)), self.expected.T
        won = self.tables[layers, RECOVERED, chosen[:, 0]] * spare
        return self.tables[layers, LOST, chosen[:, 1]] * misses - won


@dataclass(frozen=True)
class Fixed:
    """The static threshold on both sides (PowerInfer)."""

    name: ClassVar[str] = "fixed"
    step: ClassVar[object] = staticmethod(balance)

    def init(self, recall: np.ndarray, false: np.ndarray, density: np.ndarray) -> np.ndarray:
        """No level to go to: float64 [layer, 5, 1], zeros."""
        return np.zeros((len(density), 5, 1))


@dataclass(frozen=True)
class Balanced:
    """Load-aware thresholds; ``levels`` each way, of ``width`` standard deviations of a synthetic trace's scores
    (of recorded scores a level is one code, a sixteenth of an octave). Both ours."""

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
        """Tables float64 [layer, 5, levels + 1] of a predictor's ``recall``, ``false`` positive share and
        ``density``.

        Rows: ADDED, RECOVERED are the share of the neurons not predicted that a level takes in, and the
        probability of being active that they hold; DROPPED, LOST the same of the predicted ones that it
        leaves out; SKIPPED is 0, as a predicted neuron is read whole or not at all. Raises InputError for
        values outside 0 to 1.
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
            [added / (1 - predicted), recovered / (1 - predicted), dropped / predicted, lost / predicted, 0 * lost],
            axis=1,
        )
