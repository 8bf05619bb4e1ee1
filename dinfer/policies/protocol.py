"""What a cache policy is."""

from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numba import types

from dinfer.machine import LayerCosts
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.words import ids

_WORDS = types.uint64[::1]
STEP_SIGNATURE = types.int64(
    types.float64[::1],  # parameters
    types.uint64[:, ::1],  # state of one layer, changed in place
    _WORDS,  # resident
    _WORDS,  # predicted
    types.uint64[:, :],  # future: the active sets of the tokens after this one (empty unless clairvoyant)
    types.int64,  # window
    _WORDS,  # fetch, written
    _WORDS,  # evict, written
)
STEP = types.FunctionType(STEP_SIGNATURE)


class Beliefs(NamedTuple):
    """What a plan tells its policy beforehand: the layers' width, how predictions come, and the believed costs.

    ``lookahead`` is in layers; ``lag`` is by how many tokens a prediction trails what it predicts; ``queues`` says
    that the merge's copy waits behind prefetches.
    """

    neurons: int
    lookahead: int
    lag: int
    queues: bool
    costs: LayerCosts


FREE = Beliefs(0, 1, 0, False, LayerCosts(*[0.0] * len(LayerCosts._fields))._replace(cpu_neuron_seconds=1.0))
"""What is believed where no plan says otherwise: only a use on the CPU takes time, the link takes none."""


class Cache(Protocol):
    """A cache policy: what to fetch and evict in one layer before its FFN.

    ``init(spec, placement, frequency)`` gives the state uint64 [layer, rows, words] from the offline frequency
    [layer, neuron]; ``parameters(beliefs)`` the float64 vector that the step reads. ``step`` is the compiled function
    of STEP_SIGNATURE: it writes sets of equally many neurons, at most ``window``, into ``fetch`` and ``evict``, and
    returns how many; what they hold counts for nothing when that is 0. ``moves`` is False for a policy that never
    fetches; ``clairvoyant`` is True for one that reads the future.
    """

    name: ClassVar[str]
    moves: ClassVar[bool]
    clairvoyant: ClassVar[bool]
    step: ClassVar[object]

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """The state at the start of a sequence."""

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """What the step reads as ``parameters``."""


class Decision(NamedTuple):
    """One step's answer: ids to fetch and ids to evict, int32 arrays of equal length."""

    fetch: np.ndarray
    evict: np.ndarray


NO_IDS = np.zeros(0, np.int32)
NO_FUTURE = np.zeros((0, 1), np.uint64)


def decide(
    cache: Cache,
    parameters: np.ndarray,
    state: np.ndarray,
    resident: np.ndarray,
    predicted: np.ndarray,
    window: int,
    future: np.ndarray = NO_FUTURE,
) -> tuple[Decision, np.ndarray]:
    """One step of ``cache`` for one layer as a pure function: the decision and the new state.

    ``state`` is [rows, words], ``resident`` and ``predicted`` [words], ``future`` [tokens, words]; none is changed.
    """
    after = state.copy()
    fetch, evict = np.zeros_like(resident), np.zeros_like(resident)
    n = cache.step(parameters, after, resident, predicted, future, window, fetch, evict)  # type: ignore[operator]
    if n == 0:
        return Decision(NO_IDS, NO_IDS), after
    return Decision(ids(fetch, n), ids(evict, n)), after
