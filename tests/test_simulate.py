"""Whole replays against times worked out by hand, and what a replay must never do."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rules import exchange

from dinfer import bits
from dinfer.errors import InputError
from dinfer.machine import Cost, Device, Link, Machine
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.policies import CACHES
from dinfer.policies.protocol import NO_FUTURE, decide
from dinfer.sim import simulate
from dinfer.sim.engine import Load
from dinfer.timeline import STEPS, STREAMS
from dinfer.trace import Trace

# Four neurons a layer, 64 B each, half of it the gate; the state is 32 B, a token of KV 32 B a layer.
SPEC = ModelSpec(
    "tiny",
    "opt",
    layers=2,
    hidden=8,
    neurons=4,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab=16,
    gated=False,
    activation="relu",
    dtype="float32",
    compute_dtype="float32",
)


def per(size: float, seconds: float) -> float:
    """The rate at which ``size`` bytes take ``seconds``."""
    return size / seconds if seconds else np.inf


def machine(
    dram=np.inf,
    attention=1.0,
    kv=0.0,
    gpu=0.0,
    gpu_gate=0.0,
    gpu_rest=0.0,
    cpu=0.0,
    cpu_gate=0.0,
    cpu_rest=0.0,
    copy=0.0,
    link=0.0,
    down=0.0,
    merge=0.0,
    schedule=0.0,
    head=0.0,
) -> Machine:
    """Costs in seconds: a side's FFN takes a fixed part, gates and rests; ``link`` is a neuron's copy.

    ``kv`` is of one token of context; ``copy`` the fixed part of one copy to the GPU; the state's bytes take
    half of ``link`` then, as they are half a neuron's.
    """
    card = Device(
        "card",
        10**9,
        attention=Cost(attention),
        kv=Cost(0.0, per(32, kv)),
        gate=Cost(gpu, per(32, gpu_gate)),
        neuron=Cost(0.0, per(32, gpu_rest)),
        merge=Cost(merge),
        head=Cost(head),
    )
    chip = Device(
        "chip",
        10**9,
        gate=Cost(cpu, per(32, cpu_gate)),
        neuron=Cost(0.0, per(32, cpu_rest)),
        schedule=Cost(schedule),
    )
    return Machine(
        "box", card, chip, Link("up", copy, per(64, link)), Link("down", down, np.inf), dram
    )


def trace(
    tokens: list[list[set[int]]], spec: ModelSpec = SPEC, first=0, sequences=None, phase="decode"
) -> Trace:
    """A trace of ``tokens``: the active set of each layer of each token."""
    spec = replace(spec, layers=len(tokens[0]))
    active = np.array(
        [[bits.from_ids(sorted(layer), spec.neurons) for layer in token] for token in tokens]
    )
    n = len(tokens)
    table = pd.DataFrame(
        {"id": 0, "sequence": sequences or 0, "position": first + np.arange(n), "phase": phase}
    )
    return Trace(spec, table, active)


def plan(resident: list[set[int]], box: Machine, spec: ModelSpec = SPEC, **options) -> Plan:
    """A plan with ``resident`` neurons in each layer."""
    spec = replace(spec, layers=len(resident))
    placement = Placement(
        spec.neurons, np.array([bits.from_ids(sorted(r), spec.neurons) for r in resident])
    )
    frequency = np.zeros((spec.layers, spec.neurons), np.float32)
    options = {"cache": {"name": "static"}, "lookahead": 0, "vram_bytes": 10**6, **options}
    return Plan(spec, box, placement, frequency, **options)


def seconds(*args, **options) -> float:
    return simulate(*args, **options).timeline.seconds


ALL, LOW, HIGH, NONE = {0, 1, 2, 3}, {0, 1}, {2, 3}, set()


# no neuron moves


def test_everything_resident():
    """Tokens x (layers x (attention + the GPU's FFN) + head), and the CPU idle."""
    box = machine(
        attention=1, gpu=0.5, gpu_gate=0.25, gpu_rest=0.125, cpu=99, down=99, merge=99, head=3
    )
    run = simulate(plan([ALL, ALL], box), trace([[LOW, ALL], [NONE, LOW], [ALL, ALL]]))
    active = (2 + 4) + (0 + 2) + (4 + 4)
    assert run.timeline.seconds == 3 * (2 * (1 + 0.5 + 4 * 0.25) + 3) + active * 0.125
    assert run.gpu_share == 1
    assert run.timeline.busy("cpu") == run.timeline.busy("h2d") == run.timeline.busy("d2h") == 0
    assert run.timeline.tokens_per_second == 3 / run.timeline.seconds


def test_nothing_resident():
    """Attention, the state down, the CPU's FFN, the sum up, the merge; the GPU has no FFN of its own."""
    box = machine(
        attention=1,
        gpu=99,
        cpu=0.5,
        cpu_gate=0.25,
        cpu_rest=0.125,
        down=2,
        link=0.5,
        merge=0.75,
        head=3,
    )
    run = simulate(plan([NONE, NONE], box), trace([[LOW, ALL], [NONE, LOW]]))
    active = (2 + 4) + (0 + 2)
    layer = 1 + 2 + 0.5 + 4 * 0.25 + 0.25 + 0.75
    assert run.timeline.seconds == 2 * (2 * layer + 3) + active * 0.125
    assert run.gpu_share == 0
    per_token = run.timeline.step_seconds() * 2
    assert per_token["wait"] == 4 * (2 + 0.5 + 4 * 0.25) + active * 0.125
    assert per_token["ffn_cpu"] == per_token["wait"]
    assert per_token["merge"] == 4 * (0.25 + 0.75)


@pytest.mark.parametrize(("gpu", "slower"), [(1.0, 3.5), (8.0, 8.5)])
def test_half_resident(gpu, slower):
    """The slower side, then the merge: 2 + 2 x 0.5 + 1 x 0.5 s on the CPU, ``gpu`` + 0.5 on the GPU."""
    box = machine(
        attention=1, gpu=gpu, gpu_rest=0.5, down=2, cpu_gate=0.5, cpu_rest=0.5, merge=0.25
    )
    run = simulate(plan([LOW], box, lookahead=0), trace([[{1, 2}]] * 5))
    assert run.timeline.seconds == 5 * (1 + slower + 0.25)
    assert run.work.tolist() == [[[1, 1, 0, 0]]] * 5
    assert run.gpu_share == 0.5


def test_a_longer_context_reads_more():
    """Tokens at positions 10, 11, 12 with 0.5 s of KV a token, in each of two layers."""
    box = machine(attention=1, kv=0.5)
    assert seconds(plan([ALL, ALL], box), trace([[NONE, NONE]] * 3, first=10)) == 2 * (
        3 + 0.5 * (10 + 11 + 12)
    )


def test_predicted_activation_computes_what_was_predicted():
    """Both matrices of the predicted neurons, nothing of the others; predicted in vain costs the same."""
    box = machine(
        attention=1,
        gpu_gate=0.25,
        gpu_rest=0.125,
        cpu_gate=2,
        cpu_rest=1,
        down=0.5,
        schedule=0.0625,
    )
    tokens = trace([[{0, 2}], [{1, 2, 3}], [LOW]])
    oracle = plan([LOW], box, activation="predicted", prediction="oracle")
    run = simulate(oracle, tokens)
    by_hand = [0.5 + 3, 0.5 + 6, 2 * 0.375]
    assert run.timeline.seconds == 3 * (1 + 0.0625) + sum(by_hand)
    assert run.work[:, 0, :2].tolist() == [[1, 1], [1, 2], [2, 0]]
    # the first token predicts nothing; the second {0, 2}, of which 2 is active; the third {1, 2, 3}, of
    # which 1 is
    run = simulate(replace(oracle, prediction="previous"), tokens)
    assert run.timeline.seconds == 3 * (1 + 0.0625) + 0 + (0.5 + 3) + (0.5 + 6)
    assert run.work[:, 0, :2].tolist() == [[0, 0], [0, 1], [1, 0]]


def test_speed_is_tokens_over_total_time():
    """Two layers of two experts, routed evenly: CPU 1 s, GPU 0.01 s; the mean speed would be 13.12."""
    experts = replace(SPEC, neurons=2)
    box = machine(attention=0, gpu_gate=0.01, cpu_gate=1)
    routed = trace([[{a}, {b}] for a in (0, 1) for b in (0, 1)], experts)
    for resident in ([{0, 1}, NONE], [{0}, {1}]):
        options = {"activation": "predicted", "prediction": "oracle"}
        run = simulate(plan(resident, box, experts, **options), routed)
        assert run.timeline.seconds / 4 == pytest.approx(1.01, rel=1e-12)
        assert run.timeline.tokens_per_second == pytest.approx(4 / 4.04, rel=1e-12)


# neurons move


def swapping(layers: int, tokens: int) -> Trace:
    """Every token uses what the one before did not: first the two that are not resident."""
    return trace([[HIGH if t % 2 == 0 else LOW] * layers for t in range(tokens)])


def mover(layers: int, box: Machine, **options) -> Plan:
    """LRU with an oracle: fetches both neurons at every layer; nothing is left to the CPU."""
    moving = {
        "cache": {"name": "lru"},
        "activation": "predicted",
        "prediction": "oracle",
        "window": 4,
    }
    return plan([LOW] * layers, box, **moving | options)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_an_infinite_link_hides_every_prefetch(lookahead):
    box = machine(attention=1, gpu_rest=0.5, head=2)
    run = simulate(mover(3, box, lookahead=lookahead), swapping(3, 4))
    assert run.timeline.seconds == 4 * (3 * (1 + 2 * 0.5) + 2)
    assert run.work[..., 2].tolist() == [[2] * 3] * 4
    assert run.gpu_share == 1


def test_without_lookahead_a_layer_waits_for_its_prefetch():
    """The barrier of the same layer holds: attention, the step, the copy of two, then the FFN."""
    box = machine(attention=1, schedule=0.25, copy=0.125, link=0.5, gpu_rest=0.5)
    run = simulate(mover(3, box, lookahead=0), swapping(3, 4))
    assert run.timeline.seconds == 4 * 3 * (1 + 0.25 + 0.125 + 2 * 0.5 + 2 * 0.5)
    assert run.timeline.step_seconds()["wait"] == 3 * (0.25 + 0.125 + 1)


@pytest.mark.parametrize("lookahead", [1, 2])
def test_with_lookahead_only_the_first_layer_waits(lookahead):
    """A copy of 1.125 s is hidden by the 2 s of a layer, all but the first; the steps are not hidden."""
    box = machine(attention=1, schedule=0.25, copy=0.125, link=0.5, gpu_rest=0.5)
    run = simulate(mover(3, box, lookahead=lookahead), swapping(3, 4))
    # the first layer's copy starts after the first step, while the others step
    first = max((lookahead + 1) * 0.25, 0.25 + 1.125)
    rest = 0.25 * (2 - lookahead)
    assert run.timeline.seconds == 4 * (3 * (1 + 2 * 0.5) + first + rest)


def test_a_long_prefetch_is_exposed_by_what_a_layer_does_not_hide():
    """Copies of 5 s one after the other from the first attention on, layers of 2 s: the link is the limit."""
    box = machine(attention=1, link=2.5, gpu_rest=0.5)
    assert seconds(mover(3, box, lookahead=2), swapping(3, 1)) == 1 + 3 * 5 + 1
    assert seconds(mover(3, box, lookahead=0), swapping(3, 1)) == 3 * (1 + 5 + 1)


def test_a_window_of_nothing_is_static_but_for_the_steps():
    box = machine(attention=1, cpu_gate=0.25, cpu_rest=0.125, gpu_rest=0.5, schedule=0.0625)
    tokens = swapping(2, 6)
    still = simulate(plan([LOW, LOW], box), tokens)
    held = simulate(plan([LOW, LOW], box, cache={"name": "lru"}, window=0), tokens)
    assert held.timeline.seconds == still.timeline.seconds + 6 * 2 * 0.0625
    assert not held.fetch.size
    np.testing.assert_equal(held.work, still.work)


@pytest.mark.parametrize(
    ("issue", "group", "copies"), [("copy", 1, 2), ("copy", 2, 1), ("copy", 64, 1), ("block", 1, 1), ("gather", 1, 1)]
)
def test_each_copy_pays_the_fixed_part(issue, group, copies):
    box = machine(attention=1, copy=0.125, link=0.5)
    made = mover(1, box, issue=issue, group=group)
    assert seconds(made, swapping(1, 3)) == 3 * (1 + copies * 0.125 + 2 * 0.5)


@pytest.mark.parametrize(
    ("issue", "late"), [("copy", 10 + 0.5), ("block", 10 + 0.5), ("gather", 2 + 0.5)]
)
def test_a_merge_queues_behind_a_prefetch_unless_a_kernel_reads_it(issue, late):
    """The second layer's 10 s prefetch starts after the first attention; 2 s later the first CPU is done."""
    box = machine(attention=1, link=5, cpu_gate=1, head=0)
    # the state's 32 B take 2.5 s on this link: half a neuron
    token = trace([[LOW, HIGH]])
    options = {"cache": {"name": "lru"}, "prediction": "oracle", "lookahead": 1, "window": 4}
    got = simulate(plan([LOW, LOW], box, issue=issue, **options), token)
    frame = got.timeline.to_frame()
    merges = frame[(frame["step"] == "merge") & (frame["stream"] == "gpu") & (frame["layer"] == 0)]
    assert got.work[0, :, 2].tolist() == [0, 2]
    assert merges["end_seconds"].item() == 1 + (late - 0.5) + 2.5


@pytest.mark.parametrize(
    ("dram", "cpu", "copied", "total"), [(np.inf, 3, 3, 7), (96, 3, 3, 7), (48, 11 / 3, 5, 23 / 3)]
)
def test_cpu_and_prefetch_share_the_dram(dram, cpu, copied, total):
    """Two cold gates at 32 B/s and a copy of two neurons at 64 B/s, both from 1 s on.

    With room for both 2 s each. At 48 B/s they have 24 each: the CPU's 64 B take 8/3 s, what is left of
    the copy 4/3 s at 48. Then the sum goes up in 0.5 s, attention 1 s, the second CPU 2 s, and up again.
    """
    box = machine(dram=dram, attention=1, cpu_gate=1, link=1)
    options = {"cache": {"name": "lru"}, "prediction": "oracle", "lookahead": 1, "window": 4}
    frame = simulate(plan([LOW, LOW], box, **options), trace([[LOW, HIGH]])).timeline.to_frame()
    ends = frame.groupby(["step", "layer"], observed=True)["end_seconds"].max()
    assert ends["ffn_cpu", 0] == pytest.approx(cpu, rel=1e-12)
    assert ends["prefetch", 1] == pytest.approx(copied, rel=1e-12)
    assert ends["head", -1] == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(("gpu", "total"), [(0.5, 3.25), (1.875, 3.25), (2.125, 3.25), (2.5, 3.5)])
def test_waking_up_counts_as_far_as_the_gpu_waits(gpu, total):
    """The CPU is done after 2 s and its thread takes 0.25 s to wake the other, which a busy GPU does not notice."""
    box = machine(attention=1, gpu=gpu, cpu_gate=1)
    slow = replace(box, cpu=replace(box.cpu, wake=Cost(0.25)))
    run = simulate(plan([LOW], slow, issue="gather"), trace([[LOW]]))
    assert run.timeline.seconds == total
    assert run.timeline.step_seconds()["wait"] == total - 1 - gpu
    assert simulate(plan([LOW], box, issue="gather"), trace([[LOW]])).timeline.seconds == 1 + max(gpu, 2)


def test_handing_over_takes_from_the_gpus_part():
    """Half a second in each layer that has a part for the CPU, none where all neurons are resident."""
    box = machine(attention=1, gpu=2, cpu_gate=0.125)
    slow = replace(box, cpu=replace(box.cpu, hand=Cost(0.5)))
    run = simulate(plan([LOW, ALL], slow, issue="gather"), trace([[LOW, LOW]]))
    assert run.timeline.seconds == 1 + 2.5 + 1 + 2
    assert run.timeline.step_seconds()["ffn_gpu"] == 2.5 + 2


BOTH_LATER = (True, 1 + 0.5 + 2 * 0.125, 2 + 0.25 + 2 * 0.25)


@pytest.mark.parametrize(("emulated", "start", "took"), [(False, 1, 2), BOTH_LATER])
def test_an_emulated_link_takes_its_core_from_both_sides(emulated, start, took):
    """While two neurons of the second layer are on their way the first layer's CPU part waits, its GPU part is slow."""
    box = machine(attention=1, gpu=2, cpu_gate=1, link=1)
    gpu, cpu = replace(box.gpu, delay=Cost(0.25, per(64, 0.25))), replace(box.cpu, delay=Cost(0.5, per(64, 0.125)))
    box = replace(box, gpu=gpu, cpu=cpu, emulated_link=box.h2d if emulated else None)
    options = {"cache": {"name": "lru"}, "prediction": "oracle", "lookahead": 1, "window": 4}
    frame = simulate(plan([LOW, LOW], box, issue="gather", **options), trace([[LOW, HIGH]])).timeline.to_frame()
    cpu = frame[(frame["step"] == "ffn_cpu") & (frame["stream"] == "cpu")]
    gpu = frame[(frame["step"] == "ffn_gpu") & (frame["stream"] == "gpu")]
    assert cpu["start_seconds"].iloc[0] == start
    assert (gpu["end_seconds"] - gpu["start_seconds"]).tolist() == [took, 2]


def test_other_load_slows_its_stream():
    """From 4 s on the GPU runs at half its pace: of 5 tokens of 2 s two are done, three take 4 s."""
    box = machine(attention=1, gpu=1)
    slow = Load(np.array([4.0]), np.array([[0.5, 1, 1, 1, 1]]))
    assert seconds(plan([ALL], box), trace([[LOW]] * 5), load=slow) == 4 + 3 * 4


def test_prefetch_loses_when_the_link_is_slow_and_the_prediction_poor():
    """A forced window makes the plan slower than static, its bytes vain; a sized one stops the prefetch."""
    box = machine(attention=1, cpu_gate=0.25, cpu_rest=0.25, link=10)
    tokens = swapping(2, 20)  # the previous token is always wrong
    forced = plan([LOW, LOW], box, cache={"name": "lru"}, window=4, lookahead=1)
    run, still = simulate(forced, tokens), simulate(plan([LOW, LOW], box), tokens)
    assert run.timeline.seconds > 3 * still.timeline.seconds
    fetched, wasted = run.work[..., 2].sum(), run.work[..., 3].sum()
    assert fetched == wasted == 2 * 2 * 19  # all but the first token, which has no previous one
    prefetched = run.timeline.spans[run.timeline.spans["step"] == STEPS.index("prefetch")]
    assert prefetched["bytes"].sum() == 64 * fetched
    sized = simulate(replace(forced, window=None), tokens)
    assert sized.work[..., 2].sum() == 0
    assert sized.timeline.seconds == still.timeline.seconds


# decisions


RANDOM = ModelSpec(
    "random", "opt", 3, 8, 70, 2, 1, 4, 16, gated=False, activation="relu", dtype="float32"
)


def random_trace(seed: int, tokens: int, sequences=None) -> Trace:
    rng = np.random.default_rng(seed)
    popular = rng.beta(0.5, 1.5, (3, 70))
    drawn = rng.random((tokens, 3, 70)) < popular
    return trace(
        [[set(np.flatnonzero(layer)) for layer in token] for token in drawn],
        RANDOM,
        sequences=sequences,
    )


def random_plan(seed: int, name: str, box: Machine, **options) -> Plan:
    rng = np.random.default_rng(seed)
    made = plan([set(rng.permutation(70)[:slots].tolist()) for slots in (0, 30, 69)], box, RANDOM)
    frequency = (rng.integers(0, 33, (3, 70)) / 32).astype(np.float32)
    return replace(made, frequency=frequency, cache={"name": name}, **options)


BOX = machine(
    attention=1e-4,
    gpu=1e-5,
    gpu_gate=1e-6,
    gpu_rest=1e-6,
    cpu=2e-5,
    cpu_gate=5e-6,
    cpu_rest=1e-5,
    copy=3e-6,
    link=1e-5,
    down=1e-5,
    merge=1e-6,
    schedule=1e-5,
    head=1e-4,
    dram=1e7,
)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("prediction", ["oracle", "previous"])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_replay_decides_as_the_policy_does_token_by_token(name, prediction, lookahead):
    """Each layer has its own state; the first token of a sequence has no previous one."""
    tokens = random_trace(3, 30, [0] * 11 + [1] * 19)
    made = random_plan(3, name, BOX, prediction=prediction, lookahead=lookahead, window=5)
    run, cache = simulate(made, tokens), made.policy
    parameters = cache.parameters(made.beliefs._replace(lag=int(prediction == "previous")))
    state = list(cache.init(made.spec, made.placement, made.frequency))
    resident = made.placement.resident.copy()
    fetch, evict, work = [], [], np.zeros((30, 3, 4), np.int32)
    for t in range(30):
        for layer in range(3):
            active = tokens.active[t, layer]
            predicted = (
                active
                if prediction == "oracle"
                else tokens.active[t - 1, layer] * (t not in (0, 11))
            )
            future = tokens.active[t + 1 :, layer] if cache.clairvoyant else NO_FUTURE
            moved, state[layer] = decide(
                cache, parameters, state[layer], resident[layer], predicted, 5, future
            )
            exchange(resident[layer], moved)
            fetch += moved.fetch.tolist()
            evict += moved.evict.tolist()
            hits = int(bits.count(active & resident[layer]))
            vain = sum(not bits.unpack(active, 70)[i] for i in moved.fetch)
            work[t, layer] = hits, int(bits.count(active)) - hits, len(moved.fetch), vain
    assert (run.fetch.tolist(), run.evict.tolist()) == (fetch, evict)
    np.testing.assert_equal(run.work, work)


@pytest.mark.parametrize("name", CACHES)
def test_decisions_depend_on_believed_costs_only(name):
    """A machine ten times slower in places changes the time and no decision; other beliefs change these."""
    tokens, made = random_trace(4, 40), random_plan(4, name, BOX, lookahead=1)
    other = replace(BOX, h2d=Link("slow", 1e-4, 1e5), dram_bytes_per_second=1e6)
    believed, true = simulate(made, tokens), simulate(made, tokens, other)
    assert true.same_decisions(believed)
    np.testing.assert_equal(true.work, believed.work)
    if CACHES[name].moves:
        assert true.timeline.seconds > believed.timeline.seconds
        assert not simulate(replace(made, machine=other), tokens, BOX).same_decisions(believed)
    assert true.timeline.meta["machine"] == "box"


def test_a_full_log_grows_and_nothing_is_lost(monkeypatch):
    """A first log of the least room holds one token; the replay then goes on where it stopped."""
    module = __import__("sys").modules["dinfer.sim.simulate"]
    tokens = random_trace(5, 240)
    made = random_plan(5, "lru", BOX, prediction="oracle", window=64)
    run = simulate(made, tokens)
    full = module._empty_log

    def tight(*args):
        log = full(*args)
        least = 64 * made.spec.words * made.spec.layers
        return log._replace(fetch=np.empty(least, np.int32), evict=np.empty(least, np.int32))

    assert len(run.fetch) > 2 * 64 * made.spec.words * made.spec.layers
    monkeypatch.setattr(module, "_empty_log", tight)
    again = simulate(made, tokens)
    assert again.same_decisions(run)
    assert again.timeline.seconds == run.timeline.seconds
    np.testing.assert_equal(again.timeline.spans, run.timeline.spans)
    np.testing.assert_equal(again.work, run.work)


# what a timeline must be


@given(
    st.integers(0, 99),
    st.sampled_from(sorted(CACHES)),
    st.integers(0, 2),
    st.sampled_from(["copy", "block", "gather"]),
    st.sampled_from(["exact", "predicted"]),
    st.sampled_from([None, 3]),
    st.sampled_from([1e6, 1e7, np.inf]),
)
@settings(max_examples=60, deadline=None)
def test_any_timeline_is_sound(seed, name, lookahead, issue, activation, window, dram):
    """No stream overlaps itself, the GPU is busy or waits, what was decided was moved, the sums agree."""
    tokens = random_trace(seed, 12)
    box = replace(BOX, dram_bytes_per_second=dram)
    made = random_plan(
        seed, name, box, lookahead=lookahead, issue=issue, activation=activation, window=window
    )
    run = simulate(made, tokens)
    spans = run.timeline.spans
    for code, stream in enumerate(STREAMS):
        rows = spans[spans["stream"] == code]
        rows = rows[np.argsort(rows["start_seconds"], kind="stable")]
        assert (rows["end_seconds"] >= rows["start_seconds"]).all()
        assert (rows["start_seconds"][1:] >= rows["end_seconds"][:-1]).all(), stream
        if stream == "gpu":
            assert (rows["start_seconds"][1:] == rows["end_seconds"][:-1]).all()
            assert (rows["start_seconds"][0], rows["end_seconds"][-1]) == (0, run.timeline.seconds)
    prefetched = spans[spans["step"] == STEPS.index("prefetch")]
    assert prefetched["neurons"].sum() == run.work[..., 2].sum() == len(run.fetch)
    assert prefetched["bytes"].sum() == len(run.fetch) * made.spec.neuron_bytes
    active = bits.count(tokens.active)
    if activation == "exact":
        assert (run.work[..., :2].sum(axis=2) == active).all()
    assert (run.work[..., :2].sum(axis=2) <= active).all()
    bare = simulate(made, tokens, spans=False)
    assert len(bare.timeline.spans) == 0
    assert bare.timeline.seconds == run.timeline.seconds
    assert bare.same_decisions(run)
    np.testing.assert_allclose(
        bare.timeline.step_seconds(), run.timeline.step_seconds(), rtol=1e-9, atol=1e-15
    )
    summed = replace(run.timeline, totals=None).step_seconds()
    np.testing.assert_allclose(summed, run.timeline.step_seconds(), rtol=1e-9, atol=1e-15)


def test_a_run_says_what_it_was():
    made = plan([ALL], BOX)
    run = simulate(made, trace([[LOW]]))
    assert run.timeline.meta == {
        "source": "simulated",
        "machine": "box",
        "plan": made.fingerprint(),
        "model": "tiny",
        "prefills": [[0, BOX.gpu.head.fixed_seconds]],
    }
    assert (run.timeline.tokens, run.text, run.ids) == (1, "", ())


def test_a_batch_reads_each_neuron_once_and_everybodys_context():
    """Two sequences step together: the union of their sets, the sum of their contexts, two tokens a step."""
    box = machine(attention=1, kv=0.5, gpu_gate=0, gpu_rest=0.25)
    single = trace([[{0}], [{1}], [{0, 2}], [{0}]], sequences=[0, 0, 1, 1], first=3)
    single = replace(single, tokens=single.tokens.assign(position=[3, 4, 10, 11]))
    both = single.batched(2)
    assert both.tokens["position"].tolist() == [13, 15]
    run = simulate(plan([ALL], box), both)
    kv = box.gpu.kv.seconds(both.spec.kv_bytes(1))
    assert run.timeline.seconds == pytest.approx(2 * 1 + (13 + 15) * kv + (2 + 2) * 0.25)
    assert run.timeline.tokens_per_second == pytest.approx(4 / run.timeline.seconds)
    assert run.work[:, 0, 0].tolist() == [2, 2]


def test_a_longer_context_costs_its_kv():
    box = machine(attention=1, kv=0.5)
    short = trace([[ALL], [ALL]])
    more = seconds(plan([ALL], box), short.later(1000)) - seconds(plan([ALL], box), short)
    assert more == pytest.approx(2 * 1000 * box.gpu.kv.seconds(short.spec.kv_bytes(1)))


def test_a_batch_needs_its_sequences():
    with pytest.raises(InputError, match="^batch is 3; it must be 1 to 2, the sequences that the trace decodes$"):
        trace([[LOW], [ALL]], sequences=[0, 1]).batched(3)


def test_prefill_is_left_out():
    mixed = trace([[LOW], [ALL], [LOW]], phase=["prefill", "decode", "decode"])
    run = simulate(plan([LOW], BOX), mixed)
    assert run.timeline.tokens == 2
    assert run.work[:, 0, :2].tolist() == [[2, 2], [2, 0]]


def test_a_trace_of_another_model_is_refused():
    tokens = trace([[LOW, LOW, LOW]])
    made = plan([LOW], BOX)
    with pytest.raises(
        InputError, match=f"^plan is for tiny .{made.spec.fingerprint()}., the model is tiny "
    ):
        simulate(made, tokens)


def test_a_trace_without_decode_tokens_is_refused():
    message = "the trace has no decode token; record with --tokens 1 or more"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        simulate(plan([LOW], BOX), trace([[LOW]], phase="prefill"))
