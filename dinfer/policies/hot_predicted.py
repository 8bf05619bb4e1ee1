"""hot_predicted: DynamicInfer's two-level cache, importance v = a + lambda f."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import add_constant, choose, count, count_gainful, halve, increment, planes_of, write_ids

COUNT_BITS = 6
MOST = 2**COUNT_BITS - 1
"""Frequency counters saturate at 63."""

VALUE_BITS = 8
"""Importance as an integer: counter (at most 63) plus 63 / lambda (at most 126) when predicted. What is resident has
the margin on top, saturating: the largest value never leaves, as nothing outside reaches it."""

HALVE_EVERY = 32
"""Tokens between halvings: a neuron active with probability p holds a count between 32 p and 64 p."""


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    bonus, margin, pinned_share = np.int64(parameters[0]), np.int64(parameters[1]), parameters[2]
    words = resident.size
    scratch = np.empty((4 + VALUE_BITS, words), np.uint64)
    stay, chosen, inside, outside, values = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4:]
    bits = VALUE_BITS
    if MOST + bonus < 2 ** (VALUE_BITS - 1) - 1:  # as with the default lambda
        bits -= 1
    # macro level: the most frequent residents stay
    for i in range(words):
        inside[i] = resident[i]
    choose(state, COUNT_BITS, np.int64(pinned_share * count(resident)), True, inside, stay)
    # micro level: swap while the importance that enters exceeds what leaves by more than the margin
    for b in range(bits):
        for i in range(words):
            values[b, i] = state[b, i] if b < COUNT_BITS else np.uint64(0)
    add_constant(values, bits, bonus, predicted, chosen)
    add_constant(values, bits, margin, resident, chosen)
    for i in range(words):
        inside[i] = resident[i] & ~stay[i]
        outside[i] = ~resident[i]
    n = min(window, count_gainful(values, bits, outside, inside))
    if n > 0:
        for i in range(words):
            inside[i] = resident[i] & ~stay[i]
            outside[i] = ~resident[i]
        choose(values, bits, n, True, outside, chosen)
        write_ids(chosen, fetch)
        choose(values, bits, n, False, inside, chosen)
        write_ids(chosen, evict)
    # history: count what was predicted, halve now and then
    increment(state, COUNT_BITS, predicted)
    clock = COUNT_BITS
    state[clock, 0] += np.uint64(1)
    if state[clock, 0] == np.uint64(HALVE_EVERY):
        state[clock, 0] = np.uint64(0)
        halve(state, COUNT_BITS)
    return max(n, 0)


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
