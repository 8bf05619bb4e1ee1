"""time_saved: ours; swaps neurons while the CPU time saved exceeds the time spent, and hides its copies.

Four things that v = a + lambda f does not ask: what a copy costs (CPU seconds lost to the copy's share of the
DRAM), how many copies stay hidden, what a layer without a CPU part saves, and whether past swaps were any good.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.errors import InputError
from dinfer.machine import LayerCosts
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import (
    COUNT_BITS,
    choose,
    count,
    count_gainful,
    count_split,
    halve,
    increment,
    plain,
    planes_of,
    popcount,
    scratch_sets,
    weigh,
)

VALUE_BITS = 8
"""Worth as an integer: a counter plus what a use now is worth, at most 255."""

TOKENS = 32
"""Counters are halved once they saw 64 tokens, so that 32 to 64 count; ours, tuned on the presets."""

PRIOR_TOKENS = 8
"""The offline profile counts for so many tokens at the start; ours, few as it may be of other texts."""

DECAY = 0.97
"""Weight of the swaps before when they are judged, for each token; ours: the last 33 tokens or so count."""

TRUSTED_SWAPS, TRUSTED_USES = 64, 0.3
"""Before any swap is judged: as if so many had each brought so many more uses a token; ours."""

SCALE = 1024.0
"""The state keeps swaps and uses as multiples of 1/1024."""

FETCHED, EVICTED, CLOCK, SWAPS, USES, LAYER, ROWS = range(COUNT_BITS, COUNT_BITS + 7)
"""Rows of the state after the counters: the last swaps as two sets; then numbers in a row's first word."""

(
    HORIZON, TRAILING, AHEAD, CPU, CPU_SLOT, SAVED, GPU, GPU_SLOT, GPU_NEURON, IDLE, ALONE, MERGE, LINK,
    LINK_FIXED, SLOWED,
) = range(15)  # fmt: skip
"""What ``parameters`` holds; seconds where nothing else is said."""


@plain
def _judge(state, predicted):
    # uses a token that a swap brings: how many more of the fetched than of the evicted are predicted now; the
    # mean, less what it is uncertain by
    fetched, more = np.uint64(0), np.int64(0)
    for i in range(predicted.size):
        fetched += popcount(state[FETCHED, i])
        more += np.int64(popcount(state[FETCHED, i] & predicted[i]))
        more -= np.int64(popcount(state[EVICTED, i] & predicted[i]))
    swaps = np.float64(state[SWAPS, 0]) * DECAY + np.float64(fetched) * SCALE
    uses = np.float64(np.int64(state[USES, 0])) * DECAY + np.float64(more) * SCALE
    state[SWAPS, 0], state[USES, 0] = np.uint64(swaps), np.uint64(np.int64(uses))
    return uses / max(swaps, 1.0) - 1.0 / np.sqrt(max(swaps / SCALE, 1.0))


@plain
def _room(parameters, state, resident, predicted, window):
    # how many copies stay hidden, what each costs the CPU even so, and the seconds saved if besides all that is
    # missing comes, beyond what the hidden ones save: then there is no CPU part, no crossing and no merge
    link, saved, slots = parameters[LINK], parameters[SAVED], count(resident)
    hits, misses = count_split(predicted, resident)
    cpu = parameters[CPU] - slots * parameters[CPU_SLOT] + misses * saved
    gpu = parameters[GPU] + slots * parameters[GPU_SLOT] + hits * parameters[GPU_NEURON]
    shorter = 0.0 if parameters[TRAILING] > 0.0 else saved  # a copy makes the CPU's part shorter, if it is used
    ahead = parameters[AHEAD] > 0.0
    if ahead and state[LAYER, 0] == 0:
        return np.int64(0), link, 0.0  # nothing stands before layer 0, and what is beside it hides layer 1's copies
    if ahead:  # behind the layer before, which is taken to be as this one
        behind = parameters[IDLE] + max(cpu, gpu)
        slowed = link * parameters[SLOWED] * min(1.0, cpu / max(behind, 1e-15))
        each = link - slowed + shorter
    else:  # behind the CPU's part of the layer itself, before the GPU's
        behind, slowed = cpu - gpu, link * parameters[SLOWED]
        each = link + shorter + parameters[GPU_NEURON]
    some = np.int64(min(max((behind - parameters[LINK_FIXED]) / max(each, 1e-15), 0.0), np.float64(window)))
    if misses > min(slots - hits, window) or parameters[ALONE] < 0.0:
        return some, slowed, 0.0
    moved = min(some, misses)
    part = max(gpu + moved * parameters[GPU_NEURON], cpu - moved * saved + parameters[MERGE])
    copied, alone = parameters[LINK_FIXED] + misses * link, gpu + misses * parameters[GPU_NEURON]
    whole = max(alone, copied - parameters[ALONE]) if ahead else copied + alone
    return some, slowed, part - whole


@plain
def _uses_of_predicted(parameters, uses):
    # a prediction in time says one use; one that trails says as many in a row as past swaps let expect
    if parameters[TRAILING] == 0.0:
        return 1.0
    return max(1.0, min(uses / max(1.0 - uses, 0.01), parameters[HORIZON]))


@plain
def _gainful(parameters, state, predicted, resident, uses, cost, most, values, inside, outside):
    # how many swaps, ``most`` at most, gain more than a copy of ``cost`` seconds; leaves each neuron's worth in counts,
    # a use being ``unit`` of them: what is resident is worth more by what a copy costs
    unit = np.float64(state[CLOCK, 0]) / parameters[HORIZON]
    now = np.int64(_uses_of_predicted(parameters, uses) * unit + 0.5)
    held = np.int64(min(cost / parameters[SAVED] * unit + 0.5, 255.0))
    weigh(state, now, predicted, held, resident, values, VALUE_BITS)
    for i in range(resident.size):
        inside[i], outside[i] = resident[i], ~resident[i]
    return count_gainful(values, VALUE_BITS, most, outside, inside)


@plain
def _propose(state, values, resident, n, pool, fetch, evict):
    # the n best swaps, kept in the state to be judged, whether made or not
    if n == 0:
        for i in range(pool.size):
            state[FETCHED, i] = state[EVICTED, i] = np.uint64(0)
        return
    for i in range(pool.size):
        pool[i] = ~resident[i]
    choose(values, VALUE_BITS, n, True, pool, fetch)
    for i in range(pool.size):
        pool[i] = resident[i]
    choose(values, VALUE_BITS, n, False, pool, evict)
    for i in range(pool.size):
        state[FETCHED, i], state[EVICTED, i] = fetch[i], evict[i]


@plain
def _pays(parameters, state, predicted, n, uses, spent):
    # whether the group is worth its copies and the copy's fixed part
    now = np.int64(0)
    if parameters[TRAILING] == 0.0:
        for i in range(predicted.size):
            now += np.int64(popcount(state[FETCHED, i] & predicted[i]))
            now -= np.int64(popcount(state[EVICTED, i] & predicted[i]))
    gain = (now + n * parameters[HORIZON] * uses) * parameters[SAVED]
    return gain > spent + parameters[LINK_FIXED]


@plain
def _count_activity(state, predicted):
    increment(state, COUNT_BITS, predicted)
    state[CLOCK, 0] += np.uint64(1)
    if state[CLOCK, 0] == np.uint64(2 * TOKENS):
        state[CLOCK, 0] = np.uint64(TOKENS)
        halve(state, COUNT_BITS)


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    words = resident.size
    scratch = scratch_sets(VALUE_BITS + 2, words)
    values, inside, outside = scratch[2:], scratch[0][:words], scratch[1][:words]
    uses = _judge(state, predicted)
    some, cost, whole = _room(parameters, state, resident, predicted, window)
    n = _gainful(parameters, state, predicted, resident, uses, cost, some, values, inside, outside)
    if n == some and (parameters[AHEAD] == 0.0 or state[LAYER, 0] == 0):  # more would gain: if worth the wait
        wait = parameters[LINK]
        n = max(n, _gainful(parameters, state, predicted, resident, uses, wait, window, values, inside, outside))
    _, misses = count_split(predicted, resident)
    make_whole = whole > 0.0 and whole + misses * parameters[HORIZON] * uses * parameters[SAVED] > 0.0
    if make_whole:
        n = max(n, misses)
    _propose(state, values, resident, n, inside, fetch, evict)
    spent = min(n, some) * cost + max(n - some, 0) * parameters[LINK]
    if n > 0 and not make_whole and not _pays(parameters, state, predicted, n, uses, spent):
        n = 0
    _count_activity(state, predicted)
    return n


@dataclass(frozen=True)
class TimeSaved:
    """V = a + H f: uses now and in the next H tokens, by the neuron's frequency f; all constants are ours.

    Swaps what gains most, while one gains more CPU seconds than its copy costs and the copies stay hidden
    behind the layer before; or all that is missing, where a layer without a CPU part saves more. H is ``horizon``
    tokens where predictions come in time: what was let go can be fetched again before its next use, so that
    holding counts little. It is ``trailing`` where predictions are of the token before and only holding helps; a
    then counts as many uses in a row as past swaps let expect.
    Each swap is judged by the next token's prediction, also those that were proposed and not made; while the
    expected gain of a layer's swaps, less a standard error, is below their cost none is made.
    """

    horizon: float = 2.0
    trailing: float = 12.0
    name: ClassVar[str] = "time_saved"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = False
    step: ClassVar[object] = staticmethod(_step)

    def __post_init__(self) -> None:
        for name in ("horizon", "trailing"):
            if not 0.5 <= getattr(self, name) <= 1000:
                raise InputError(
                    f"time_saved: {name} is {getattr(self, name)}; it must be between 0.5 and 1000 tokens"
                )

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """Counters as bit planes, started from the offline frequency, and the rows named above."""
        counters = planes_of(np.rint(frequency * PRIOR_TOKENS).astype(np.int64), COUNT_BITS)
        rows = np.zeros((spec.layers, ROWS - COUNT_BITS, spec.words), np.uint64)
        rows[:, CLOCK - COUNT_BITS, 0] = PRIOR_TOKENS
        rows[:, SWAPS - COUNT_BITS, 0] = int(TRUSTED_SWAPS * SCALE)
        rows[:, USES - COUNT_BITS, 0] = int(TRUSTED_SWAPS * TRUSTED_USES * SCALE)
        rows[:, LAYER - COUNT_BITS, 0] = np.arange(spec.layers)
        return np.concatenate([counters, rows], axis=1)

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """Horizon, how predictions come, and the believed costs as what the step adds up."""
        costs = beliefs.costs
        alone = not beliefs.lag and costs.cpu_gate_seconds == 0  # else the CPU has a part in any case
        return np.array(
            [
                self.trailing if beliefs.lag else self.horizon,
                beliefs.lag,
                beliefs.lookahead,
                costs.cpu_seconds(beliefs.neurons, 0),
                costs.cpu_gate_seconds,
                max(costs.cpu_neuron_seconds, 1e-15),
                costs.gpu_fixed_seconds,
                costs.gpu_gate_seconds,
                costs.gpu_neuron_seconds,
                idle_seconds(beliefs),
                costs.attention_seconds + costs.schedule_seconds if alone else -1.0,
                costs.state_down_seconds + costs.state_up_seconds + costs.merge_seconds,
                costs.link_neuron_seconds,
                costs.prefetch_fixed_seconds,
                slowed_share(costs),
            ]
        )  # fmt: skip


def idle_seconds(beliefs: Beliefs) -> float:
    """Seconds of a layer besides the FFN in which a copy is hidden.

    Where the merge's copy waits behind the prefetch, all that comes after the CPU's part would wait with it.
    """
    costs = beliefs.costs
    if beliefs.queues:
        return costs.state_down_seconds
    others = costs.attention_seconds + costs.schedule_seconds + costs.merge_seconds
    return others + costs.state_down_seconds + costs.state_up_seconds


def slowed_share(costs: LayerCosts) -> float:
    """CPU seconds lost for each second of a copy beside it, where both ask more of the DRAM than it gives."""
    cpu_bytes, dram = costs.neuron_bytes - costs.gate_bytes, costs.dram_bytes_per_second
    if min(cpu_bytes, costs.cpu_neuron_seconds, costs.link_neuron_seconds, dram) <= 0:
        return 0.0
    cpu = cpu_bytes / costs.cpu_neuron_seconds
    link = costs.neuron_bytes / costs.link_neuron_seconds
    left = max(dram - link, dram / 2)  # max-min fair
    return max(0.0, 1.0 - left / cpu)
