"""One decoded token, simulated: the same functions in the same order as exec/decode.py, issuing ops.

Decisions depend on the trace and on believed costs, never on the clock; the engine then times the ops with the
machine's costs.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types

from dinfer.policies.protocol import STEP
from dinfer.policies.window import COSTS, cpu_seconds, gpu_seconds, window_neurons
from dinfer.policies.words import count, count_both, swap
from dinfer.sim.engine import CPU, D2H, GPU, H2D, LOAD, NONE, OPS, SCHEDULER, issue, issue_bytes, run
from dinfer.timeline import STEPS

ATTENTION, PREDICT, SCHEDULE, PREFETCH, WAIT, FFN_GPU, FFN_CPU, MERGE, HEAD = range(9)
assert STEPS == ("attention", "predict", "schedule", "prefetch", "wait", "ffn_gpu", "ffn_cpu", "merge", "head")
OPS_PER_LAYER = 9


class Rules(NamedTuple):
    """The plan's rules as integers: shape, lookahead in layers, window (-1: sized), prediction lag, switches."""

    neurons: int
    lookahead: int
    window: int
    lag: int
    exact: int
    moves: int
    clairvoyant: int
    merge_in_queue: int


class Memory(NamedTuple):
    """What a replay changes: residency uint64 [layer, words], policy state [layer, rows, words], scratch ids."""

    resident: np.ndarray
    slots: np.ndarray
    state: np.ndarray
    parameters: np.ndarray
    fetch: np.ndarray
    evict: np.ndarray
    ready: np.ndarray


class Log(NamedTuple):
    """What a replay writes: seconds at each token's end, work [token, layer, 4], decisions, step sums, spans."""

    end_seconds: np.ndarray
    work: np.ndarray
    fetch: np.ndarray
    evict: np.ndarray
    step_seconds: np.ndarray
    used: np.ndarray
    span_codes: np.ndarray
    span_seconds: np.ndarray
    span_bytes: np.ndarray


_U1, _U2, _U3 = types.uint64[::1], types.uint64[:, ::1], types.uint64[:, :, ::1]
_I4, _F8 = types.int32[::1], types.float64[::1]
RULES = types.NamedUniTuple(types.int64, len(Rules._fields), Rules)
MEMORY = types.NamedTuple((_U2, types.int64[::1], _U3, _F8, _I4, _I4, _I4), Memory)
LOG = types.NamedTuple(
    (_F8, types.int32[:, :, ::1], _I4, _I4, _F8, types.int64[::1], types.int32[:, ::1], types.float64[:, ::1], _F8),
    Log,
)


@njit
def attention(ops, costs, layer, position, before):
    """The GPU's attention; a longer context reads more KV."""
    seconds = costs.attention_seconds + position * costs.attention_token_seconds
    return issue(ops, GPU, ATTENTION, layer, seconds, before, NONE)


@njit
def schedule(ops, costs, step, rules, believed, memory, layer, predicted, future, after):
    """Step the policy for ``layer`` and swap; returns the op and the number of neurons to move."""
    predict = NONE
    if costs.predict_seconds > 0.0:
        predict = issue(ops, SCHEDULER, PREDICT, layer, costs.predict_seconds, after, NONE)
    op = issue(ops, SCHEDULER, SCHEDULE, layer, costs.schedule_seconds, after, predict)
    resident, slots = memory.resident[layer], memory.slots[layer]
    window = rules.window
    if window < 0:
        hits = count_both(predicted, resident)
        misses = count(predicted) - hits
        window = window_neurons(believed, rules.lookahead, slots, rules.neurons, hits, misses)
    n = step(memory.parameters, memory.state[layer], resident, predicted, future, window, memory.fetch, memory.evict)
    swap(resident, memory.fetch, memory.evict, n)
    return op, n


@njit
def prefetch(ops, costs, layer, n, after):
    """The host-to-device copy of ``n`` neurons; the op that its barrier waits for."""
    if n == 0:
        return after
    seconds = n * costs.prefetch_neuron_seconds
    return issue_bytes(
        ops, H2D, PREFETCH, layer, n, costs.prefetch_fixed_seconds, n * costs.neuron_bytes, seconds, after, NONE
    )


@njit
def ffn(ops, costs, rules, memory, layer, active, after_attention):
    """Both sides' parts and the merge; the GPU waits for its neurons, then for the CPU's partial sum."""
    resident, slots = memory.resident[layer], memory.slots[layer]
    on_gpu = count_both(active, resident)
    on_cpu = count(active) - on_gpu
    cold = rules.neurons - slots
    examined_gpu, examined_cpu = (slots, cold) if rules.exact else (0, 0)
    if examined_cpu + on_cpu == 0:
        seconds = gpu_seconds(costs, examined_gpu, on_gpu)
        last = issue(ops, GPU, FFN_GPU, layer, seconds, after_attention, memory.ready[layer])
        ops.neurons[last] = on_gpu
        return last, on_gpu, on_cpu
    down = issue(ops, D2H, FFN_CPU, layer, costs.state_down_seconds, after_attention, memory.ready[layer])
    seconds = cpu_seconds(costs, examined_cpu, on_cpu) - costs.cpu_fixed_seconds
    touched = examined_cpu * costs.gate_bytes + on_cpu * (costs.neuron_bytes - costs.gate_bytes)
    cpu = issue_bytes(ops, CPU, FFN_CPU, layer, on_cpu, costs.cpu_fixed_seconds, touched, seconds, down, NONE)
    if examined_gpu + on_gpu > 0:
        seconds = gpu_seconds(costs, examined_gpu, on_gpu)
        gpu = issue(ops, GPU, FFN_GPU, layer, seconds, after_attention, memory.ready[layer])
        ops.neurons[gpu] = on_gpu
    return merge(ops, costs, rules, layer, cpu), on_gpu, on_cpu


@njit
def merge(ops, costs, rules, layer, cpu):
    """Bring the CPU's partial sum over and add it; a copy queues behind the prefetches, a kernel's read does not."""
    if rules.merge_in_queue:
        up = issue(ops, H2D, MERGE, layer, costs.state_up_seconds, cpu, NONE)
        return issue(ops, GPU, MERGE, layer, costs.merge_seconds, up, NONE)
    return issue(ops, GPU, MERGE, layer, costs.state_up_seconds + costs.merge_seconds, cpu, NONE)


@njit
def head(ops, costs):
    """Final norm, output projection and sampling."""
    return issue(ops, GPU, HEAD, NONE, costs.head_seconds, NONE, NONE)


@njit
def decode_token(ops, costs, step, rules, believed, memory, log, token, position, predicted, actives, active):
    """All ops of one token: for each layer attention, schedule and prefetch ahead, FFN; then the head."""
    layers = active.shape[0]
    ops.used[0] = 0
    before = NONE
    for layer in range(layers):
        here = attention(ops, costs, layer, position, before)
        if rules.moves:
            first, last = targets(layer, rules.lookahead, layers)
            for target in range(first, last):
                future = actives[token + 1 :, target] if rules.clairvoyant else actives[:0, target]
                op, n = schedule(
                    ops, costs, step, rules, believed, memory, target, predicted[target], future, here
                )  # fmt: skip
                memory.ready[target] = prefetch(ops, costs, target, n, op)
                log_moves(log, memory, token, target, n, active[target])
        else:
            memory.ready[layer] = NONE
        before, on_gpu, on_cpu = ffn(ops, costs, rules, memory, layer, active[layer], here)
        log.work[token, layer, 0], log.work[token, layer, 1] = on_gpu, on_cpu
    head(ops, costs)


@njit
def targets(layer, lookahead, layers):
    """Layers to schedule after attention of ``layer``: the one ahead; at the first layer all up to it."""
    first = 0 if layer == 0 else layer + lookahead
    return first, min(layer + lookahead + 1, layers)


@njit
def log_moves(log, memory, token, layer, n, active):
    """Keep the ids of a decision; what was fetched in vain is counted apart."""
    used = log.used[0]
    wasted = np.int64(0)
    for j in range(n):
        log.fetch[used + j], log.evict[used + j] = memory.fetch[j], memory.evict[j]
        bit = active[memory.fetch[j] >> 6] >> np.uint64(memory.fetch[j] & 63)
        wasted += 1 - np.int64(bit & np.uint64(1))
    log.used[0] = used + n
    log.work[token, layer, 2], log.work[token, layer, 3] = n, wasted


@njit
def log_spans(ops, log, token, start):
    """Sum the steps and, where there is room, keep the spans; a GPU that stands idle waits."""
    free = start
    for i in range(ops.used[0]):
        if ops.stream[i] == GPU:
            if ops.start[i] > free:
                _span(log, token, ops.layer[i], WAIT, GPU, 0, free, ops.start[i], 0.0)
            free = ops.end[i]
        _span(
            log, token, ops.layer[i], ops.step[i], ops.stream[i], ops.neurons[i], ops.start[i], ops.end[i],
            ops.bytes[i],
        )  # fmt: skip


@njit
def _span(log, token, layer, step, stream, neurons, start, end, count_bytes):
    log.step_seconds[step] += end - start
    i = log.used[1]
    if i == log.span_bytes.size:
        return
    log.used[1] = i + 1
    codes = log.span_codes[i]
    codes[0], codes[1], codes[2], codes[3], codes[4] = token, layer, step, stream, neurons
    log.span_seconds[i, 0], log.span_seconds[i, 1] = start, end
    log.span_bytes[i] = count_bytes


@njit(
    types.int64(
        STEP, OPS, COSTS, COSTS, RULES, MEMORY, LOG, LOAD, _U3, _U3, types.boolean[::1], types.int64[::1], _F8, _I4
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def replay(step, ops, costs, believed, rules, memory, log, load, actives, predictions, first, positions, start, reset):
    """Decode every token of a trace; returns the tokens done, fewer than all when the decision log is full.

    ``actives`` and ``predictions`` [token, layer, words]; ``first`` marks the first token of each sequence, whose
    lagging prediction is empty; ``start[0]`` is the first token's start in seconds.
    """
    now = start[0]
    nothing = np.zeros((actives.shape[1], actives.shape[2]), np.uint64)
    room = log.fetch.size - memory.fetch.size * actives.shape[1]
    for token in range(reset[0], actives.shape[0]):
        if log.used[0] > room:
            start[0] = now
            return token
        predicted = nothing if rules.lag > 0 and first[token] else predictions[token - rules.lag]
        decode_token(
            ops, costs, step, rules, believed, memory, log, token, positions[token], predicted, actives,
            actives[token],
        )  # fmt: skip
        end = run(ops, now, costs.dram_bytes_per_second, load)
        log_spans(ops, log, token, now)
        now = log.end_seconds[token] = end
    start[0] = now
    return actives.shape[0]
