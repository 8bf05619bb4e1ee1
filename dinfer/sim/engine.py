"""The event engine: in-order streams, ops that wait for others, and one DRAM that the streams share.

An op first takes its fixed ``seconds``, then moves its ``bytes`` through host DRAM at a rate of at most ``rate``.
Ops that move bytes at the same time (flows) share ``dram_bytes_per_second`` max-min fairly, re-evaluated at each
start and end. The speed of a stream may change at given times (other load on the machine).

Flows alone need a clock. All other ends follow at once from what an op waits for; when nothing more follows, every
op that is left waits for a flow, so no new flow can begin before the next one ends: move them all up to there.
Compiled.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types

from dinfer.policies.words import inlined
from dinfer.timeline import STREAMS

GPU, CPU, H2D, D2H, SCHEDULER = range(5)
assert STREAMS == ("gpu", "cpu", "h2d", "d2h", "scheduler")
NONE = -1


class Ops(NamedTuple):
    """A task graph in issue order; arrays of equal length, the first ``used[0]`` entries are in use.

    ``stream``: where it runs, in issue order. ``step``: code in timeline.STEPS. ``seconds`` fixed part, ``bytes``
    moved through DRAM at most at ``rate`` bytes/s. ``first``, ``second``: ops it waits for (NONE: nothing).
    ``start``, ``end``: seconds, written by ``run``.
    """

    used: np.ndarray
    stream: np.ndarray
    step: np.ndarray
    layer: np.ndarray
    neurons: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    rate: np.ndarray
    first: np.ndarray
    second: np.ndarray
    start: np.ndarray
    end: np.ndarray


def empty_ops(capacity: int) -> Ops:
    """Room for ``capacity`` ops."""
    ints, floats = np.zeros((5, capacity), np.int32), np.zeros((5, capacity))
    codes = np.zeros((2, capacity), np.int8)
    return Ops(
        np.zeros(1, np.int64), codes[0], codes[1], ints[0], ints[1], floats[0], floats[1], floats[2], ints[2], ints[3],
        floats[3], floats[4],
    )  # fmt: skip


class Load(NamedTuple):
    """Other load on the machine: from ``seconds[i]`` on, stream ``s`` runs at ``speed[i, s]`` of its own pace.

    ``seconds`` float64 [changes], ascending; ``speed`` float64 [changes, 5]. Before the first change the pace is 1.
    """

    seconds: np.ndarray
    speed: np.ndarray


NO_LOAD = Load(np.zeros(0), np.zeros((0, 5)))

_I8, _I4, _F8 = types.int64[::1], types.int32[::1], types.float64[::1]
OPS = types.NamedTuple((_I8, types.int8[::1], types.int8[::1], _I4, _I4, _F8, _F8, _F8, _I4, _I4, _F8, _F8), Ops)
LOAD = types.NamedTuple((_F8, types.float64[:, ::1]), Load)


@inlined
def issue(ops, stream, step, layer, seconds, first, second):
    """Append an op that moves nothing through DRAM; returns its index."""
    i = ops.used[0]
    ops.used[0] = i + 1
    ops.stream[i], ops.step[i], ops.layer[i], ops.neurons[i] = stream, step, layer, 0
    ops.seconds[i], ops.bytes[i], ops.rate[i] = seconds, 0.0, 1.0
    ops.first[i], ops.second[i] = first, second
    return i


@inlined
def issue_bytes(ops, stream, step, layer, neurons, seconds, count_bytes, bytes_seconds, first, second):
    """Append an op that moves ``count_bytes`` in ``bytes_seconds`` when it has the DRAM to itself."""
    i = issue(ops, stream, step, layer, seconds, first, second)
    ops.neurons[i] = neurons
    if bytes_seconds > 0.0 and count_bytes > 0.0:
        ops.bytes[i] = count_bytes
        ops.rate[i] = count_bytes / bytes_seconds
    return i


@njit(error_model="numpy")
def _done(start, seconds, stream, load, change):
    # the end of ``seconds`` of work begun at ``start``; ``change`` is the first change of speed that may matter
    speed = load.speed[change - 1, stream] if change > 0 else 1.0
    while seconds > 0.0 and change < load.seconds.size:
        if load.seconds[change] > start:
            if start + seconds / speed <= load.seconds[change]:
                break
            seconds = max(seconds - (load.seconds[change] - start) * speed, 0.0)
            start = load.seconds[change]
        speed = load.speed[change, stream]
        change += 1
    return start + seconds / speed if seconds > 0.0 else start


@njit(error_model="numpy")
def _level(wanted, dram):
    # max-min fairness: no flow gets more than this level, at which the wanted rates use the DRAM up
    level, higher = 0.0, dram / 5
    while higher > level:
        level = higher
        rest, flows = dram, 0
        for s in range(5):
            if wanted[s] > level:
                flows += 1
            else:
                rest -= wanted[s]
        higher = rest / flows if flows > 0 else level
    return level


@njit(error_model="numpy")
def _move(clock, change, flowing, begin, left, rate, dram, load, wanted):
    # move the open flows on from ``clock`` until one ends; returns its stream (NONE: never), the time, the change
    while True:
        until = load.seconds[change] if change < load.seconds.size else np.inf
        total = 0.0
        for s in range(5):
            wanted[s] = 0.0
            if flowing[s] and begin[s] <= clock:
                wanted[s] = rate[s] * (load.speed[change - 1, s] if change > 0 else 1.0)
                total += wanted[s]
            elif flowing[s]:
                until = min(until, begin[s])
        level = _level(wanted, dram) if total > dram else np.inf
        ending, end = NONE, np.inf
        for s in range(5):
            if wanted[s] > 0.0 and clock + left[s] / min(wanted[s], level) < end:
                ending, end = s, clock + left[s] / min(wanted[s], level)
        step = min(end, until) - clock
        if step == np.inf:
            return NONE, clock, change
        for s in range(5):
            if wanted[s] > 0.0:
                left[s] = max(left[s] - step * min(wanted[s], level), 0.0)
        if end <= until:
            return ending, end, change
        clock = until
        while change < load.seconds.size and load.seconds[change] <= clock:
            change += 1


@njit(types.float64(OPS, types.float64, types.float64, LOAD), error_model="numpy", cache=True, nogil=True)
def run(ops, now, dram, load):
    """Time all ops from ``now`` on; fills ``start`` and ``end`` and returns the end of the last, in seconds.

    Returns NaN when some op can never end: the ops wait for each other in a cycle, or a speed stays 0.
    """
    n = ops.used[0]
    stream, seconds, first, second = ops.stream, ops.seconds, ops.first, ops.second
    start, end = ops.start, ops.end
    steady = load.seconds.size == 0
    follower = np.empty(n, np.int32)  # the next op of the same stream
    head, tail = np.full(5, NONE, np.int32), np.full(5, NONE, np.int32)
    for i in range(n):
        s = stream[i]
        if tail[s] == NONE:
            head[s] = i
        else:
            follower[tail[s]] = i
        tail[s] = i
        follower[i] = NONE
        end[i] = np.inf
    free = np.full(5, now)  # when the stream's last op ended
    flowing = np.zeros(5, np.bool_)
    begin, left, rate, wanted = np.zeros(5), np.zeros(5), np.zeros(5), np.zeros(5)
    change = 0
    while change < load.seconds.size and load.seconds[change] <= now:
        change += 1
    clock, clock_change = now, change
    latest, done, flows, last = now, 0, 0, NONE
    while done < n:
        moved = False
        for turn in range(5):
            s = (5 - turn) % 5  # in the order of a layer: gpu, scheduler, d2h, h2d, cpu
            while head[s] != NONE and not flowing[s]:
                i = head[s]
                begins = free[s]
                if first[i] != NONE:
                    begins = max(begins, end[first[i]])
                if second[i] != NONE:
                    begins = max(begins, end[second[i]])
                if begins == np.inf:
                    break
                moved = True
                start[i] = begins
                ends = begins + seconds[i] if steady else _done(begins, seconds[i], s, load, change)
                if ends == np.inf:
                    return np.nan
                if ops.bytes[i] > 0.0:
                    flowing[s], begin[s], left[s], rate[s] = True, ends, ops.bytes[i], ops.rate[i]
                    last, flows = s, flows + 1
                else:
                    end[i] = free[s] = ends
                    latest = max(latest, ends)
                    head[s] = follower[i]
                    done += 1
        if not moved:
            if flows == 1 and steady and flowing[last]:  # alone: nothing to share
                s, clock = last, max(clock, begin[last]) + left[last] / min(rate[last], dram)
            else:
                s, clock, clock_change = _move(clock, clock_change, flowing, begin, left, rate, dram, load, wanted)
            if s == NONE:
                return np.nan
            flows -= 1
            end[head[s]] = free[s] = clock
            latest = max(latest, clock)
            head[s] = follower[head[s]]
            flowing[s] = False
            done += 1
    return latest
