"""What no cache policy can pass: tokens/s under a plan, and hits of one layer with a window."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import diags, eye, hstack, kron, vstack

from dinfer import bits
from dinfer.machine import Cost, LayerCosts
from dinfer.plan import Plan
from dinfer.sim import simulate
from dinfer.trace import Trace


def speed_bound(plan: Plan, trace: Trace) -> float:
    """Tokens/s that no policy can pass, whatever it knows: the lower of the two bounds below."""
    return min(free_link_bound(plan, trace), link_bound(plan, trace))


def free_link_bound(plan: Plan, trace: Trace) -> float:
    """Tokens/s with every set known and every copy free, so that a layer hits all that it has slots for."""
    machine = plan.machine
    machine = replace(
        machine,
        h2d=replace(machine.h2d, bytes_per_second=math.inf, fixed_seconds=0.0),
        cpu=replace(machine.cpu, schedule=Cost()),
    )
    free = replace(
        plan, machine=machine, prediction="oracle", window=plan.spec.neurons, cache={"name": "belady"}
    )
    return simulate(free, trace, spans=False, decisions=False).timeline.tokens_per_second


def link_bound(plan: Plan, trace: Trace) -> float:
    """Tokens/s where the link copies F neurons, for the F that is best.

    A run lasts as long as the link copies, F x its seconds for a neuron, and as long as its layers compute:
    attention, then the slower of the GPU with the hits and the CPU with the rest. Hits are at most ``most_hits``.
    The slower side is convex in a layer's misses, so that no split of the misses over layers and tokens is faster
    than an even one. Left out, each of which can only slow a run: the DRAM that is shared, waiting, the scheduler,
    and that a fetch must come in time.
    """
    decoded = trace.phase("decode")
    active, costs = decoded.active, plan.costs
    tokens, layers = active.shape[:2]
    counts = bits.count(active)
    gaps, most = np.zeros(tokens + 1, np.int64), 0
    for layer in range(layers):
        gaps += gaps_between_uses(
            bits.unpack(np.ascontiguousarray(active[:, layer]), plan.spec.neurons),
            bits.unpack(plan.placement.resident[layer], plan.spec.neurons),
        )
        most += int(np.minimum(counts[:, layer], plan.placement.slots[layer]).sum())
    room = int(plan.placement.slots.sum()) * tokens
    cells, used = tokens * layers, int(counts.sum())
    positions = decoded.tokens["position"].to_numpy(float)
    alone = tokens * (layers * costs.attention_seconds + costs.head_seconds)
    alone += layers * costs.attention_token_seconds * float(positions.sum())

    def link_seconds(fetched: int) -> float:
        return fetched * costs.link_neuron_seconds

    def layer_seconds(fetched: int) -> float:
        misses = max(used - most_hits(gaps, room, fetched, most), 0) / cells
        return alone + cells * slower_side(plan, costs, used / cells, misses)

    low, high = 0, used  # the least F with which the link is what takes longer
    while low < high:
        fetched = (low + high) // 2
        low, high = (low, fetched) if link_seconds(fetched) >= layer_seconds(fetched) else (fetched + 1, high)
    seconds = min(max(link_seconds(f), layer_seconds(f)) for f in (max(low - 1, 0), low))
    return len(decoded) * int(trace.meta.get("batch", 1)) / seconds


def gaps_between_uses(active: np.ndarray, resident: np.ndarray) -> np.ndarray:
    """How many uses come d tokens after the neuron's use before: int64 [tokens + 1], by d.

    ``active`` bool [token, neuron]. The ``resident`` [neuron] were used just before the first token, the others
    never: their first use is in no gap.
    """
    gaps = np.zeros(len(active) + 1, np.int64)
    before = np.where(resident, -1, -len(active) - 2)
    for token, now in enumerate(active):
        lengths = token - before[now]
        gaps += np.bincount(lengths[lengths <= len(active)], minlength=len(gaps))
        before[now] = token
    return gaps


def most_hits(gaps: np.ndarray, room: int, fetched: int, most: int) -> int:
    """Hits that no policy can pass with so many fetches, for ``room`` slots x tokens; never more than ``most``.

    A hit was fetched for this use, or was kept since the use before: then it held a slot for the gap between.
    The shortest gaps are the cheapest to keep.
    """
    left, kept = room - fetched, 0
    for length in range(1, len(gaps)):
        n = min(int(gaps[length]), max(left, 0) // length)
        kept, left = kept + n, left - n * length
        if n < gaps[length]:
            break
    return min(most, kept + fetched)


def slower_side(plan: Plan, costs: LayerCosts, active: float, misses: float) -> float:
    """Seconds of an FFN at least, with ``active`` neurons on average of which the CPU computes ``misses``."""
    down, up = costs.state_down_seconds, costs.state_up_seconds
    if plan.activation == "exact":
        slots = float(plan.placement.slots.mean())
        gpu = costs.gpu_seconds(slots, active - misses)
        cpu = down + costs.cpu_seconds(plan.spec.neurons - slots, misses) + up
        return max(gpu, cpu) + costs.merge_seconds
    # a layer without misses has no CPU part, one without hits no GPU part: count the cheaper part's fixed seconds
    fixed = min(costs.gpu_fixed_seconds, down + costs.cpu_fixed_seconds + up + costs.merge_seconds)
    return fixed + max((active - misses) * costs.gpu_neuron_seconds, misses * costs.cpu_neuron_seconds)


def clairvoyant_bound(active: np.ndarray, resident: np.ndarray, windows: Sequence[int]) -> int:
    """The most hits that any policy can have in one layer, exactly; for small sizes.

    ``active`` bool [token, neuron], ``resident`` bool [neuron] at the start, at most ``windows`` [token]
    fetches a token. Slots are interchangeable, so this is a minimum-cost flow of as many units as there are
    slots: a unit stays with its neuron or passes a token's hub, which lets the window's number through. As
    such the linear programme below has a whole optimum: x[t, i] says that i is resident at t, y[t, i] that it
    was fetched for t.
    """
    tokens, neurons = active.shape
    if not len(active):
        return 0
    size = tokens * neurons
    before = diags([np.ones(size - neurons)], [-neurons], shape=(size, size)) if tokens > 1 else None
    stay = eye(size) if before is None else eye(size) - before
    start = np.zeros(size)
    start[:neurons] = resident
    of_token = kron(eye(tokens), np.ones((1, neurons)))
    found = linprog(
        -np.concatenate([active.ravel().astype(float), np.zeros(size)]),
        A_ub=vstack([hstack([stay, -eye(size)]), hstack([0 * of_token, of_token])]).tocsr(),
        b_ub=np.concatenate([start, np.asarray(windows, float)]),
        A_eq=hstack([of_token, 0 * of_token]).tocsr(),
        b_eq=np.full(tokens, float(resident.sum())),
        bounds=(0, 1),
        method="highs",
    )
    return round(-found.fun)
