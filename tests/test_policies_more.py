"""Each newer policy against its rule in plain Python, against libcachesim, the exact bound and the clock."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import libcachesim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rules import RULES, NaiveTimeSaved, exchange
from test_policies import Case, as_set, as_words, cases, free, reachable

from dinfer.errors import InputError
from dinfer.machine import LayerCosts, load_machine
from dinfer.model import catalogue_models
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.policies import CACHES
from dinfer.policies.protocol import FREE, Beliefs, decide
from dinfer.policies.random import Random
from dinfer.policies.s3fifo import S3Fifo
from dinfer.policies.time_saved import TimeSaved, slowed_share
from dinfer.record.synth import Statistics, profile, synth
from dinfer.sim import simulate
from dinfer.solve import budget_for_share, make_plan
from dinfer.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bounds import clairvoyant_bound, gaps_between_uses, most_hits, speed_bound

# each step against its rule


def check(case: Case, cache) -> None:
    naive = RULES[cache.name](case, cache)
    for t, (resident, active, window, moved, _) in enumerate(case.play(cache)):
        if moved is not None:
            fetch, evict = naive.step(as_set(resident), active, window, case.active[t + 1 :])
            assert (moved.fetch.tolist(), moved.evict.tolist()) == (fetch, evict), t


def drawn_case(tokens: int, neurons: int, slots: int, most: int, seed: int = 5) -> Case:
    """Beta popularity, windows up to ``most``; neuron 0 is always active and neuron 1 never."""
    rng = np.random.default_rng(seed)
    drawn = rng.random((tokens, neurons)) < rng.beta(0.4, 1.6, neurons)
    drawn[:, 0], drawn[:, 1] = True, False
    steps = [(sum(1 << int(i) for i in np.flatnonzero(row)), int(rng.integers(0, most + 1))) for row in drawn]
    return Case(neurons, 2**slots - 1, 1, steps)


@pytest.mark.parametrize("name", RULES)
@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_a_step_is_its_rule(name, case):
    check(case, CACHES[name]())


@pytest.mark.parametrize("name", RULES)
def test_a_step_is_its_rule_for_hundreds_of_tokens(name):
    """Ages and counters saturate, and counters are halved."""
    check(drawn_case(300, 90, 45, 12), CACHES[name]())


@pytest.mark.parametrize(("slots", "most"), [(80, 0), (80, 1), (80, 2), (60, 2), (30, 2)])
def test_belady_discounts_as_its_rule_at_any_turnover(slots, most):
    check(drawn_case(150, 90, slots, most), CACHES["belady"]())


@given(cases(), st.integers(0, 2**53 - 1))
@settings(max_examples=30, deadline=None)
def test_random_is_its_rule_with_any_seed(case, seed):
    check(case, Random(seed))


@given(cases(most=20), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_s3fifo_is_its_rule_with_any_share(case, share):
    check(case, S3Fifo(share))


seconds = st.floats(1e-8, 1e-3)


@st.composite
def beliefs(draw, neurons: int) -> Beliefs:
    costs = LayerCosts(*[draw(seconds) for _ in LayerCosts._fields])
    exact = draw(st.booleans())
    costs = costs._replace(
        neuron_bytes=24576.0,
        gate_bytes=8192.0 * exact,
        cpu_gate_seconds=costs.cpu_gate_seconds * exact,
        gpu_gate_seconds=costs.gpu_gate_seconds * exact,
        dram_bytes_per_second=draw(st.floats(1e8, 1e12)),
    )
    return Beliefs(neurons, draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.booleans()), costs)


@given(st.data(), cases(most=30))
@settings(max_examples=200, deadline=None)
def test_time_saved_is_its_rule_at_any_cost(data, case):
    believed = data.draw(beliefs(case.neurons))
    layer = data.draw(st.integers(0, 1))
    cache = TimeSaved(data.draw(st.floats(0.5, 40)), data.draw(st.floats(0.5, 40)))
    spec = replace(case.spec, layers=2)
    resident = as_words(case.resident, case.neurons)
    placement = Placement(case.neurons, np.array([resident, resident]))
    state = cache.init(spec, placement, np.repeat(case.frequency, 2, axis=0))[layer]
    naive = NaiveTimeSaved(case, cache, believed, layer)
    for active, window in zip(case.active, case.windows, strict=True):
        packed = as_words(active, case.neurons)
        moved, state = decide(cache, cache.parameters(believed), state, resident, packed, window)
        expected = naive.step(as_set(resident), active, window, [])
        assert (moved.fetch.tolist(), moved.evict.tolist()) == expected
        exchange(resident, moved)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Random(-1), "random: seed is -1; it must be at least 0 and below 2"),
        (lambda: S3Fifo(1.5), "s3fifo: share is 1.5; it must be between 0 and 1"),
        (lambda: TimeSaved(horizon=0.1), "time_saved: horizon is 0.1; it must be between 0.5 and 1000"),
        (lambda: TimeSaved(trailing=float("nan")), "time_saved: trailing is nan; it must be between"),
    ],
)
def test_bad_values_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        wrong()


def test_random_differs_by_seed_layer_and_token():
    case = Case(130, 2**65 - 1, 0, [(2**130 - 2**65, 5), (2**130 - 2**65, 5)])
    first, second, _ = (moved for *_, moved, _ in case.play(Random(1)))
    other = next(iter(case.play(Random(2))))[3]
    assert len({tuple(moved.fetch.tolist()) for moved in (first, second, other)}) == 3
    seeds = Random().init(
        replace(case.spec, layers=3), Placement(130, np.zeros((3, 3), np.uint64)), case.frequency
    )
    assert len(set(seeds[:, 0, 0].tolist())) == 3


# libcachesim, one access after the other


@given(st.integers(2, 20), st.lists(st.integers(0, 19), min_size=1, max_size=30), st.data())
@settings(max_examples=60, deadline=None)
def test_lfu_hits_as_libcachesims_with_one_neuron_a_token(neurons, stream, data):
    """One neuron a token is one access: then set-wise and per-access LFU are the same rule.

    Up to two things. Ours counts a neuron also while it is not resident, libcachesim's LFU starts anew at 1
    when it is inserted: so the stream here brings nobody back that was evicted. And ours breaks ties by the
    lowest id, libcachesim's by age: so only the number of hits before the first eviction among equals is
    compared. With whole sets no per-access cache is the same at all: an access may push out a neuron of its
    own token, which our step never does, as a layer uses its set at once.
    """
    slots = data.draw(st.integers(1, neurons - 1))
    stream = [i % neurons for i in stream]
    case = Case(neurons, 2**slots - 1, 0, [(1 << i, 1) for i in stream])
    case.frequency = np.zeros((1, neurons), np.float32)
    peer = libcachesim.LFU(cache_size=slots, hashpower=8)
    hits, count, inside, gone = 0, dict.fromkeys(range(neurons), 0), set(range(slots)), set()
    for i in range(slots):
        peer.get(libcachesim.Request(obj_id=i, obj_size=1))
    for step, (resident, active, _, moved, _) in enumerate(case.play(CACHES["lfu"]())):
        if moved is None:
            break
        (i,) = active
        least = [j for j in inside if count[j] == min(count[j] for j in inside)]
        if i in gone or (i not in inside and len(least) > 1) or step >= 31:
            break
        assert as_set(resident) == inside
        hit = bool(peer.get(libcachesim.Request(obj_id=i, obj_size=1)))
        assert hit == (i in inside)
        hits += hit
        if not hit:
            inside = inside - set(least) | {i}
            gone |= set(least)
        count[i] += 1


def test_a_whole_set_at_once_hits_more_than_one_access_after_the_other():
    """Why the steps are set-wise: in index order a large active set flushes what LRU would need next."""
    rng = np.random.default_rng(0)
    popular = rng.beta(0.6, 1.4, 300)
    active = [set(np.flatnonzero(rng.random(300) < popular).tolist()) for _ in range(64)]
    case = Case(300, 2**100 - 1, 0, [(sum(1 << i for i in a), 300) for a in active])
    hits, _ = case.counts(CACHES["lru"]())
    # what was resident at the start of a step and used in it, without what was fetched for it
    kept = sum(len(as_set(resident) & a) for resident, a, *_ in case.play(CACHES["lru"]()))
    peer = libcachesim.LRU(cache_size=100, hashpower=10)
    one_by_one = sum(
        bool(peer.get(libcachesim.Request(obj_id=i, obj_size=1))) for a in active for i in sorted(a)
    )
    assert one_by_one < 0.9 * kept < hits


# the clairvoyant bound


small = cases(sizes=(2, 3, 4, 5, 6), least=1, most=7)


@given(small)
@settings(max_examples=60, deadline=None)
def test_the_minimum_cost_flow_is_what_trying_every_placement_finds(case):
    packed = np.array([[i in a for i in range(case.neurons)] for a in case.active])
    resident = np.array([i in case.resident for i in range(case.neurons)])
    assert clairvoyant_bound(packed, resident, case.windows) == reachable(case, case.windows)[0]


@given(small)
@settings(max_examples=60, deadline=None)
def test_no_policy_exceeds_the_bound(case):
    most = reachable(case, case.windows)[0]
    for name, cache in CACHES.items():
        assert case.counts(cache())[0] <= most, name


@given(cases(most=12))
@settings(max_examples=60, deadline=None)
def test_each_hit_was_fetched_or_kept_since_the_use_before(case):
    packed = np.array([[i in a for i in range(case.neurons)] for a in case.active])
    resident = np.array([i in case.resident for i in range(case.neurons)])
    gaps = gaps_between_uses(packed, resident)
    most = sum(min(len(a), len(case.resident)) for a in case.active)
    for name, cache in CACHES.items():
        hits, fetched = case.counts(cache())
        assert hits <= most_hits(gaps, len(case.resident) * len(case.active), fetched, most), name


def test_gaps_are_counted():
    packed = np.array([[1, 0, 0], [0, 0, 1], [1, 0, 1]], bool)
    # neuron 0 was used just before the first token, then there and two tokens later; 2 at the second and the third
    assert gaps_between_uses(packed, np.array([True, True, False])).tolist() == [0, 2, 1, 0]
    assert gaps_between_uses(packed, np.array([False, True, True])).tolist() == [0, 1, 2, 0]
    # with 4 slot-tokens the two gaps of 1 fit, the one of 2 too; 3 leave no room for it, less so with a fetch
    gaps = np.array([0, 2, 1, 0])
    assert [most_hits(gaps, room, 0, 9) for room in (4, 3, 1)] == [3, 2, 1]
    assert most_hits(gaps, 4, 1, 9) == 3
    assert most_hits(gaps, 4, 0, 2) == 2


@given(cases(most=12))
@settings(max_examples=60, deadline=None)
def test_belady_hits_no_less_than_any_policy_when_the_window_does_not_bind(case):
    for slots in {1, case.neurons // 3, case.neurons // 2, case.neurons - 1}:
        case.resident = set(range(slots))
        hits, _ = case.counts(CACHES["belady"](), free(case))
        for name, cache in CACHES.items():
            assert hits >= case.counts(cache(), free(case))[0], (name, slots)


@pytest.mark.parametrize("window", [1, 2, 4, 8, 16, 32, 64])
def test_belady_hits_more_than_any_policy_on_a_skewed_trace_at_every_window(window):
    """No theorem where the window binds, but what a trace with popularity shows."""
    case = drawn_case(120, 200, 60, 0, seed=3)
    windows = [window] * 120
    hits = case.counts(CACHES["belady"](), windows)[0]
    for name, cache in CACHES.items():
        assert hits >= case.counts(cache(), windows)[0], name


def test_belady_comes_within_a_percent_of_the_exact_bound():
    for seed, window in [(1, 1), (2, 2), (3, 4)]:
        case = drawn_case(24, 40, 14, 0, seed=seed)
        packed = np.array([[i in a for i in range(40)] for a in case.active])
        resident = np.array([i in case.resident for i in range(40)])
        most = clairvoyant_bound(packed, resident, [window] * 24)
        assert 0.97 * most <= case.counts(CACHES["belady"](), [window] * 24)[0] <= most


# what it costs and saves

SPEC = replace(catalogue_models()["relullama-7b"], layers=6)
CHURN = Statistics(0.3, popularity_sd=0.0, sequence_sd=0.0, persistence=0.0)
SKEWED = Statistics(0.3, popularity_sd=1.4, sequence_sd=0.7, persistence=0.0, mismatch=0.9)


def plan_for(trace, statistics, machine, share=0.3, **options) -> Plan:
    vram = budget_for_share(trace.spec, machine, share)
    return make_plan(trace, machine, vram, frequency=profile(trace.spec, statistics), **options)


def seconds_of(plan: Plan, trace, cache: str, machine=None) -> float:
    return simulate(replace(plan, cache={"name": cache}), trace, machine, spans=False).timeline.seconds


@pytest.mark.parametrize("machine", ["pc-low", "pc-high"])
@pytest.mark.parametrize(("prediction", "activation"), [("previous", "exact"), ("oracle", "predicted")])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_no_policy_is_faster_than_the_bound(machine, prediction, activation, share):
    trace = synth(SPEC, SKEWED, 24)
    plan = plan_for(trace, SKEWED, load_machine(machine), share, prediction=prediction, activation=activation)
    for window in (None, 100):
        most = 24 / speed_bound(replace(plan, window=window), trace)
        for name in CACHES:
            assert seconds_of(replace(plan, window=window), trace, name) >= most * (1 - 1e-9), (name, window)


def slow_link(name: str = "pc-low", bytes_per_second: float = 1e9, schedule_seconds: float = 1e-6):
    """A machine whose link is the bottleneck, and whose scheduler is quick, so that it is not what is
    measured."""
    machine = load_machine(name)
    link = replace(machine.h2d, bytes_per_second=bytes_per_second)
    schedule = replace(machine.cpu.schedule, fixed_seconds=schedule_seconds)
    return replace(machine, h2d=link, cpu=replace(machine.cpu, schedule=schedule))


@pytest.mark.parametrize("window", [None, 3000])
def test_where_the_link_binds_and_predictions_are_poor_it_is_as_fast_as_static(window):
    """Case 13: what was active at the last token says nothing, and a copy takes 25 us for the CPU's 0.4."""
    trace = synth(SPEC, CHURN, 48)
    plan = plan_for(trace, CHURN, slow_link(), window=window)
    static = seconds_of(plan, trace, "static")
    run = simulate(replace(plan, cache={"name": "time_saved"}), trace, spans=False)
    assert run.timeline.seconds <= 1.01 * static
    assert len(run.fetch) < 0.01 * run.work[:, :, :2].sum()
    if window:
        assert seconds_of(plan, trace, "hot_predicted") > 1.5 * static


def test_a_poor_prediction_alone_stops_it_where_copies_cost():
    """On PC-Low the CPU and the link want more than the DRAM gives: a copy in vain costs CPU time."""
    trace = synth(SPEC, CHURN, 96)
    plan = plan_for(trace, CHURN, load_machine("pc-low"))
    run = simulate(replace(plan, cache={"name": "time_saved"}), trace, spans=False)
    assert run.work[48:, :, 2].sum() < 0.001 * run.work[48:, :, :2].sum()


def test_it_saves_time_where_the_profile_is_wrong():
    trace = synth(SPEC, SKEWED, 96)
    for name in ("pc-low", "pc-high"):
        plan = plan_for(trace, SKEWED, load_machine(name))
        for prediction, activation in (("previous", "exact"), ("oracle", "predicted")):
            made = replace(plan, prediction=prediction, activation=activation)
            ours = seconds_of(made, trace, "time_saved")
            assert ours < seconds_of(made, trace, "static"), (name, prediction)
            assert ours < seconds_of(made, trace, "hot_predicted"), (name, prediction)


def test_a_layer_that_cannot_be_predicted_falls_back():
    """One layer's sets have nothing to do with its last ones; the others keep what they learn."""
    trace, noise = synth(SPEC, SKEWED, 96), synth(SPEC, CHURN, 96, seed=1)
    active = trace.active.copy()
    active[:, 3] = noise.active[:, 3]
    mixed = replace(trace, active=active)
    plan = plan_for(mixed, SKEWED, load_machine("pc-low"))
    moved = (
        simulate(replace(plan, cache={"name": "time_saved"}), mixed, spans=False).work[32:, :, 2].sum(axis=0)
    )
    assert moved[3] < 0.1 * np.median(moved)


def test_the_first_layer_has_nothing_to_hide_behind():
    """Layer 0 of a real model has cosine -0.14 to the next: its own prediction comes when it is needed."""
    trace = synth(SPEC, SKEWED, 48)
    plan = plan_for(trace, SKEWED, load_machine("pc-high"), prediction="oracle", activation="predicted")
    moved = simulate(replace(plan, cache={"name": "time_saved"}), trace, spans=False).work[:, :, 2].sum(axis=0)
    assert moved[0] < 0.2 * moved[1:].min()


@pytest.mark.parametrize("machine", ["pc-low", "pc-high"])
def test_at_lookahead_0_the_cpus_part_of_the_layer_hides_copies(machine):
    """While the CPU computes the GPU waits anyhow."""
    trace = synth(SPEC, SKEWED, 48)
    made = plan_for(trace, SKEWED, load_machine(machine), prediction="oracle", activation="predicted", lookahead=0)
    ours = seconds_of(made, trace, "time_saved")
    assert ours < min(seconds_of(made, trace, name) for name in ("static", "hot_predicted"))


@pytest.mark.parametrize("machine", ["pc-low", "pc-high"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_layers_are_made_whole_where_little_is_missing(machine, share):
    """Of the real ReLU model one prefetch can bring all that is missing: no CPU part, no crossing, no merge."""
    seen, trace = Trace.load("traces/smollm2-relu-small").hold_out(48)
    machine = load_machine(machine)
    vram = budget_for_share(trace.spec, machine, share)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of the model would fit
        plan = make_plan(seen, machine, vram, prediction="oracle", activation="predicted")
    whole = {}
    for name in ("static", "hot_predicted", "time_saved"):
        run = simulate(replace(plan, cache={"name": name}), trace, spans=False)
        whole[name] = (run.work[:, :, 1] == 0).mean()
    assert whole["time_saved"] > max(whole["static"], 0.9 * whole["hot_predicted"])
    ours = seconds_of(plan, trace, "time_saved")
    assert ours < 1.01 * min(seconds_of(plan, trace, name) for name in ("static", "hot_predicted"))


def test_the_dram_share_that_a_copy_takes_from_the_cpu():
    """CPU 40 GB/s and link 12 want 52 of 46 GB/s: the link gets its 12, the CPU 34, 15% less."""
    costs = FREE.costs._replace(
        neuron_bytes=24e3, gate_bytes=8e3, cpu_neuron_seconds=16e3 / 40e9, prefetch_neuron_seconds=2e-6
    )
    assert slowed_share(costs._replace(dram_bytes_per_second=46e9)) == pytest.approx(0.15)
    assert slowed_share(costs._replace(dram_bytes_per_second=96e9)) == 0
    # with 20 GB/s both get half of what both want more of
    fast = costs._replace(prefetch_neuron_seconds=24e3 / 15e9, dram_bytes_per_second=20e9)
    assert slowed_share(fast) == pytest.approx(0.75)
    assert slowed_share(FREE.costs) == 0
