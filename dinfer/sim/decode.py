"""One decoded token, simulated: the same functions in the same order as exec/decode.py, issuing ops.

Decisions depend on the trace and on believed costs, never on the clock; the engine then times the ops with the
machine's costs.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types

from dinfer.policies.balanced import LOST, RECOVERED, added_neurons, balance, dropped_neurons, unread_neurons
from dinfer.policies.protocol import STEP
from dinfer.policies.window import COSTS, cpu_seconds, gpu_seconds, sized_window
from dinfer.policies.words import count_split, inlined, popcount, swap, write_ids
from dinfer.sim.engine import CPU, D2H, GPU, H2D, LOAD, NONE, OPS, SCHEDULER, issue, issue_bytes, run
from dinfer.timeline import STEPS

ATTENTION, PREDICT, SCHEDULE, PREFETCH, WAIT, FFN_GPU, FFN_CPU, MERGE, HEAD = range(9)
assert STEPS == ("attention", "predict", "schedule", "prefetch", "wait", "ffn_gpu", "ffn_cpu", "merge", "head")
OPS_PER_LAYER = 10


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
    scheduler_thread: int


class Memory(NamedTuple):
    """What a replay changes: residency uint64 [layer, words], policy state [layer, rows, words], barriers.

    The CPU's part waits for ``stepped`` (its neurons are known), the GPU's for ``ready`` (its neurons are there).
    ``fetch`` and ``evict`` [words] are the last decision's sets.
    ``thresholds`` float64 [layer, 5, levels]: tables of policies.balanced, without levels where they are fixed;
    ``expected`` int64 [layer, 4]: a mean token's counts, by which exact activation chooses its levels.
    ``held`` bool [layer]: resident as nothing predicts them ahead, so computed whole and never scheduled.
    """

    resident: np.ndarray
    slots: np.ndarray
    state: np.ndarray
    parameters: np.ndarray
    stepped: np.ndarray
    ready: np.ndarray
    nothing: np.ndarray
    fetch: np.ndarray
    evict: np.ndarray
    thresholds: np.ndarray
    expected: np.ndarray
    held: np.ndarray


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
MEMORY = types.NamedTuple(
    (
        _U2, types.int64[::1], _U3, _F8, _I4, _I4, _U2, _U1, _U1, types.float64[:, :, ::1], types.int64[:, ::1],
        types.boolean[::1],
    ),
    Memory,
)  # fmt: skip
LOG = types.NamedTuple(
    (_F8, types.int32[:, :, ::1], _I4, _I4, _F8, types.int64[::1], types.int32[:, ::1], types.float64[:, ::1], _F8),
    Log,
)


@inlined
def attention(ops, costs, layer, position, before):
    """The GPU's attention; a longer context reads more KV."""
    seconds = costs.attention_seconds + position * costs.attention_token_seconds
    return issue(ops, GPU, ATTENTION, layer, seconds, before, NONE)


@inlined
def schedule(ops, costs, step, rules, believed, memory, log, layer, predicted, future, after):
    """Step the policy for ``layer`` and swap; returns the op and the number of neurons to move."""
    predict = NONE
    if costs.predict_seconds > 0.0:
        predict = issue(ops, SCHEDULER, PREDICT, layer, costs.predict_seconds, after, NONE)
    op = issue(ops, SCHEDULER, SCHEDULE, layer, costs.schedule_seconds, after, predict)
    resident, window = memory.resident[layer], rules.window
    if window < 0:
        window = sized_window(believed, rules.lookahead, resident, predicted, memory.slots[layer], rules.neurons)
    fetch, evict = memory.fetch, memory.evict
    n = step(memory.parameters, memory.state[layer], resident, predicted, future, window, fetch, evict)
    if n > 0:
        swap(resident, fetch, evict)
    return op, n


@inlined
def prefetch(ops, costs, layer, n, after):
    """The host-to-device copies of ``n`` neurons; the op that its barrier waits for."""
    if n == 0:
        return after
    copies = np.ceil(n / max(costs.prefetch_group, 1.0))
    seconds = copies * costs.prefetch_copy_seconds + n * costs.prefetch_neuron_seconds
    return issue_bytes(
        ops, H2D, PREFETCH, layer, n, costs.prefetch_fixed_seconds, n * costs.neuron_bytes, seconds, after, NONE
    )


@inlined
def balanced(believed, rules, memory, layer, computed):
    """Neurons that the GPU adds and the CPU drops by the thresholds, how many of each are active (expected), and how
    many fewer the CPU examines.

    Activation that computes its gates learns a token's counts when it has computed them: a mean token's decide.
    """
    table, mean = memory.thresholds[layer], memory.expected[layer]
    hits, misses = count_split(computed, memory.resident[layer])
    spare, cold = memory.slots[layer] - hits, rules.neurons - memory.slots[layer]
    if rules.exact:
        low, high = balance(table, believed, mean[0], mean[1], mean[2], mean[3])
        unread = unread_neurons(table, high, cold)
        return added_neurons(table, low, spare), dropped_neurons(table, high, misses), np.int64(0), np.int64(0), unread
    low, high = balance(table, believed, hits, spare, misses, cold)
    found, lost = np.rint(table[RECOVERED, low] * spare), np.rint(table[LOST, high] * misses)
    added, dropped = added_neurons(table, low, spare), dropped_neurons(table, high, misses)
    return added, dropped, np.int64(found), np.int64(lost), np.int64(0)


@inlined
def ffn(ops, costs, rules, memory, layer, computed, added, dropped, unread, copied, after):
    """Both sides' parts and the merge; the GPU waits for its neurons, then for the CPU's partial sum.

    Meanwhile ``copied`` neurons are on their way: an emulated link takes its core from the CPU's part and the GPU's.
    """
    resident, slots = memory.resident[layer], memory.slots[layer]
    on_gpu, on_cpu = count_split(computed, resident)
    on_gpu, on_cpu = on_gpu + added, on_cpu - dropped
    cold = rules.neurons - slots
    examined_gpu, examined_cpu = (slots, cold - unread) if rules.exact else (0, 0)
    handed, slowed = costs.state_down_seconds, 0.0
    if copied > 0:
        handed += costs.delay_fixed_seconds + copied * costs.delay_neuron_seconds
        slowed = costs.gpu_delay_fixed_seconds + copied * costs.gpu_delay_neuron_seconds
    if examined_cpu + on_cpu == 0:
        return ffn_gpu(ops, costs, layer, examined_gpu, on_gpu, slowed, after, memory.ready[layer]), on_gpu, on_cpu
    down = issue(ops, D2H, FFN_CPU, layer, handed, after, memory.stepped[layer])
    seconds = cpu_seconds(costs, examined_cpu, on_cpu) - costs.cpu_fixed_seconds
    touched = examined_cpu * costs.gate_bytes + on_cpu * (costs.neuron_bytes - costs.gate_bytes)
    cpu = issue_bytes(ops, CPU, FFN_CPU, layer, on_cpu, costs.cpu_fixed_seconds, touched, seconds, down, NONE)
    if examined_gpu + on_gpu > 0:
        ffn_gpu(ops, costs, layer, examined_gpu, on_gpu, costs.hand_seconds + slowed, after, memory.ready[layer])
    return merge(ops, costs, rules, layer, cpu), on_gpu, on_cpu


@inlined
def ffn_gpu(ops, costs, layer, examined, active, more, first, second):
    """The GPU's part and what it takes ``more``; only an emulated GPU reads its neurons through the host's DRAM."""
    seconds = more + gpu_seconds(costs, examined, active)
    if costs.gpu_dram_bytes > 0.0:
        touched = max(examined, active) * costs.gpu_dram_bytes
        fixed = more + costs.gpu_fixed_seconds
        return issue_bytes(ops, GPU, FFN_GPU, layer, active, fixed, touched, seconds - fixed, first, second)
    op = issue(ops, GPU, FFN_GPU, layer, seconds, first, second)
    ops.neurons[op] = active
    return op


@inlined
def merge(ops, costs, rules, layer, cpu):
    """Bring the CPU's partial sum over and add it; a copy queues behind the prefetches, a kernel's read does not."""
    if costs.wake_seconds > 0.0:
        cpu = issue(ops, D2H, WAIT, layer, costs.wake_seconds, cpu, NONE)
    if rules.merge_in_queue:
        up = issue(ops, H2D, MERGE, layer, costs.state_up_seconds, cpu, NONE)
        return issue(ops, GPU, MERGE, layer, costs.merge_seconds, up, NONE)
    return issue(ops, GPU, MERGE, layer, costs.state_up_seconds + costs.merge_seconds, cpu, NONE)


@inlined
def head(ops, costs):
    """Final norm, output projection and sampling."""
    return issue(ops, GPU, HEAD, NONE, costs.head_seconds, NONE, NONE)


@inlined
def decode_token(ops, costs, step, rules, believed, memory, log, token, position, predicted, actives, active):
    """All ops of one token: for each layer attention, schedule and prefetch ahead, FFN; then the head."""
    layers = active.shape[0]
    ops.used[0] = 0
    before = NONE
    for layer in range(layers):
        here = attention(ops, costs, layer, position, before)
        copied = np.int64(0)
        if rules.moves:
            first, last = targets(layer, rules.lookahead, layers)
            for target in range(first, last):
                if memory.held[target]:
                    memory.stepped[target] = memory.ready[target] = NONE
                    continue
                future = actives[token + 1 :, target] if rules.clairvoyant else actives[:0, target]
                stepped, n = schedule(
                    ops, costs, step, rules, believed, memory, log, target, predicted[target], future, here
                )  # fmt: skip
                memory.stepped[target] = stepped
                memory.ready[target] = prefetch(ops, costs, target, n, stepped)
                if not rules.scheduler_thread:  # the decoding thread steps itself
                    here = stepped
                log_moves(log, memory, token, target, n, active[target])
                copied += n
        else:
            memory.stepped[layer] = memory.ready[layer] = NONE
        computed = active[layer] if rules.exact else predicted[layer]
        if memory.held[layer] and not rules.exact:
            computed = memory.resident[layer]
        added, dropped, found, lost, unread = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        if memory.thresholds.shape[2] > 0:
            added, dropped, found, lost, unread = balanced(believed, rules, memory, layer, computed)
        before, on_gpu, on_cpu = ffn(
            ops, costs, rules, memory, layer, computed, added, dropped, unread, copied, here
        )  # fmt: skip
        if not rules.exact:  # of what was computed
            on_gpu, on_cpu = count_active(active[layer], computed, memory.resident[layer])
            on_gpu, on_cpu = on_gpu + found, max(on_cpu - lost, 0)
        log.work[token, layer, 0], log.work[token, layer, 1] = on_gpu, on_cpu
    head(ops, costs)


@inlined
def targets(layer, lookahead, layers):
    """Layers to schedule after attention of ``layer``: the one ahead; at the first layer all up to it."""
    first = 0 if layer == 0 else layer + lookahead
    return first, min(layer + lookahead + 1, layers)


@inlined
def count_active(active, computed, resident):
    """How many of the ``computed`` neurons turn out active, resident and not."""
    on_gpu, on_cpu = np.uint64(0), np.uint64(0)
    for i in range(active.size):
        on_gpu += popcount(active[i] & computed[i] & resident[i])
        on_cpu += popcount(active[i] & computed[i] & ~resident[i])
    return np.int64(on_gpu), np.int64(on_cpu)


@inlined
def log_moves(log, memory, token, layer, n, active):
    """Count the neurons of a decision, those in vain apart, and keep their ids where there is room for any."""
    if n == 0:
        return
    if log.fetch.size > 0:
        used = log.used[0]
        log.used[0] = used + n
        write_ids(memory.fetch, n, log.fetch[used:])
        write_ids(memory.evict, n, log.evict[used:])
    log.work[token, layer, 2] = n
    log.work[token, layer, 3] = count_split(memory.fetch, active)[1]


@inlined
def log_spans(ops, log, token, start):
    """Sum the steps and, where there is room, keep the spans; a GPU that stands idle waits."""
    free, keep = start, log.span_bytes.size > 0
    for i in range(ops.used[0]):
        if ops.step[i] == WAIT:
            continue  # waking up: the GPU's waiting has it
        since, until = ops.start[i], ops.end[i]
        log.step_seconds[ops.step[i]] += until - since
        if ops.stream[i] == GPU:
            log.step_seconds[WAIT] += since - free
            if keep and since > free:
                _span(log, token, ops.layer[i], WAIT, GPU, 0, free, since, 0.0)
            free = until
        if keep:
            _span(log, token, ops.layer[i], ops.step[i], ops.stream[i], ops.neurons[i], since, until, ops.bytes[i])


@inlined
def _span(log, token, layer, step, stream, neurons, start, end, count_bytes):
    i = log.used[1]
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
    _nrt=False,
)  # fmt: skip
def replay(step, ops, costs, believed, rules, memory, log, load, actives, predictions, first, positions, start, reset):
    """Decode the tokens of a trace; returns how far it came, short of the end when the decision log is full.

    ``actives`` and ``predictions`` [token, layer, words]; ``first`` marks the first token of each sequence, whose
    lagging prediction is empty; ``start[0]`` is the first token's start in seconds, ``reset`` the first token and the
    one to stop before.
    """
    now = start[0]
    room = log.fetch.size - 64 * actives.shape[1] * actives.shape[2] if log.fetch.size > 0 else np.int64(0)
    for token in range(reset[0], reset[1]):
        if log.used[0] > room:
            start[0] = now
            return token
        predicted = memory.nothing if rules.lag > 0 and first[token] else predictions[token - rules.lag]
        decode_token(
            ops, costs, step, rules, believed, memory, log, token, positions[token], predicted, actives,
            actives[token],
        )  # fmt: skip
        end = run(ops, now, costs.dram_bytes_per_second, load)
        log_spans(ops, log, token, now)
        now = log.end_seconds[token] = end
    start[0] = now
    return reset[1]
