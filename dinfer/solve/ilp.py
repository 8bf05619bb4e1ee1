"""ilp: each layer's number of slots as an integer program, solved by CBC and checked afterwards.

A layer's neurons are sorted by frequency and cut into groups, so that a placement is one number a
layer: how many groups are resident. One binary w[l, k] stands for each: layer l has its k hottest
groups on the GPU. That is a multiple-choice knapsack: one of them a layer, the budget over all.
PowerInfer's x and y (Eq 3, 7, 8) are in it: x of group j is the sum of w over k above j, and y is
1 - w[l, 0]. What concerns one layer only (the minimum of Eq 4, the window) takes columns out
instead of adding rows, and any function of a layer's slots is linear in w, so that the latency's
maximum needs no further variable. The relaxation is the concave hull of each layer's values.
"""

import heapq
import math
import warnings
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import pulp

from dinfer.errors import InputError, PlanWarning
from dinfer.machine import LayerCosts
from dinfer.solve.greedy import group_counts, served_frequency

OBJECTIVES = ("frequency", "latency")
_TOLERANCE = 1e-6
_STATUS = {
    pulp.LpSolutionOptimal: "optimal",
    pulp.LpSolutionIntegerFeasible: "feasible",  # PuLP's status says Optimal here too
    pulp.LpSolutionInfeasible: "infeasible",
}


class Solution(NamedTuple):
    """A placement's size by layer and what is known of it.

    ``slots`` int64 [layer]. ``objective``: expected active neurons on the GPU per token, or the
    expected FFN seconds of a token; ``bound`` is what no placement passes (the LP relaxation's)
    and ``gap`` their difference as a share of the bound. ``status``: ``optimal`` (proven by the
    solver), ``feasible`` (it stopped before), ``heuristic``. ``solver`` is who found the slots.
    """

    slots: np.ndarray
    objective: float
    bound: float
    gap: float
    status: str
    solver: str


class _Constraints(NamedTuple):
    frequency: np.ndarray
    capacity: int
    minimum: np.ndarray
    window: float | None


class _Columns(NamedTuple):
    # the choices: counts [k] neurons, value [layer, k] to be maximised, allowed [layer, k]
    counts: np.ndarray
    value: np.ndarray
    allowed: np.ndarray


def ilp(
    frequency: np.ndarray,
    capacity: int,
    costs: LayerCosts,
    *,
    group: int = 64,
    objective: str = "frequency",
    min_slots: np.ndarray | int | None = None,
    window: float | None = None,
    time_limit: float = 30.0,
) -> Solution:
    """The best slots of each layer for ``capacity`` neurons, by CBC.

    ``frequency`` [layer, neuron]. ``objective``: ``frequency`` maximises the sum of frequencies
    on the GPU (PowerInfer Eq 2), ``latency`` minimises the sum over layers of ``layer_seconds``.
    A layer has no slots or at least ``min_slots`` (one number or [layer]); None takes
    ``minimum_slots`` for ``frequency`` and no minimum for ``latency``, which counts the sync
    itself. ``window`` (ours): the expected fetches of a token in a layer, its active neurons that
    are not resident, stay within this many neurons. ``time_limit`` is in seconds.

    The answer is certified: each constraint is checked again on the frequencies, and CBC's
    solution status is read. Where that fails, or CBC stopped with less than greedy has, the
    answer is greedy's over the same choices, with a PlanWarning. Raises InputError when no
    placement keeps the window, with the smallest that one keeps.
    """
    _check(frequency, capacity, group, objective, time_limit)
    if min_slots is None:
        min_slots = minimum_slots(frequency, costs) if objective == "frequency" else 0
    minimum = np.broadcast_to(np.asarray(min_slots), (len(frequency),))
    constraints = _Constraints(frequency, capacity, minimum, window)
    columns = _columns(constraints, costs, group, objective)
    if window is not None and _least(columns) > capacity:
        raise InputError(_window_too_small(columns, constraints))

    chosen, status, bound = _solve(columns, capacity, time_limit)
    fallback = _greedy(columns, capacity)
    solver, trouble = "ilp", _trouble(chosen, status, bound, columns, constraints)
    if not trouble and status == "feasible" and _value(columns, fallback) > _value(columns, chosen):
        trouble = f"CBC stopped after {time_limit:g} s with less than greedy finds"
    if trouble:
        warnings.warn(f"ilp: {trouble}; greedy's slots are taken", PlanWarning, stacklevel=2)
        chosen, status, solver = fallback, "heuristic", "greedy"
    reached, sign = _value(columns, chosen), 1 if objective == "frequency" else -1
    bound = max(bound, reached)  # a fallback's own value, should CBC's bound be wrong
    gap = (bound - reached) / abs(bound) if bound else 0.0
    return Solution(columns.counts[chosen], sign * reached, sign * bound, gap, status, solver)


def minimum_slots(frequency: np.ndarray, costs: LayerCosts) -> np.ndarray:
    """The fewest slots of each layer that pay for the sync: int64 [layer], neurons + 1 for never.

    PowerInfer Eq 4, C * t_gpu + t_sync <= C * t_cpu, with our costs, in which only examined and
    active neurons take time: the C hottest neurons examine C and run a(C) of them, the sum of
    their frequencies, so that C * t becomes C * gate + a(C) * neuron on each side. The GPU's own
    fixed seconds count too. A whole layer on the GPU needs no CPU and no sync.
    """
    neurons = frequency.shape[1]
    slots = np.arange(1, neurons + 1)
    active = served_frequency(frequency, slots)
    gpu, cpu = _gpu_seconds(costs, slots, active), _cpu_seconds(costs, slots, active)
    sync = sync_seconds(costs)
    pays = gpu + sync <= cpu - costs.cpu_fixed_seconds  # the CPU still starts, for the others
    pays[:, -1] |= gpu[:, -1] <= cpu[:, -1] + sync
    return np.where(pays.any(axis=1), pays.argmax(axis=1) + 1, neurons + 1)


def sync_seconds(costs: LayerCosts) -> float:
    """t_sync of a layer: its state to the host, the partial sum back, the merge."""
    return costs.state_down_seconds + costs.state_up_seconds + costs.merge_seconds


def layer_seconds(
    slots: np.ndarray,
    active_gpu: np.ndarray,
    active_cpu: np.ndarray,
    neurons: int,
    costs: LayerCosts,
) -> np.ndarray:
    """Seconds of one layer's FFN, max(gpu, cpu + sync), for arrays of one shape.

    ``slots`` of ``neurons`` are resident; ``active_gpu`` and ``active_cpu`` are computed on each
    side. A side with nothing to examine and nothing active takes no time, and without the CPU's
    part there is no sync.
    """
    examined = 1 if costs.gate_bytes else 0
    gpu = _gpu_seconds(costs, slots, active_gpu)
    cpu = _cpu_seconds(costs, neurons - slots, active_cpu) + sync_seconds(costs)
    gpu_works = examined * slots + active_gpu > 0
    cpu_works = examined * (neurons - slots) + active_cpu > 0
    return np.maximum(np.where(gpu_works, gpu, 0.0), np.where(cpu_works, cpu, 0.0))


def _gpu_seconds(costs: LayerCosts, examined: np.ndarray, active: np.ndarray) -> np.ndarray:
    fixed, gate, neuron = costs.gpu_fixed_seconds, costs.gpu_gate_seconds, costs.gpu_neuron_seconds
    return fixed + examined * gate + active * neuron


def _cpu_seconds(costs: LayerCosts, examined: np.ndarray, active: np.ndarray) -> np.ndarray:
    fixed, gate, neuron = costs.cpu_fixed_seconds, costs.cpu_gate_seconds, costs.cpu_neuron_seconds
    return fixed + examined * gate + active * neuron


def _check(
    frequency: np.ndarray, capacity: int, group: int, objective: str, time_limit: float
) -> None:
    if frequency.ndim != 2 or not frequency.size:
        raise InputError(f"frequency has shape {frequency.shape}; it must be [layer, neuron]")
    if capacity < 0 or group < 1 or time_limit <= 0:
        raise InputError(
            f"ilp: capacity {capacity} must be 0 or more, group {group} at least 1 and time_limit "
            f"{time_limit:g} s above 0"
        )
    if objective not in OBJECTIVES:
        raise InputError(f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}")


def _columns(
    constraints: _Constraints, costs: LayerCosts, group: int, objective: str
) -> _Columns:
    frequency, _, minimum, window = constraints
    neurons = frequency.shape[1]
    counts = group_counts(neurons, group)
    served = served_frequency(frequency, counts)
    rest = served[:, -1:] - served
    value = served
    if objective == "latency":
        value = -layer_seconds(np.broadcast_to(counts, served.shape), served, rest, neurons, costs)
    allowed = (counts == 0) | (counts >= minimum[:, None])
    if window is not None:
        allowed &= rest <= window
    return _Columns(counts, value, allowed)


def _least(columns: _Columns) -> float:
    # neurons that the smallest allowed choice of each layer takes, infinite when a layer has none
    if not columns.allowed.any(axis=1).all():
        return math.inf
    return int(columns.counts[columns.allowed.argmax(axis=1)].sum())


def _window_too_small(columns: _Columns, constraints: _Constraints) -> str:
    frequency, capacity, minimum, window = constraints
    served = served_frequency(frequency, columns.counts)
    rest = served[:, -1:] - served
    enough = (columns.counts == 0) | (columns.counts >= minimum[:, None])

    def fits(wider: int) -> bool:
        return _least(columns._replace(allowed=enough & (rest <= wider))) <= capacity

    smallest = bisect_left(range(frequency.shape[1] + 1), True, key=fits)
    return (
        f"no placement of {capacity} neurons keeps the expected fetches of a token within "
        f"{window:g} neurons in every layer; the smallest window that one keeps is {smallest}, or "
        "raise --vram"
    )


def _solve(
    columns: _Columns, capacity: int, time_limit: float
) -> tuple[np.ndarray, str, float]:
    # each layer's column (empty: no solution), what CBC says of it, the LP relaxation's bound
    scale = 1e4 / max(np.abs(columns.value).max(), 1e-300)  # seconds lie below CBC's tolerances
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3.3 announces PuLP 4
        problem, choices = _model(columns, capacity, scale)
        status = _run(problem, time_limit, mip=True)
        chosen = _read(choices) if status in ("optimal", "feasible") else np.array([], int)
        relaxed = _run(problem, time_limit, mip=False) == "optimal"
        bound = np.where(columns.allowed, columns.value, -np.inf).max(axis=1).sum()
        if relaxed:
            bound = min(bound, pulp.value(problem.objective) / scale)
    return chosen, status, float(bound)


def _model(
    columns: _Columns, capacity: int, scale: float
) -> tuple[pulp.LpProblem, list[dict[int, pulp.LpVariable]]]:
    problem = pulp.LpProblem("slots", pulp.LpMaximize)
    choices = [
        {int(k): pulp.LpVariable(f"w_{layer}_{k}", cat=pulp.LpBinary) for k in np.flatnonzero(row)}
        for layer, row in enumerate(columns.allowed)
    ]
    unit = int(np.gcd.reduce(columns.counts))  # all sizes are multiples: a tighter budget
    value, sizes = columns.value * scale, columns.counts // unit
    each = [(layer, k, w) for layer, row in enumerate(choices) for k, w in row.items()]
    problem += pulp.LpAffineExpression([(w, float(value[layer, k])) for layer, k, w in each])
    for row in choices:
        problem += pulp.LpAffineExpression([(w, 1) for w in row.values()]) == 1
    used = pulp.LpAffineExpression([(w, int(sizes[k])) for _, k, w in each if sizes[k]])
    problem += used <= capacity // unit
    return problem, choices


def _run(problem: pulp.LpProblem, time_limit: float, mip: bool) -> str:
    try:
        problem.solve(pulp.PULP_CBC_CMD(msg=False, mip=mip, timeLimit=time_limit))
    except pulp.PulpSolverError as error:
        return f"unusable ({error})"
    return _STATUS.get(problem.sol_status, "stopped without a solution")


def _read(choices: list[dict[int, pulp.LpVariable]]) -> np.ndarray:
    picked = [[k for k, w in row.items() if (w.value() or 0) > 0.5] for row in choices]
    return np.array([k for row in picked for k in row if len(row) == 1], int)


def _trouble(
    chosen: np.ndarray,
    status: str,
    bound: float,
    columns: _Columns,
    constraints: _Constraints,
) -> str:
    # why CBC gave no answer or one that cannot be; empty when the answer is certified
    if len(chosen) != len(columns.value):
        return f"CBC has no solution ({status})"
    if broken := _broken(columns.counts[chosen], constraints):
        return broken
    if _value(columns, chosen) > bound + _TOLERANCE * abs(bound):
        return "CBC's bound is below its own solution"
    return ""


def _broken(slots: np.ndarray, constraints: _Constraints) -> str:
    # the constraint that slots break, empty when none; from the frequencies, not from the columns
    frequency, capacity, minimum, window = constraints
    hottest = -np.sort(-frequency.astype(np.float64), axis=1)
    cold = np.where(np.arange(frequency.shape[1]) >= slots[:, None], hottest, 0.0).sum(axis=1)
    if slots.sum() > capacity:
        return f"CBC places {slots.sum()} neurons where {capacity} fit"
    if ((slots > 0) & (slots < minimum)).any():
        return "CBC gives a layer fewer slots than its minimum"
    if window is not None and (cold > window + _TOLERANCE).any():
        return f"CBC leaves {cold.max():.1f} expected fetches in a layer, the window is {window:g}"
    return ""


def _value(columns: _Columns, chosen: np.ndarray) -> float:
    return float(columns.value[np.arange(len(chosen)), chosen].sum())


def _greedy(columns: _Columns, capacity: int) -> np.ndarray:
    # from each layer's smallest allowed choice on, the step that gains most for its neurons
    chosen = columns.allowed.argmax(axis=1)
    left = capacity - int(columns.counts[chosen].sum())
    steps = [step for layer in range(len(chosen)) if (step := _step(columns, layer, chosen, left))]
    heapq.heapify(steps)
    while steps:
        _, layer, k = heapq.heappop(steps)
        size = int(columns.counts[k] - columns.counts[chosen[layer]])
        if size <= left:
            chosen[layer] = k
            left -= size
        if step := _step(columns, layer, chosen, left):
            heapq.heappush(steps, step)
    return chosen


def _step(
    columns: _Columns, layer: int, chosen: np.ndarray, left: int
) -> tuple[float, int, int] | None:
    # the best next step of a layer that fits: minus its gain per neuron, the layer, the choice
    current = chosen[layer]
    size = columns.counts - columns.counts[current]
    fits = columns.allowed[layer] & (size > 0) & (size <= left)
    if not fits.any():
        return None
    gain = (columns.value[layer] - columns.value[layer, current]) / np.maximum(size, 1)
    k = int(np.where(fits, gain, -np.inf).argmax())
    return (-float(gain[k]), layer, k) if gain[k] > 0 else None
