"""greedy: the neurons that are most often active for their bytes, over all layers at once."""

import numpy as np

from dinfer.errors import InputError


def greedy(
    frequency: np.ndarray,
    capacity: int,
    neuron_bytes: np.ndarray | int | None = None,
    group: int = 1,
) -> np.ndarray:
    """Slots of each layer, int64 [layer], filled by frequency per byte until ``capacity`` is full.

    ``frequency`` is [layer, neuron]; the hottest of a layer come first, in groups of ``group``
    (the last may be smaller). ``capacity`` is in neurons, or in bytes when ``neuron_bytes`` gives
    a neuron's bytes, one for all layers or [layer]. Among equals the lower layer comes first.

    With neurons of one size and ``group`` 1 the sum of served frequencies is the largest that any
    choice of ``capacity`` neurons has (each of the chosen is at least as frequent as each of the
    others); with other sizes it misses the optimum by less than one group. Raises InputError for
    a negative capacity or a group below 1.
    """
    if capacity < 0 or group < 1:
        raise InputError(f"capacity {capacity} must be 0 or more and group {group} at least 1")
    layers, neurons = frequency.shape
    counts = group_counts(neurons, group)
    each = np.broadcast_to(np.asarray(1 if neuron_bytes is None else neuron_bytes), (layers,))
    sizes = np.diff(counts) * each[:, None].astype(np.int64)
    hottest = -np.sort(-frequency.astype(np.float64), axis=1)
    gains = np.add.reduceat(hottest, counts[:-1], axis=1)
    density = np.minimum.accumulate(gains / sizes, axis=1)  # rounding must not break the order
    order = np.argsort(-density, axis=None, kind="stable")
    taken = _take_in_order(sizes.ravel()[order], order // sizes.shape[1], capacity)
    groups = np.bincount(order[taken] // sizes.shape[1], minlength=layers)
    return counts[groups]


def group_counts(neurons: int, group: int) -> np.ndarray:
    """Neurons in the first 0, 1, 2, ... groups of a layer: int64 [groups + 1]."""
    return np.append(np.arange(0, neurons, group, dtype=np.int64), neurons)


def served_frequency(frequency: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Expected active neurons among the ``counts`` hottest of each layer: [layer, counts]."""
    ordered = -np.sort(-frequency.astype(np.float64), axis=1)
    sums = np.concatenate([np.zeros((len(ordered), 1)), np.cumsum(ordered, axis=1)], axis=1)
    return sums[:, counts]


def _take_in_order(sizes: np.ndarray, layers: np.ndarray, capacity: int) -> np.ndarray:
    # what fits in the given order; after a group that does not, none of its layer
    taken = np.cumsum(sizes) <= capacity
    left = capacity - int(sizes[taken].sum())
    closed: set[int] = set()
    smallest = sizes.min(initial=capacity + 1)
    for i in range(int(taken.sum()), len(sizes)):
        if left < smallest:
            break
        if sizes[i] > left:
            closed.add(int(layers[i]))
        elif int(layers[i]) not in closed:
            taken[i] = True
            left -= int(sizes[i])
    return taken
