"""hot_predicted: DynamicInfer's two-level cache, importance v = a + lambda f."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import (
    COUNT_BITS,
    choose,
    count,
    count_above,
    count_gainful,
    halve,
    increment,
    plain,
    planes_of,
    scratch_sets,
    weigh,
)

MOST = 2**COUNT_BITS - 1
"""Frequency counters saturate at 63."""

VALUE_BITS = 8
"""Importance as an integer: counter (at most 63) plus 63 / lambda (at most 126) when predicted. What is resident has
the margin on top, saturating: the largest value never leaves, as nothing outside reaches it."""

HALVE_EVERY = 32
"""Tokens between halvings: a neuron active with probability p holds a count between 32 p and 64 p."""


@plain
def _propose(values, bits, window, resident, stay, inside, outside, fetch, evict):
    # micro level: swap while the importance that enters exceeds what leaves by more than the margin
    for i in range(resident.size):
        inside[i], outside[i] = resident[i] & ~stay[i], ~resident[i]
    n = count_gainful(values, bits, window, outside, inside)
    if n <= 0:
        return np.int64(0)
    for i in range(resident.size):
        inside[i], outside[i] = resident[i] & ~stay[i], ~resident[i]
    choose(values, bits, n, True, outside, fetch)
    choose(values, bits, n, False, inside, evict)
    return n


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    bonus, margin = np.int64(parameters[0]), np.int64(parameters[1])
    words = resident.size
    scratch = scratch_sets(3 + VALUE_BITS, words)
    stay, inside, outside, values = scratch[0][:words], scratch[1][:words], scratch[2][:words], scratch[3:]
    bits = VALUE_BITS
    if MOST + bonus < 2 ** (VALUE_BITS - 1) - 1:  # as with the default lambda
        bits -= 1
    weigh(state, bonus, predicted, margin, resident, values, bits)
    for i in range(words):
        stay[i] = np.uint64(0)
    n = _propose(values, bits, window, resident, stay, inside, outside, fetch, evict)
    # macro level: the most frequent residents stay; mostly all that shall leave are rarer anyhow
    pinned = np.int64(parameters[2] * count(resident))
    if n > 0 and pinned > 0:
        for i in range(words):
            inside[i], outside[i] = evict[i], resident[i]
        if count_above(state, COUNT_BITS, pinned, inside, outside) < pinned:
            for i in range(words):
                inside[i] = resident[i]
            choose(state, COUNT_BITS, pinned, True, inside, stay)
            n = _propose(values, bits, window, resident, stay, inside, outside, fetch, evict)
    # history: count what was predicted, halve now and then
    increment(state, COUNT_BITS, predicted)
    clock = COUNT_BITS
    state[clock, 0] += np.uint64(1)
    if state[clock, 0] == np.uint64(HALVE_EVERY):
        state[clock, 0] = np.uint64(0)
        halve(state, COUNT_BITS)
    return n


@dataclass(frozen=True)
class HotPredicted:
    """v = a + lambda f (paper, method 2): a is predicted activity, f the frequency tracked in this sequence.

    The ``pinned`` share of the slots with the highest f never leaves (macro level); the rest is swapped by
    importance while the window lasts (micro level) and v gains more than ``margin``. The paper does not publish its
    constants: ``lam`` (lambda, at least 0.5), ``margin`` and ``pinned`` are ours.
    """

    lam: float = 1.0
    margin: float = 0.1
    pinned: float = 0.5
    name: ClassVar[str] = "hot_predicted"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = False
    step: ClassVar[object] = staticmethod(_step)

    def __post_init__(self) -> None:
        if self.lam < 0.5:
            raise InputError(f"hot_predicted: lam is {self.lam}; it must be at least 0.5")
        if not 0 <= self.pinned <= 1 or not 0 <= self.margin <= 1:
            raise InputError(f"hot_predicted: pinned {self.pinned} and margin {self.margin} must be between 0 and 1")

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """Counters as bit planes, started from the offline frequency, and a row whose first word is a clock."""
        counters = planes_of(np.rint(frequency * 1.5 * HALVE_EVERY).astype(np.int64), COUNT_BITS)
        return np.concatenate([counters, np.zeros((spec.layers, 1, spec.words), np.uint64)], axis=1)

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """lambda as the integer worth of being predicted, the margin on the same scale, the pinned share."""
        scale = MOST / self.lam
        return np.array([np.rint(scale), np.rint(self.margin * scale), self.pinned])
