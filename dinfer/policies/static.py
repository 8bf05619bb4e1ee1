"""static: what the plan placed stays (PowerInfer)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    return 0


@dataclass(frozen=True)
class Static:
    """Never moves a neuron."""

    name: ClassVar[str] = "static"
    moves: ClassVar[bool] = False
    clairvoyant: ClassVar[bool] = False
    step: ClassVar[object] = staticmethod(_step)

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """No state: one unused row a layer."""
        return np.zeros((spec.layers, 1, spec.words), np.uint64)

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """None."""
        return np.zeros(1)
