"""How many neurons one prefetch may move, from the time left before its barrier."""

import numpy as np
from numba import njit, types

from dinfer.machine import LayerCosts
from dinfer.policies.words import count_split

COSTS = types.NamedUniTuple(types.float64, len(LayerCosts._fields), LayerCosts)


@njit
def gpu_seconds(costs, examined, active):
    """Seconds of the GPU's part of one FFN, as LayerCosts.gpu_seconds."""
    return costs.gpu_fixed_seconds + examined * costs.gpu_gate_seconds + active * costs.gpu_neuron_seconds


@njit
def cpu_seconds(costs, examined, active):
    """Seconds of the CPU's part of one FFN, as LayerCosts.cpu_seconds."""
    return costs.cpu_fixed_seconds + examined * costs.cpu_gate_seconds + active * costs.cpu_neuron_seconds


@njit
def _most(costs, seconds, each):
    # neurons that go in ``seconds``: full copies, then a last one that is not
    copy, group = costs.prefetch_copy_seconds, max(costs.prefetch_group, 1.0)
    if copy == 0.0:
        return seconds / max(each, 1e-15)
    full = np.floor(seconds / (copy + group * each))
    rest = seconds - full * (copy + group * each) - copy
    return full * group + max(np.floor(rest / max(each, 1e-15)), 0.0)


@njit(types.int64(COSTS, types.int64, types.int64, types.int64, types.int64, types.int64), cache=True)
def window_neurons(costs, lookahead, slots, neurons, hits, misses):
    """Neurons that a prefetch should move at most, by the believed ``costs``.

    ``slots`` of the layer's ``neurons`` are resident; of the predicted ones ``hits`` are resident and ``misses``
    not. Looking ahead, a copy is hidden by a layer's time, while the link copies for every layer: a layer takes the
    longer of n p and left + max(gpu, cpu - n c), so n is where the two meet. Without lookahead the GPU waits for the
    copy, which shortens the CPU's part, until those two balance. Where one copy moves a group of neurons, n p is a step
    for each. Ours.
    """
    gpu = gpu_seconds(costs, slots, hits)
    cpu = cpu_seconds(costs, neurons - slots, misses)
    each = costs.prefetch_neuron_seconds
    if lookahead > 0:
        left = costs.attention_seconds + costs.state_down_seconds + costs.state_up_seconds + costs.merge_seconds
        left += max(gpu, cpu)
        each += costs.cpu_neuron_seconds if cpu > gpu else 0.0
    else:
        left = cpu - gpu
        each += costs.cpu_neuron_seconds + costs.gpu_neuron_seconds
    return types.int64(min(max(_most(costs, left - costs.prefetch_fixed_seconds, each), 0.0), float(neurons)))


@njit(types.int64(COSTS, types.int64, types.uint64[::1], types.uint64[::1], types.int64, types.int64), cache=True)
def sized_window(costs, lookahead, resident, predicted, slots, neurons):
    """``window_neurons`` of one layer's sets ``resident`` (``slots`` members) and ``predicted`` [words]."""
    hits, misses = count_split(predicted, resident)
    return window_neurons(costs, lookahead, slots, neurons, hits, misses)
