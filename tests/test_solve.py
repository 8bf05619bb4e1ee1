"""Solvers: greedy is the optimum it says, the ILP is certified, and a plan holds what was asked."""

import itertools
import re
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dinfer import bits
from dinfer.errors import InputError, PlanWarning
from dinfer.machine import LayerCosts, Machine, layer_costs, load_machine
from dinfer.model import ModelSpec, load_model
from dinfer.plan import Plan
from dinfer.solve.budget import budget_for_share, memory_breakdown
from dinfer.solve.greedy import greedy, group_counts, served_frequency
from dinfer.solve.ilp import _broken, _Constraints, ilp, layer_seconds, minimum_slots, sync_seconds
from dinfer.solve.planner import make_plan
from dinfer.trace import Trace

ZERO = LayerCosts(*[0.0] * len(LayerCosts._fields))
COSTS = ZERO._replace(
    gpu_fixed_seconds=3e-6,
    gpu_gate_seconds=1e-7,
    gpu_neuron_seconds=2e-7,
    cpu_fixed_seconds=5e-6,
    cpu_gate_seconds=2e-6,
    cpu_neuron_seconds=4e-6,
    state_down_seconds=1e-6,
    state_up_seconds=1e-6,
    merge_seconds=1e-6,
    gate_bytes=8.0,
)
"""A CPU twenty times slower than the GPU, and fixed parts worth one or two neurons."""


def frequencies(layers: int, neurons: int) -> st.SearchStrategy[np.ndarray]:
    """Shares of 64 tokens, with ties."""
    counts = hnp.arrays(np.int64, (layers, neurons), elements=st.integers(0, 64))
    return counts.map(lambda c: (c / 64).astype(np.float32))


def served(frequency: np.ndarray, slots: np.ndarray) -> float:
    hottest = -np.sort(-frequency.astype(float), axis=1)
    return sum(float(row[:n].sum()) for row, n in zip(hottest, slots, strict=True))


def refuses(message: str):
    return pytest.raises(InputError, match=f"^{re.escape(message)}$")


# greedy


def test_greedy_takes_the_hottest_neurons_of_all_layers():
    frequency = np.array([[0.9, 0.1, 0.5], [0.8, 0.7, 0.2]], np.float32)
    assert greedy(frequency, 0).tolist() == [0, 0]
    assert greedy(frequency, 3).tolist() == [1, 2]
    assert greedy(frequency, 4).tolist() == [2, 2]
    assert greedy(frequency, 100).tolist() == [3, 3]


def test_greedy_prefers_the_lower_layer_among_equals():
    assert greedy(np.full((3, 4), 0.5), 6).tolist() == [4, 2, 0]


@given(frequencies(3, 5), st.integers(0, 16))
def test_greedy_is_the_optimum_with_equal_sizes(frequency, capacity):
    slots = greedy(frequency, capacity)
    best = -np.sort(-frequency.astype(float), axis=None)[:capacity].sum()
    assert slots.sum() == min(capacity, frequency.size)
    assert served(frequency, slots) == pytest.approx(best, abs=1e-9)


@given(frequencies(2, 5), st.integers(0, 30), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_greedy_with_unequal_sizes_misses_less_than_one_neuron(frequency, capacity, sizes):
    slots = greedy(frequency, capacity, np.array(sizes))
    assert (slots * sizes).sum() <= capacity
    fitting = [
        served(frequency, pair)
        for pair in itertools.product(range(6), repeat=2)
        if np.dot(pair, sizes) <= capacity
    ]
    assert served(frequency, slots) >= max(fitting) - frequency.max() - 1e-9


def test_greedy_fills_up_with_the_cheaper_layer():
    # 1.0 / 3 a byte first, then there is room for the small ones only
    frequency = np.array([[1.0, 1.0], [0.3, 0.2]])
    assert greedy(frequency, 5, np.array([3, 1])).tolist() == [1, 2]


def test_greedy_takes_groups_and_a_smaller_last_one():
    frequency = np.array([[0.9, 0.8, 0.7, 0.6, 0.5], [0.4, 0.3, 0.2, 0.1, 0.0]])
    assert greedy(frequency, 5, group=2).tolist() == [5, 0]
    assert greedy(frequency, 4, group=2).tolist() == [4, 0]
    assert greedy(frequency, 3, group=2).tolist() == [2, 0]
    assert group_counts(5, 2).tolist() == [0, 2, 4, 5]
    assert group_counts(4, 2).tolist() == [0, 2, 4]


def test_rounding_does_not_break_the_order_within_a_layer():
    frequency = np.full((2, 67), 0.1)  # sums of 8 and of 3 differ in the last digit of their means
    assert greedy(frequency, 64, group=8).tolist() == [64, 0]


@pytest.mark.parametrize(("capacity", "group"), [(-1, 1), (1, 0)])
def test_greedy_refuses(capacity, group):
    with refuses(f"capacity {capacity} must be 0 or more and group {group} at least 1"):
        greedy(np.zeros((1, 2)), capacity, group=group)


@pytest.mark.parametrize("layers", [2, 10, 11, 32, 100])
def test_counts_of_a_layer_stay_with_their_layer(layers):
    """Case 7: not in the order of their names as text."""
    frequency = np.zeros((layers, 128), np.float32)
    for layer in range(layers):
        frequency[layer, : layer + 1] = 1.0
    wanted = list(range(1, layers + 1))
    assert greedy(frequency, sum(wanted)).tolist() == wanted
    if layers <= 32:
        assert ilp(frequency, sum(wanted), ZERO, group=1, min_slots=0).slots.tolist() == wanted
    active = np.broadcast_to(bits.pack(frequency > 0), (1, layers, 2))
    spec = replace(SPEC, layers=layers, neurons=128)
    trace = make_trace(spec, active)
    share = sum(wanted) / (layers * 128)
    plan = make_plan(trace, BOX, budget_for_share(spec, BOX, share), lookahead=0)
    assert plan.placement.slots.tolist() == wanted
    assert (plan.placement.resident == active[0]).all()


# ilp


@settings(max_examples=25, deadline=None)
@given(frequencies(3, 12), st.integers(0, 40), st.sampled_from([1, 4]))
def test_greedy_equals_the_ilp_without_minimum_and_window(frequency, capacity, group):
    solution = ilp(frequency, capacity, COSTS, group=group, min_slots=0)
    best = served(frequency, greedy(frequency, capacity, group=group))
    assert solution.objective == pytest.approx(best, abs=1e-6)
    assert served(frequency, solution.slots) == pytest.approx(best, abs=1e-6)
    assert solution.slots.sum() <= capacity
    assert (solution.status, solution.solver) == ("optimal", "ilp")
    assert solution.gap == pytest.approx(0, abs=1e-6)


def brute_force(frequency, capacity, value, minimum=0, window=np.inf):
    """The best value over all 2 ** 8 sets of neurons that keep the constraints, None if none."""
    found = []
    for members in itertools.product((False, True), repeat=frequency.size):
        chosen = np.reshape(members, frequency.shape)
        slots, cold = chosen.sum(axis=1), np.where(chosen, 0, frequency).sum(axis=1)
        legal = slots.sum() <= capacity and ((slots == 0) | (slots >= minimum)).all()
        if legal and (cold <= window + 1e-9).all():
            found.append(value(chosen))
    return max(found, default=None)


@settings(max_examples=20, deadline=None)
@given(
    frequencies(2, 4),
    st.integers(0, 8),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.one_of(st.none(), st.integers(0, 4)),
)
def test_the_ilp_equals_brute_force_over_8_neurons(frequency, capacity, minimum, window):
    best = brute_force(
        frequency,
        capacity,
        lambda chosen: np.where(chosen, frequency, 0).sum(dtype=float),
        np.array(minimum),
        np.inf if window is None else window,
    )
    settings_ = {"group": 1, "min_slots": np.array(minimum), "window": window}
    if best is None:
        with pytest.raises(InputError, match="^no placement of"):
            ilp(frequency, capacity, ZERO, **settings_)
        return
    solution = ilp(frequency, capacity, ZERO, **settings_)
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(best, abs=1e-6)
    assert solution.bound >= solution.objective


@settings(max_examples=20, deadline=None)
@given(frequencies(2, 4), st.integers(0, 8))
def test_the_latency_objective_equals_brute_force_over_8_neurons(frequency, capacity):
    def faster(chosen: np.ndarray) -> float:
        slots, hot = chosen.sum(axis=1), np.where(chosen, frequency, 0).sum(axis=1, dtype=float)
        rest = frequency.sum(axis=1, dtype=float) - hot
        seconds = 0.0
        for n, a, b in zip(slots, hot, rest, strict=True):
            gpu = 3e-6 + n * 1e-7 + a * 2e-7 if n else 0
            cpu = 5e-6 + (4 - n) * 2e-6 + b * 4e-6 + 3e-6 if n < 4 else 0
            seconds += max(gpu, cpu)
        return -seconds

    solution = ilp(frequency, capacity, COSTS, group=1, objective="latency")
    assert solution.objective == pytest.approx(-brute_force(frequency, capacity, faster), rel=1e-6)
    assert solution.bound <= solution.objective
    assert solution.gap >= 0


def test_the_minimum_pays_for_the_sync():
    """PowerInfer Eq 4 by hand: the GPU saves 1.9 us a neuron and 3.8 us an active one."""
    assert sync_seconds(COSTS) == pytest.approx(3e-6)
    frequency = np.array([[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    # fixed and sync are 6 us: 2 x (1.9 + 1.9); 4 x 1.9; 1 x 5.7 + 1.9
    assert minimum_slots(frequency, COSTS).tolist() == [2, 4, 2]


def test_a_whole_layer_needs_no_sync():
    slow = COSTS._replace(merge_seconds=1.0)
    assert minimum_slots(np.full((1, 6), 0.5), slow).tolist() == [6]
    useless = slow._replace(gpu_gate_seconds=1.0)
    assert minimum_slots(np.full((1, 6), 0.5), useless).tolist() == [7]
    assert ilp(np.full((1, 6), 0.5), 6, useless, group=1).slots.tolist() == [0]


def test_the_default_minimum_leaves_no_layer_that_does_not_pay():
    frequency = np.array([[1.0] * 6 + [0.3] * 2, [0.9] + [0.0] * 7])
    assert minimum_slots(frequency, COSTS).tolist() == [2, 2]
    assert ilp(frequency, 8, COSTS, group=1, min_slots=0).slots.tolist() == [7, 1]
    assert ilp(frequency, 8, COSTS, group=1).slots.tolist() == [6, 2]
    assert ilp(frequency, 8, COSTS, group=1, min_slots=3).slots.tolist() == [8, 0]


def test_the_window_moves_slots_to_a_colder_layer():
    frequency = np.array([[0.9] * 4, [0.5] * 4])
    assert ilp(frequency, 4, ZERO, group=1, min_slots=0).slots.tolist() == [4, 0]
    assert ilp(frequency, 4, ZERO, group=1, min_slots=0, window=1.9).slots.tolist() == [3, 1]


def test_a_window_that_no_placement_keeps_is_refused_with_the_next_that_one_does():
    frequency = np.full((2, 8), 0.5)
    message = (
        "no placement of 4 neurons keeps the expected fetches of a token within 2 neurons in "
        "every layer; the smallest window that one keeps is 3, or raise --vram"
    )
    with refuses(message):
        ilp(frequency, 4, ZERO, group=1, min_slots=0, window=2)
    assert ilp(frequency, 4, ZERO, group=1, min_slots=0, window=3).slots.tolist() == [2, 2]


def test_two_layers_of_two_experts_take_the_same_time_either_way():
    """Case 3: uniform independent routing, the CPU takes 1 s and the GPU 0.01 s a layer."""
    costs = ZERO._replace(gpu_neuron_seconds=0.01, cpu_neuron_seconds=1.0)
    routes = np.array(list(itertools.product((0, 1), repeat=2)))  # the expert of each layer

    def seconds(slots: list[int]) -> np.ndarray:
        hit = (routes < slots).astype(int)  # the lower experts are resident
        return layer_seconds(np.array(slots), hit, 1 - hit, 2, costs).sum(axis=1)

    assert seconds([2, 0]).mean() == pytest.approx(1.01)
    assert seconds([1, 1]).mean() == pytest.approx(1.01)
    assert (1 / seconds([1, 1])).mean() == pytest.approx(13.12, abs=0.01)  # the mean that lies


def test_a_side_without_work_takes_no_time():
    three = np.array([0, 2, 4])
    seconds = layer_seconds(three, three / 2, 2 - three / 2, 4, COSTS)
    assert seconds[0] == pytest.approx(5e-6 + 4 * 2e-6 + 2 * 4e-6 + 3e-6)  # all on the CPU
    assert seconds[2] == pytest.approx(3e-6 + 4 * 1e-7 + 2 * 2e-7)  # all on the GPU
    predicted = layer_seconds(three, 0 * three, 0 * three, 4, COSTS._replace(gate_bytes=0.0))
    assert predicted.tolist() == [0, 0, 0]


def test_latency_and_frequency_want_different_layers():
    # layer 0 is hotter, but the whole of layer 1 on the GPU saves its CPU and its sync
    frequency = np.array([[0.3] * 4, [0.2] * 4])
    costs = COSTS._replace(cpu_fixed_seconds=1e-3)
    slow = ilp(frequency, 7, costs, group=1, min_slots=0)
    fast = ilp(frequency, 7, costs, group=1, objective="latency")
    assert slow.slots.tolist() == [4, 3]
    assert 4 in fast.slots
    assert fast.bound <= fast.objective <= 2 * 1.1e-3


@pytest.mark.parametrize("objective", ["frequency", "latency"])
def test_a_7b_is_solved_to_the_optimum(objective):
    """5,504 groups of 64 at the paper's machine, with the minimum: CBC in under a second."""
    spec, machine = load_model("relullama-7b"), load_machine("pc-low")
    random = np.random.default_rng(7)
    frequency = random.beta(0.3, 1.0, (spec.layers, spec.neurons)).astype(np.float32)
    costs = layer_costs(spec, machine)
    solution = ilp(frequency, 140_000, costs, objective=objective)
    assert solution.status == "optimal"
    assert 0 <= solution.gap < 1e-3
    assert solution.slots.sum() <= 140_000
    assert ((solution.slots == 0) | (solution.slots >= minimum_slots(frequency, costs))).all()
    if objective == "frequency":
        best = served(frequency, greedy(frequency, 140_000))
        assert 0.999 * best <= solution.objective <= best


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": -1}, "ilp: capacity -1 must be 0 or more, group 1 at least 1 and "),
        ({"group": 0}, "ilp: capacity 3 must be 0 or more, group 0 at least 1 and "),
        ({"time_limit": 0}, "ilp: capacity 3 must be 0 or more, group 1 at least 1 and "),
        ({"objective": "speed"}, "objective 'speed' is not one of frequency, latency"),
        ({"frequency": np.zeros(4)}, "frequency has shape (4,); it must be [layer, neuron]"),
    ],
)
def test_the_ilp_refuses(change, message):
    arguments = {"frequency": np.zeros((2, 4)), "capacity": 3, "costs": COSTS, "group": 1}
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        ilp(**{**arguments, **change})


# certified


FREQUENCY = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2]])


def cbc_that(monkeypatch, change):
    """Let CBC solve, then ``change(problem)`` before anyone looks."""
    solve = pulp.LpProblem.solve

    def changed(problem, solver):
        status = solve(problem, solver)
        if solver.mip:
            change(problem)
        return status

    monkeypatch.setattr(pulp.LpProblem, "solve", changed)


def stopped(problem):
    """What PuLP reports when CBC stops at its limit with an incumbent: Optimal, but found only."""
    problem.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)


def choose(*chosen):
    """Put the columns ``chosen`` [layer] in place of CBC's."""

    def change(problem):
        for variable in problem.variables():
            _, layer, k = variable.name.split("_")
            variable.varValue = float(chosen[int(layer)] == int(k))

    return change


def test_a_stopped_cbc_is_never_called_optimal(monkeypatch):
    """Case 11."""
    cbc_that(monkeypatch, stopped)
    solution = ilp(FREQUENCY, 5, ZERO, group=1, min_slots=0)
    assert (solution.status, solution.solver) == ("feasible", "ilp")
    assert solution.slots.tolist() == [4, 1]


def test_a_stopped_cbc_that_is_worse_than_greedy_loses(monkeypatch):
    def early(problem):
        stopped(problem)
        choose(1, 4)(problem)

    cbc_that(monkeypatch, early)
    message = "ilp: CBC stopped after 2 s with less than greedy finds; greedy's slots are taken"
    with pytest.warns(PlanWarning, match=f"^{re.escape(message)}$"):
        solution = ilp(FREQUENCY, 5, ZERO, group=1, min_slots=0, time_limit=2)
    assert (solution.status, solution.solver) == ("heuristic", "greedy")
    assert solution.slots.tolist() == [4, 1]
    assert solution.objective == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("chosen", "trouble"),
    [
        ((4, 2), "CBC places 6 neurons where 5 fit"),
        ((9, 9), "CBC has no solution (optimal)"),
    ],
)
def test_an_answer_that_is_none_is_not_taken(monkeypatch, chosen, trouble):
    cbc_that(monkeypatch, choose(*chosen))
    message = f"ilp: {trouble}; greedy's slots are taken"
    with pytest.warns(PlanWarning, match=f"^{re.escape(message)}$"):
        solution = ilp(FREQUENCY, 5, ZERO, group=1, min_slots=0)
    assert (solution.status, solution.slots.tolist()) == ("heuristic", [4, 1])


def test_a_bound_below_the_solution_is_not_believed(monkeypatch):
    monkeypatch.setattr(pulp, "value", lambda objective: 1.0)
    message = "ilp: CBC's bound is below its own solution; greedy's slots are taken"
    with pytest.warns(PlanWarning, match=f"^{re.escape(message)}$"):
        solution = ilp(FREQUENCY, 5, ZERO, group=1, min_slots=0)
    assert (solution.status, solution.objective) == ("heuristic", pytest.approx(3.5))


@pytest.mark.parametrize(
    ("slots", "minimum", "window", "broken"),
    [
        ([4, 1], 0, None, ""),
        ([4, 1], 1, 0.9, ""),
        ([0, 4], 3, None, ""),
        ([4, 2], 0, None, "CBC places 6 neurons where 5 fit"),
        ([4, 1], 2, None, "CBC gives a layer fewer slots than its minimum"),
        ([1, 4], 0, 2, "CBC leaves 2.1 expected fetches in a layer, the window is 2"),
    ],
)
def test_constraints_are_checked_on_the_frequencies(slots, minimum, window, broken):
    constraints = _Constraints(FREQUENCY, 5, np.array([minimum, minimum]), window)
    assert _broken(np.array(slots), constraints) == broken


def test_no_time_is_no_solution():
    """CBC itself, stopped before it has anything."""
    frequency = np.random.default_rng(1).beta(0.3, 1.0, (32, 2048))
    message = r"^ilp: CBC has no solution \(stopped without a solution\); greedy's slots are taken$"
    with pytest.warns(PlanWarning, match=message):
        solution = ilp(frequency, 20_000, COSTS, group=16, min_slots=50, time_limit=1e-9)
    assert solution.solver == "greedy"
    assert solution.slots.sum() <= 20_000
    assert ((solution.slots == 0) | (solution.slots >= 50)).all()
    assert 0 <= solution.gap < 1


def test_a_missing_cbc_is_said(monkeypatch):
    def fail(problem, solver):
        raise pulp.PulpSolverError("cannot execute cbc")

    monkeypatch.setattr(pulp.LpProblem, "solve", fail)
    message = "ilp: CBC has no solution (unusable (cannot execute cbc)); greedy's slots are taken"
    with pytest.warns(PlanWarning, match=f"^{re.escape(message)}$"):
        solution = ilp(FREQUENCY, 5, ZERO, group=1, min_slots=0)
    assert solution.slots.tolist() == [4, 1]


@settings(max_examples=15, deadline=None)
@given(
    frequencies(3, 9),
    st.integers(0, 27),
    st.integers(0, 10),
    st.integers(2, 9),
    st.sampled_from(["frequency", "latency"]),
)
def test_greedys_answer_keeps_the_constraints_too(frequency, capacity, minimum, window, objective):
    options = {"group": 2, "min_slots": minimum, "window": window, "objective": objective}
    with pytest.MonkeyPatch.context() as patch:
        cbc_that(patch, lambda problem: problem.assignStatus(0, pulp.LpSolutionNoSolutionFound))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PlanWarning)
                fallback = ilp(frequency, capacity, COSTS, **options)
        except InputError:
            return
    exact = ilp(frequency, capacity, COSTS, **options)
    assert fallback.slots.sum() <= capacity
    assert ((fallback.slots == 0) | (fallback.slots >= minimum)).all()
    rest = frequency.sum(axis=1, dtype=float)
    for layer, n in enumerate(fallback.slots):
        assert rest[layer] - served(frequency[[layer]], [n]) <= window + 1e-6
    sign = 1 if objective == "frequency" else -1
    assert sign * fallback.objective <= sign * exact.objective + 1e-9
    assert fallback.bound == pytest.approx(exact.bound, rel=1e-6)


def test_cbc_is_silent(capfd):
    ilp(FREQUENCY, 5, COSTS, group=1)
    assert capfd.readouterr() == ("", "")


# make_plan


SPEC = ModelSpec(
    name="tiny",
    family="llama",
    layers=4,
    hidden=8,
    neurons=96,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab=16,
    activation="relu",
    dtype="float32",
    compute_dtype="float32",
)
BOX = Machine.from_dict(
    {
        "name": "box",
        "gpu": {"name": "card", "memory_bytes": 10**8, "bytes_per_second": 1e10},
        "cpu": {"name": "chip", "memory_bytes": 10**9, "bytes_per_second": 1e9},
        "h2d": {"name": "up", "fixed_seconds": 1e-6, "bytes_per_second": 1e9},
        "d2h": {"name": "down", "fixed_seconds": 1e-6, "bytes_per_second": 1e9},
        "dram_bytes_per_second": 2e9,
    }
)


def make_trace(spec: ModelSpec, active: np.ndarray, **meta) -> Trace:
    n = len(active)
    columns = {"id": range(n), "sequence": 0, "position": range(n), "phase": "decode"}
    tokens = pd.DataFrame(columns).astype({"id": "int32", "sequence": "int32", "position": "int32"})
    return Trace(spec, tokens, active, {"kind": "recorded", **meta})


def random_trace(spec: ModelSpec = SPEC, **meta) -> Trace:
    random = np.random.default_rng(3)
    share = random.beta(0.5, 1.0, (spec.layers, spec.neurons))
    active = random.random((40, spec.layers, spec.neurons)) < share
    return make_trace(spec, bits.pack(active), **meta)


def half(spec: ModelSpec = SPEC) -> int:
    """The budget that holds half of the neurons."""
    return budget_for_share(spec, BOX, 0.5)


def test_a_plan_holds_the_hottest_half():
    trace = random_trace(weights="abc")
    plan = make_plan(trace, BOX, half())
    frequency = trace.frequency
    assert plan.placement.slots.tolist() == greedy(frequency, 192).tolist()
    members = bits.unpack(plan.placement.resident, 96)
    assert members.sum() == 192
    assert frequency[members].min() >= frequency[~members].max()
    assert plan.memory == memory_breakdown(SPEC, BOX, 512, half())
    assert plan.cache == {"name": "hot_predicted", "lam": 1.0, "margin": 0.1, "pinned": 0.5}
    assert (plan.trace, plan.weights, plan.thresholds) == (trace.fingerprint, "abc", ())
    assert (plan.vram_bytes, plan.context, plan.lookahead, plan.window) == (half(), 512, 1, None)
    objective = float(served(frequency, plan.placement.slots))
    assert plan.solver == {
        "name": "greedy",
        "objective": pytest.approx(objective),
        "bound": plan.solver["objective"],
        "gap": 0.0,
        "status": "optimal",
    }


@pytest.mark.parametrize("objective", ["frequency", "latency"])
def test_a_plan_by_the_ilp(objective, tmp_path):
    options = {"objective": objective, "group": 8}
    plan = make_plan(random_trace(), BOX, half(), solver="ilp", solver_options=options)
    assert plan.solver["name"] == "ilp"
    assert plan.solver["status"] == "optimal"
    assert plan.placement.slots.sum() <= 192
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_in_groups_says_how_far_it_is_from_single_neurons():
    plan = make_plan(random_trace(), BOX, half(), solver_options={"group": 32})
    assert plan.solver["status"] == "heuristic"
    assert 0 < plan.solver["gap"] < 0.2


@pytest.mark.parametrize("solver", ["greedy", "ilp"])
def test_everything_fits_and_is_resident(solver):
    """Case 9."""
    with pytest.warns(PlanWarning, match="^all of tiny fits on card with"):
        plan = make_plan(random_trace(), BOX, 10**8, solver=solver)
    assert plan.placement.slots.tolist() == [96] * 4


def test_all_but_one_neuron_leaves_one():
    plan = make_plan(random_trace(), BOX, budget_for_share(SPEC, BOX, 1.0) - 1)
    assert plan.placement.slots.sum() == 4 * 96 - 1


def test_the_rules_of_a_plan_are_those_asked_for():
    asked = {"lookahead": 2, "window": 9, "issue": "copy", "prediction": "oracle", "context": 64}
    cache = {"cache": "hot_predicted", "cache_parameters": {"lam": 2.0}}
    vram = budget_for_share(SPEC, BOX, 0.5, context=64)
    plan = make_plan(random_trace(), BOX, vram, activation="predicted", **asked, **cache)
    assert {name: getattr(plan, name) for name in asked} == asked
    assert plan.activation == "predicted"
    assert plan.cache["lam"] == 2.0


def test_another_dtype_gives_other_bytes():
    spec = SPEC.with_dtype("float16")
    plan = make_plan(random_trace(), BOX, half(spec), spec=spec)
    assert plan.placement.slots.sum() == 192
    assert plan.spec == spec
    assert half(spec) < half()


def test_thresholds_of_a_magnitude_kind_come_from_the_trace():
    silu = replace(SPEC, activation="silu")
    plan = make_plan(random_trace(silu, thresholds=[0.1, 0.2, 0.3, 0.4]), BOX, half())
    assert plan.thresholds == (0.1, 0.2, 0.3, 0.4)
    relu = make_plan(random_trace(thresholds=[0.0] * 4), BOX, half())
    assert relu.thresholds == ()


@pytest.mark.parametrize("meta", [{}, {"thresholds": [0.1]}])
def test_a_magnitude_kind_without_thresholds_is_refused(meta):
    """Case 18."""
    message = (
        "tiny is a silu model, in which no neuron is inactive by itself, and its trace has no "
        "magnitude threshold for each of its 4 layers; record it with a wanted sparsity"
    )
    with refuses(message):
        make_plan(random_trace(replace(SPEC, activation="silu"), **meta), BOX, half())


def test_a_relu_trace_makes_no_plan_for_a_silu_model():
    """Case 18."""
    silu = replace(SPEC, activation="silu", name="other")
    message = (
        f"trace is of tiny ({SPEC.fingerprint()}), the model is other ({silu.fingerprint()}); "
        "record a trace of this model"
    )
    with refuses(message):
        make_plan(random_trace(), BOX, half(), spec=silu)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"solver": "glpk"}, "solver 'glpk' is not one of greedy, ilp"),
        (
            {"cache": "mru"},
            "cache 'mru' is not one of belady, hot_predicted, lfu, lru, random, s3fifo, static, time_saved",
        ),
        ({"cache_parameters": {"lam": 0.1}}, "hot_predicted: lam is 0.1; it must be at least 0.5"),
        ({"lookahead": 4}, "lookahead is 4; it must be between 0 and 3 layers"),
        ({"lookahead": -1}, "lookahead is -1; it must be between 0 and 3 layers"),
        ({"window": -1}, "window is -1 neurons; it must be 0 or more, or left out to be sized"),
        ({"activation": "guess"}, "activation 'guess' is not one of exact, predicted"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(asked, message):
    with refuses(message):
        make_plan(random_trace(), BOX, half(), **asked)


def test_an_empty_trace_makes_no_plan():
    trace = make_trace(SPEC, np.zeros((0, 4, 2), np.uint64))
    with refuses("trace of tiny holds no tokens; record some before planning"):
        make_plan(trace, BOX, half())


def test_a_budget_below_the_dense_part_makes_no_plan():
    with pytest.raises(InputError, match=r"^budget 1000 B on card is below the .*raise --vram to "):
        make_plan(random_trace(), BOX, 1000)


def test_the_same_trace_gives_the_same_plan():
    plans = [make_plan(random_trace(), BOX, half(), solver="ilp") for _ in range(2)]
    assert plans[0] == plans[1]


def test_served_frequency_of_no_neuron_is_none():
    assert served_frequency(FREQUENCY, np.array([0, 4])).tolist() == [
        [0.0, pytest.approx(3.0)],
        [0.0, pytest.approx(1.4)],
    ]
