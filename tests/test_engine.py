"""The event engine against a SimPy model of the same machine, and against closed forms."""

from typing import NamedTuple

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.sim.engine import CPU, GPU, H2D, NO_LOAD, NONE, Load, empty_ops, issue, issue_bytes, run

CLOSE = {"rel": 1e-9, "abs": 0}


class Op(NamedTuple):
    stream: int
    seconds: float = 0.0
    bytes: float = 0.0
    rate: float = 1.0
    first: int = NONE
    second: int = NONE


def timed(ops: list[Op], dram: float = np.inf, load: Load = NO_LOAD, now: float = 0.0):
    """The engine's start and end of each op, and what it returns."""
    graph = empty_ops(len(ops))
    graph.used[0] = len(ops)
    for i, op in enumerate(ops):
        graph.stream[i], graph.seconds[i], graph.bytes[i], graph.rate[i], *waits = op
        graph.first[i], graph.second[i] = waits
    end = run(graph, now, dram, load)
    return graph.start, graph.end, end


def changes(*rows: tuple[float, dict[int, float]]) -> Load:
    """A load of (seconds, speed of the streams that are not at 1)."""
    speed = np.ones((len(rows), 5))
    for i, (_, slow) in enumerate(rows):
        speed[i, list(slow)] = list(slow.values())
    return Load(np.array([seconds for seconds, _ in rows], float), speed)


# the oracle


def fair(wanted: dict[int, float], dram: float) -> dict[int, float]:
    """Max-min fair rates: the least wanting first, each at most an equal share of what is left."""
    rates, left = {}, dram
    for done, stream in enumerate(sorted(wanted, key=wanted.__getitem__)):
        rates[stream] = min(wanted[stream], left / (len(wanted) - done))
        left -= rates[stream]
    return rates


class Shop:
    """Five workers who share a DRAM: SimPy processes, woken whenever a job or a speed changes."""

    def __init__(self, ops: list[Op], dram: float, load: Load, now: float = 0.0) -> None:
        self.env = simpy.Environment(now)
        self.ops, self.dram, self.load = ops, dram, load
        self.ended = [self.env.event() for _ in ops]
        self.start, self.end = np.full(len(ops), np.nan), np.full(len(ops), np.nan)
        self.moved = np.zeros(len(ops))
        self.speed = np.ones(5)
        self.jobs: dict[int, list] = {}  # stream: [op, is it moving bytes, amount left, event]
        self.stir = self.env.event()
        for stream in range(5):
            self.env.process(self.worker(stream))
        self.env.process(self.weather())
        self.env.process(self.floor())
        self.env.run(self.env.all_of(self.ended))

    def worker(self, stream: int):
        for i, op in enumerate(self.ops):
            if op.stream != stream:
                continue
            yield self.env.all_of([self.ended[j] for j in (op.first, op.second) if j != NONE])
            self.start[i] = self.env.now
            for moves, amount in ((False, op.seconds), (True, op.bytes)):
                if amount > 0:
                    event = self.env.event()
                    self.jobs[stream] = [i, moves, amount, event]
                    self.wake()
                    yield event
            self.end[i] = self.env.now
            self.ended[i].succeed()

    def weather(self):
        for seconds, speed in zip(*self.load, strict=True):
            if seconds > self.env.now:
                yield self.env.timeout(seconds - self.env.now)
            self.speed = speed
            self.wake()

    def wake(self) -> None:
        if not self.stir.triggered:
            self.stir.succeed()

    def floor(self):
        while True:
            rates = {s: self.speed[s] for s, job in self.jobs.items() if not job[1]}
            flows = {
                s: self.speed[s] * self.ops[job[0]].rate for s, job in self.jobs.items() if job[1]
            }
            rates |= fair(flows, self.dram)
            due = {s: job[2] / rates[s] for s, job in self.jobs.items() if rates[s] > 0}
            before, self.stir = self.env.now, self.env.event()
            soonest = self.env.timeout(min(due.values())) if due else self.env.event()
            yield soonest | self.stir
            finished = soonest.processed
            for s in rates:
                job, done = self.jobs[s], rates[s] * (self.env.now - before)
                job[2] -= done
                self.moved[job[0]] += done if job[1] else 0
                if finished and due.get(s) == min(due.values()):
                    del self.jobs[s]
                    job[3].succeed()


amounts = st.one_of(st.just(0.0), st.integers(1, 8).map(float), st.floats(0.01, 20))
rates = st.one_of(st.integers(1, 8).map(float), st.floats(0.05, 20))


@st.composite
def graphs(draw) -> list[Op]:
    """Ops that wait for ops before them, then issued in another order, each stream's own order kept."""
    n = draw(st.integers(1, 24))
    made = []
    for i in range(n):
        waits = draw(st.lists(st.integers(0, i - 1), max_size=2)) if i else []
        made.append(
            Op(
                draw(st.integers(0, 4)),
                draw(amounts),
                draw(amounts),
                draw(rates),
                *(waits + 2 * [NONE])[:2],
            )
        )
    queues = {s: [i for i in range(n) if made[i].stream == s] for s in range(5)}
    order = [queues[s].pop(0) for s in draw(st.permutations([op.stream for op in made]))]
    at = {made_at: issued_at for issued_at, made_at in enumerate(order)} | {NONE: NONE}
    return [made[i]._replace(first=at[made[i].first], second=at[made[i].second]) for i in order]


@st.composite
def loads(draw) -> Load:
    """Changes of speed, some of them a standstill, the last of them none."""
    times = sorted(
        draw(st.lists(st.one_of(st.integers(0, 20).map(float), st.floats(0, 40)), max_size=5))
    )
    speeds = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5]), min_size=5, max_size=5)
    rows = [draw(speeds) for _ in times[1:]] + [[0.5, 1.0, 2.0, 1.0, 0.25]] * bool(times)
    return Load(np.array(times), np.array(rows).reshape(-1, 5))


drams = st.one_of(st.just(np.inf), st.integers(1, 8).map(float), st.floats(0.1, 40))


@given(graphs(), drams)
@settings(max_examples=200, deadline=None)
def test_the_engine_keeps_simpys_times(ops, dram):
    start, end, last = timed(ops, dram)
    shop = Shop(ops, dram, NO_LOAD)
    assert start == pytest.approx(shop.start, **CLOSE)
    assert end == pytest.approx(shop.end, **CLOSE)
    assert last == max(end)


@given(graphs(), drams, loads(), st.sampled_from([0.0, 3.0, 7.25]))
@settings(max_examples=200, deadline=None)
def test_the_engine_keeps_simpys_times_under_load(ops, dram, load, now):
    start, end, last = timed(ops, dram, load, now)
    shop = Shop(ops, dram, load, now)
    assert start == pytest.approx(shop.start, **CLOSE)
    assert end == pytest.approx(shop.end, **CLOSE)
    assert last == max(end)
    assert shop.moved == pytest.approx([op.bytes for op in ops], **CLOSE)


@given(graphs(), drams)
@settings(max_examples=200, deadline=None)
def test_order_is_kept_and_bytes_are_conserved(ops, dram):
    start, end, _ = timed(ops, dram)
    for i, op in enumerate(ops):
        before = [j for j in range(i) if ops[j].stream == op.stream][-1:]
        waits = [j for j in (op.first, op.second, *before) if j != NONE]
        assert start[i] == max(
            [end[j] for j in waits], default=0.0
        )  # nothing earlier, nothing idle
        assert end[i] >= start[i] + op.seconds
    # the rates between all begins and ends, from the engine's times alone
    flows = [i for i, op in enumerate(ops) if op.bytes]
    begin = {i: start[i] + ops[i].seconds for i in flows}
    moved = dict.fromkeys(flows, 0.0)
    times = sorted({*begin.values(), *(end[i] for i in flows)})
    for since, until in zip(times, times[1:], strict=False):
        now = {ops[i].stream: i for i in flows if begin[i] <= since and until <= end[i]}
        for stream, rate in fair({s: ops[i].rate for s, i in now.items()}, dram).items():
            moved[now[stream]] += rate * (until - since)
    assert list(moved.values()) == pytest.approx([ops[i].bytes for i in flows], rel=1e-9)


# closed forms


def test_nothing_takes_no_time():
    assert timed([], now=2.0)[2] == 2.0
    start, end, last = timed([Op(GPU), Op(CPU)], now=2.0)
    assert [*start, *end, last] == [2.0] * 5


def test_a_stream_is_in_order_and_an_op_waits_for_two():
    ops = [
        Op(GPU, 3),
        Op(CPU, 1),
        Op(H2D, 2, first=1),
        Op(GPU, 1, first=2),
        Op(CPU, 1, first=0, second=2),
    ]
    start, end, last = timed(ops, now=10.0)
    assert start.tolist() == [10, 10, 11, 13, 13]
    assert end.tolist() == [13, 11, 13, 14, 14]
    assert last == 14


@pytest.mark.parametrize(
    ("dram", "seconds"), [(np.inf, 2 + 6 / 3), (3, 2 + 6 / 3), (1.5, 2 + 6 / 1.5)]
)
def test_one_flow_has_its_rate_or_the_dram(dram, seconds):
    assert timed([Op(CPU, 2, 6, 3)], dram)[2] == seconds


def test_two_flows_share_until_one_ends():
    # 4 of DRAM: 2 each; the 6 are moved at 3, the last 3 of 9 then at the cap of 3.5
    _, end, _ = timed([Op(CPU, 0, 6, 3), Op(H2D, 0, 9, 3.5)], 4.0)
    assert end == pytest.approx([3, 3 + 3 / 3.5], **CLOSE)
    # a cap of 1 leaves 3 to the other
    _, end, _ = timed([Op(CPU, 0, 6, 1), Op(H2D, 0, 9, 3.5)], 4.0)
    assert end == pytest.approx([6, 3], **CLOSE)


def test_a_flow_that_comes_later_takes_its_share():
    # alone at 4 until 1, then 2 each: 2 of the 6 are left at 1, gone at 2; the other then has 4
    _, end, _ = timed([Op(CPU, 0, 6, 4), Op(H2D, 1, 6, 4)], 4.0)
    assert end == pytest.approx([2, 3], **CLOSE)


def test_three_flows_are_max_min_fair():
    # of 10: the one that wants 2 has 2, the others 4 each, and 6 of 9 when the first are done
    _, end, _ = timed([Op(CPU, 0, 8, 2), Op(H2D, 0, 16, 9), Op(2 + 1, 0, 40, 6)], 10.0)
    assert end == pytest.approx([4, 4, 4 + 24 / 6], **CLOSE)


def test_a_change_of_speed_slows_both_parts():
    # 1 of 2 s done, the other 1 s at half pace until 3, then 4 bytes at a rate of 2 / 2
    load = changes((1.0, {CPU: 0.5}))
    assert timed([Op(CPU, 2, 4, 2)], load=load)[2] == pytest.approx(7, **CLOSE)
    # speed comes back at 5: 2 of the 4 bytes are left, at 2
    load = changes((1.0, {CPU: 0.5}), (5.0, {}))
    assert timed([Op(CPU, 2, 4, 2)], load=load)[2] == pytest.approx(6, **CLOSE)
    # another stream's load changes nothing, and what is past counts from its last change
    assert timed([Op(GPU, 2, 4, 2)], load=load)[2] == pytest.approx(4, **CLOSE)
    assert timed([Op(CPU, 2, 4, 2)], load=load, now=2.0)[2] == pytest.approx(5 + 0.5 + 2, **CLOSE)


def test_a_stream_that_stands_still_goes_on_later():
    load = changes((1.0, {CPU: 0.0}), (5.0, {}))
    assert timed([Op(CPU, 2, 4, 2)], load=load)[2] == pytest.approx(8, **CLOSE)
    assert timed([Op(CPU, 0, 4, 2), Op(H2D, 0, 9, 3)], 3.0, load)[2] == pytest.approx(
        5 + 2.5 / 2, **CLOSE
    )


@pytest.mark.parametrize(
    "ops",
    [
        [Op(GPU, 1, first=0)],
        [Op(GPU, 1, first=1), Op(CPU, 1, first=0)],
        [Op(GPU, 1, first=1), Op(GPU, 1)],  # the one it waits for queues behind it
        [Op(H2D, 1), Op(GPU, 0, 3, 1, first=2), Op(CPU, 1, second=1)],
    ],
)
def test_a_cycle_gives_nan(ops):
    assert np.isnan(timed(ops)[2])


def test_a_standstill_for_ever_gives_nan():
    for op in (Op(GPU, 1), Op(GPU, 0, 3, 1)):
        assert np.isnan(timed([Op(CPU, 5), op], load=changes((0.0, {GPU: 0.0})))[2])
        assert np.isnan(timed([Op(CPU, 5), op], load=changes((0.5, {GPU: 0.0})))[2])


def test_issued_ops_are_appended():
    graph = empty_ops(3)
    assert issue(graph, GPU, 4, 7, 1.5, NONE, NONE) == 0
    assert issue_bytes(graph, CPU, 6, 7, 12, 0.5, 10.0, 2.0, 0, NONE) == 1
    assert issue_bytes(graph, H2D, 3, 7, 0, 0.5, 0.0, 2.0, 0, 1) == 2  # nothing to move
    assert graph.used[0] == 3
    assert graph.stream.tolist() == [GPU, CPU, H2D]
    assert graph.step.tolist() == [4, 6, 3]
    assert graph.neurons.tolist() == [0, 12, 0]
    assert graph.bytes.tolist() == [0, 10, 0]
    assert graph.rate[1] == 5
    assert (graph.first.tolist(), graph.second.tolist()) == ([NONE, 0, 0], [NONE, NONE, 1])
    assert run(graph, 0.0, np.inf, NO_LOAD) == 1.5 + 0.5 + 2 + 0.5
