"""How many neurons one prefetch may move, from the time left before its barrier."""

from numba import njit, types

from dinfer.machine import LayerCosts
from dinfer.policies.words import count, count_split

COSTS = types.NamedUniTuple(types.float64, len(LayerCosts._fields), LayerCosts)


@njit
def gpu_seconds(costs, examined, active):
    """Seconds of the GPU's part of one FFN, as LayerCosts.gpu_seconds."""
    return costs.gpu_fixed_seconds + examined * costs.gpu_gate_seconds + active * costs.gpu_neuron_seconds


@njit
def cpu_seconds(costs, examined, active):
    """Seconds of the CPU's part of one FFN, as LayerCosts.cpu_seconds."""
    return costs.cpu_fixed_seconds + examined * costs.cpu_gate_seconds + active * costs.cpu_neuron_seconds


@njit(types.int64(COSTS, types.int64, types.int64, types.int64, types.int64, types.int64), cache=True)
def window_neurons(costs, lookahead, slots, neurons, hits, misses):
    """Neurons that a prefetch should move at most, by the believed ``costs``.

    ``slots`` of the layer's ``neurons`` are resident; of the predicted ones ``hits`` are resident and ``misses``
    not. What fits into the time left (one layer's time when it looks ahead, none otherwise) is hidden; beyond it a
    longer prefetch delays the GPU and shortens the CPU's part until the two balance. The larger of both; ours.
    """
    gpu = gpu_seconds(costs, slots, hits)
    cpu = cpu_seconds(costs, neurons - slots, misses)
    left = costs.attention_seconds + max(gpu, cpu) if lookahead > 0 else 0.0
    hidden = (left - costs.prefetch_fixed_seconds) / max(costs.prefetch_neuron_seconds, 1e-15)
    balance = cpu - gpu + left - costs.prefetch_fixed_seconds
    gained = costs.prefetch_neuron_seconds + costs.cpu_neuron_seconds + costs.gpu_neuron_seconds
    return types.int64(min(max(hidden, balance / max(gained, 1e-15), 0.0), float(neurons)))


@njit(
    types.int64(COSTS, types.int64, types.uint64[::1], types.uint64[::1], types.int64), cache=True
)
def sized_window(costs, lookahead, resident, predicted, neurons):
    """``window_neurons`` of one layer's sets ``resident`` and ``predicted`` [words]."""
    hits, misses = count_split(predicted, resident)
    return window_neurons(costs, lookahead, count(resident), neurons, hits, misses)
