"""The peers against closed forms, the predictor against its quality, the thresholds against their error."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer import bits
from dinfer.errors import InputError
from dinfer.machine import Cost, Device, Link, Machine, layer_costs, load_machine
from dinfer.model import ModelSpec, load_model
from dinfer.policies import THRESHOLDS
from dinfer.policies.balanced import (
    ADDED,
    DROPPED,
    LOST,
    RECOVERED,
    Balanced,
    added_neurons,
    balance,
    dropped_neurons,
)
from dinfer.policies.words import count_split
from dinfer.record.presets import preset
from dinfer.record.synth import profile, synth
from dinfer.sim import simulate
from dinfer.sim.predictor import (
    Predictor,
    false_chance,
    implied_precision,
    predictor_bytes,
    predictor_rank,
    with_predictor,
)
from dinfer.systems import (
    SYSTEMS,
    cpu_share_of_ffn,
    dynamicinfer,
    fixed,
    neuron_plan,
    perfect,
    predict,
    resident_layers,
)
from dinfer.trace import Trace

SPEC = ModelSpec(
    "small",
    "llama",
    layers=4,
    hidden=64,
    neurons=200,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=100,
    activation="relu",
)
GPU = Device(
    "gpu", 2**30, context_bytes=1000, attention=Cost(1e-4, 1e9), kv=Cost(0, 1e9), gate=Cost(2e-5, 1e9),
    neuron=Cost(0, 1e9), head=Cost(3e-4, 1e9), merge=Cost(5e-5), predict=Cost(1e-5, 1e9),
)  # fmt: skip
CPU = Device(
    "cpu", 2**34, attention=Cost(0, 5e7), kv=Cost(0, 5e7), gate=Cost(3e-5, 4e7), neuron=Cost(0, 4e7),
    schedule=Cost(1e-5),
)  # fmt: skip
BOX = Machine("box", GPU, CPU, Link("up", 1e-5, 2e7), Link("down", 1e-5, 2e7), math.inf)
LAYER = SPEC.attention_bytes + SPEC.neurons * SPEC.neuron_bytes


def budget(spec: ModelSpec, neurons: float, rank: int = 0) -> int:
    """The budget that holds this share of all neurons beside the rest."""
    from dinfer.solve.budget import activation_bytes

    parts = [GPU.context_bytes, spec.dense_bytes, spec.kv_bytes(32), activation_bytes(spec, 32)]
    held = sum(parts) + predictor_bytes(spec, rank)
    held += math.ceil(neurons * spec.layers * spec.neurons) * spec.neuron_bytes
    return held + -(-held // 99)


@pytest.fixture(scope="module")
def small() -> Trace:
    return synth(SPEC, preset("relullama-7b"), 40, 2, prompt=8)


# dense systems


def dense_budget(layers: int, streamed: bool) -> int:
    """The budget that holds ``layers`` whole layers, and the room for a streamed one."""
    from dinfer.solve.budget import activation_bytes

    kv = SPEC.kv_bytes(32)
    fixed_bytes = GPU.context_bytes + SPEC.dense_bytes - SPEC.layers * SPEC.attention_bytes
    held = fixed_bytes + activation_bytes(SPEC, 32) + (kv if streamed else layers * kv // SPEC.layers)
    held += (layers + streamed) * LAYER
    return held + -(-held // 99)


def attention_seconds(trace: Trace) -> float:
    """Seconds of one layer's attention on the GPU, summed over tokens."""
    position = trace.tokens["position"].sum()
    return len(trace) * (1e-4 + SPEC.attention_bytes / 1e9) + position * SPEC.kv_bytes(1) / SPEC.layers / 1e9


@pytest.mark.parametrize("resident", [0, 1, 2, 4])  # with room for three and a streamed one, all four stay
def test_transformers_streams_the_layers_that_do_not_fit(small, resident):
    run = SYSTEMS["transformers"](small, BOX, dense_budget(resident, resident < 4), context=32, pageable=0.5)
    ffn = 2e-5 + SPEC.neurons * SPEC.neuron_bytes / 1e9
    head = 3e-4 + SPEC.head_bytes / 1e9
    streamed = (4 - resident) * (1e-5 + LAYER / 1e7)
    expected = 4 * attention_seconds(small) + len(small) * (4 * ffn + streamed + head)
    assert run.timeline.seconds == pytest.approx(expected, rel=1e-12)
    assert run.timeline.busy("h2d") == pytest.approx(len(small) * streamed, rel=1e-12)
    assert run.timeline.busy("cpu") == 0
    assert run.gpu_share == 1
    assert run.timeline.meta["system"] == "transformers"
    assert run.timeline.meta["memory"]["neurons"] == resident * SPEC.neurons * SPEC.neuron_bytes


def test_integer_weights_are_unpacked_in_every_layer():
    spec = replace(SPEC, dtype="int4")
    tokens = synth(spec, preset("relullama-7b"), 4, 1)
    plain, slow = (
        SYSTEMS["transformers"](tokens, BOX, GPU.memory_bytes, context=128, dequantise_bytes_per_second=rate)
        for rate in (math.inf, 1e6)
    )
    layer_bytes = spec.attention_bytes + spec.neurons * spec.neuron_bytes
    assert slow.timeline.seconds - plain.timeline.seconds == pytest.approx(
        4 * 4 * layer_bytes / 1e6, rel=1e-12
    )


@pytest.mark.parametrize("resident", [0, 1, 3, 4])
def test_llama_cpp_computes_the_first_layers_on_the_cpu(small, resident):
    run = SYSTEMS["llama.cpp"](small, BOX, dense_budget(resident, False), context=32)
    head = 3e-4 + SPEC.head_bytes / 1e9
    gpu = attention_seconds(small) + len(small) * (2e-5 + SPEC.neurons * SPEC.neuron_bytes / 1e9)
    cpu = len(small) * LAYER / 5e7 + small.tokens["position"].sum() * SPEC.kv_bytes(1) / SPEC.layers / 5e7
    crossing = (1e-5 + SPEC.hidden * 4 / 2e7) if resident < 4 else 0.0
    expected = resident * gpu + (4 - resident) * cpu + len(small) * (crossing + head)
    assert run.timeline.seconds == pytest.approx(expected, rel=1e-12)
    assert run.gpu_share == resident / 4
    assert run.work[0, :, 0].tolist() == [0] * (4 - resident) + [SPEC.neurons] * resident
    # KV goes with its layer
    assert run.timeline.meta["memory"]["kv"] == resident * SPEC.kv_bytes(32) // 4


def test_cpu_layers_take_the_longer_of_bytes_and_flops(small):
    """40 GB/s and 32 GB a token are 1.25 tok/s, whatever the threads could compute."""
    none = dense_budget(0, False)
    flops = 2.0 * (SPEC.attention_parameters + SPEC.neurons * 3 * SPEC.hidden)
    for rate, seconds in ((1e15, LAYER / 5e7), (1e6, flops / 1e6)):
        cpu = replace(CPU, attention=Cost(0, 5e7, rate), kv=Cost())
        run = SYSTEMS["llama.cpp"](small, replace(BOX, cpu=cpu), none, context=32)
        assert run.timeline.busy("cpu") == pytest.approx(len(small) * 4 * seconds, rel=1e-12)


def test_dense_memory_adds_up_to_the_budget():
    for stays in (True, False):
        for vram in (dense_budget(0, stays), dense_budget(2, stays) + 12345, 2**30):
            layers, memory = resident_layers(SPEC, BOX, vram, 32, stays)
            assert sum(memory.values()) == vram
            assert 0 <= layers <= 4
            assert min(memory.values()) >= 0


@pytest.mark.parametrize("system", ["transformers", "llama.cpp"])
def test_a_budget_that_cannot_be_is_refused(small, system):
    least = dense_budget(0, system == "transformers")
    with pytest.raises(
        InputError, match=r"budget .* on gpu is below the .* that context .* need; raise --vram"
    ):
        SYSTEMS[system](small, BOX, least - 200, context=32)
    with pytest.raises(InputError, match=r"more than the 1.00 GiB of gpu; lower --vram"):
        SYSTEMS[system](small, BOX, 2**31, context=32)


def test_a_trace_without_decode_tokens_is_refused(small):
    prompt = replace(small, tokens=small.tokens.assign(phase="prefill"))
    for system in ("transformers", "llama.cpp"):
        with pytest.raises(InputError, match="no decode token"):
            SYSTEMS[system](prompt, BOX, 2**30, context=32)


# neuron-level systems


def quality(trace: Trace) -> Predictor:
    return predict(trace, 0.9, 0.7, 0.05)


def test_powerinfer_is_its_closed_form(small):
    """Attention, prediction and step; then the slower of GPU and CPU and the merge, layer by layer."""
    predictor = quality(small)
    vram = budget(SPEC, 0.4, predictor.rank)
    run = SYSTEMS["powerinfer"](small, BOX, vram, context=32, predictor=predictor)
    plan = neuron_plan(small, BOX, vram, 32, None, predictor, {"name": "static"}, lookahead=0)
    costs = layer_costs(SPEC, BOX, "predicted", predictor_rank=predictor.rank)
    resident = plan.placement.resident
    hits = bits.count(predictor.predictions & resident)
    misses = bits.count(predictor.predictions & ~resident)
    gpu = costs.gpu_fixed_seconds + hits * costs.gpu_neuron_seconds
    cpu = costs.state_down_seconds + costs.cpu_fixed_seconds + misses * costs.cpu_neuron_seconds
    both = np.maximum(np.where(hits > 0, gpu, 0), cpu) + costs.state_up_seconds + costs.merge_seconds
    ffn = np.where(misses > 0, both, gpu)
    before = SPEC.layers * (costs.attention_seconds + costs.predict_seconds + costs.schedule_seconds)
    position = small.tokens["position"].sum() * SPEC.layers * costs.attention_token_seconds
    expected = len(small) * (before + costs.head_seconds) + position + ffn.sum()
    assert run.timeline.seconds == pytest.approx(expected, rel=1e-9)
    active = bits.count(predictor.predictions & small.active & resident)
    np.testing.assert_array_equal(run.work[..., 0], active)
    assert run.fetch.size == 0
    assert run.timeline.meta["memory"]["predictor"] == predictor_bytes(SPEC, predictor.rank)


def test_the_cpus_share_of_the_ffn(small):
    predictor = quality(small)
    run = SYSTEMS["powerinfer"](
        small, BOX, budget(SPEC, 0.4, predictor.rank), context=32, predictor=predictor
    )
    costs = layer_costs(SPEC, BOX, "predicted", predictor_rank=predictor.rank)
    rest = len(small) * (SPEC.layers * (costs.attention_seconds + costs.predict_seconds) + costs.head_seconds)
    rest += small.tokens["position"].sum() * SPEC.layers * costs.attention_token_seconds
    assert cpu_share_of_ffn(run) == pytest.approx(
        run.timeline.busy("cpu") / (run.timeline.seconds - rest), rel=1e-9
    )


@pytest.mark.parametrize("system", ["dynamicinfer", "oracle"])
def test_over_an_infinite_link_all_is_computed_on_the_gpu(small, system):
    fast = replace(BOX, h2d=Link("up", 0.0, math.inf), cpu=replace(CPU, schedule=Cost()))
    run = SYSTEMS[system](small, fast, budget(SPEC, 0.8), context=32)
    costs = layer_costs(SPEC, fast, "predicted")
    gpu = costs.gpu_fixed_seconds + bits.count(small.active) * costs.gpu_neuron_seconds
    position = small.tokens["position"].sum() * SPEC.layers * costs.attention_token_seconds
    expected = (
        len(small) * (SPEC.layers * costs.attention_seconds + costs.head_seconds) + position + gpu.sum()
    )
    assert run.gpu_share == 1
    assert run.timeline.seconds == pytest.approx(expected, rel=1e-9)


def test_a_static_dynamicinfer_differs_from_powerinfer_by_its_lookahead_alone(small):
    vram = budget(SPEC, 0.4)
    nothing = {"micro": False, "macro": False, "threshold": False}
    mine = dynamicinfer(small, BOX, vram, context=32, lookahead=0, issue="gather", **nothing)
    theirs = SYSTEMS["powerinfer"](small, BOX, vram, context=32)
    assert mine.timeline.seconds == theirs.timeline.seconds
    np.testing.assert_array_equal(mine.work, theirs.work)


def test_macro_needs_micro(small):
    with pytest.raises(InputError, match="macro keeps what micro would move"):
        dynamicinfer(small, BOX, budget(SPEC, 0.4), context=32, micro=False)


def test_each_part_speeds_up_and_the_oracle_is_faster_still():
    """ReluLLaMA-7B on PC-High at 10 GiB."""
    spec = load_model("relullama-7b")
    statistics = preset("relullama-7b")
    tokens = synth(spec, statistics, 64, 1)
    machine, frequency = load_machine("pc-high"), profile(spec, statistics)
    predictor = predict(tokens, 0.9, 0.73, 0.0671)
    common = {"context": 192, "frequency": frequency, "predictor": predictor}
    vram = 10 * 2**30

    def speed(system: str, **switches: bool) -> float:
        return SYSTEMS[system](tokens, machine, vram, **common, **switches).timeline.tokens_per_second

    still = speed("powerinfer")
    micro = speed("dynamicinfer", macro=False, threshold=False)
    macro = speed("dynamicinfer", threshold=False)
    assert still < micro <= 1.001 * macro
    assert macro < speed("dynamicinfer") < speed("oracle")


def test_every_system_takes_the_same_arguments(small):
    for name, system in SYSTEMS.items():
        run = system(
            small, BOX, budget(SPEC, 0.9), context=32, frequency=small.frequency, predictor=perfect(small)
        )
        assert run.timeline.meta["system"] == name
        assert run.timeline.tokens == len(small)
        assert run.timeline.meta["memory"]["context"] == GPU.context_bytes


# the predictor


@settings(max_examples=20, deadline=None)
@given(
    recall=st.floats(0.5, 1),
    precision=st.floats(0.4, 1),
    seed=st.integers(0, 2**63),
    neurons=st.integers(1000, 1100),
)
def test_predictions_have_the_quality_asked_for(recall, precision, seed, neurons):
    spec = replace(SPEC, neurons=neurons)
    tokens = TRACES.setdefault(neurons, synth(spec, preset("relullama-7b"), 64, 1))
    predicted = with_predictor(tokens, recall, precision, seed)
    both = bits.count(predicted & tokens.active).sum()
    active, asked = bits.count(tokens.active).sum(), bits.count(predicted).sum()
    spread = 6 / math.sqrt(active)
    assert both / active == pytest.approx(recall, abs=spread)
    assert both / asked == pytest.approx(precision, abs=spread)
    assert bits.count(predicted).sum() == bits.unpack(predicted, neurons).sum()  # no bit past the last neuron


TRACES: dict[int, Trace] = {}


def test_a_perfect_predictor_says_what_is_active(small):
    np.testing.assert_array_equal(with_predictor(small, 1, 1), small.active)
    assert perfect(small).rank == 0


def test_predictions_depend_on_token_and_seed_alone(small):
    whole = with_predictor(small, 0.8, 0.8, 3)
    np.testing.assert_array_equal(whole, with_predictor(small, 0.8, 0.8, 3))
    assert (whole != with_predictor(small, 0.8, 0.8, 4)).any()
    # without false positives the density does not matter: a part is as in the whole
    part = with_predictor(small.sequence(1), 0.8, 1.0, 3)
    np.testing.assert_array_equal(part, with_predictor(small, 0.8, 1.0, 3)[20:])


def test_quality_may_differ_from_layer_to_layer(small):
    recall = np.array([1.0, 0.5, 1.0, 0.25])
    got = bits.count(with_predictor(small, recall, 1.0)).sum(axis=0) / bits.count(small.active).sum(axis=0)
    assert got == pytest.approx(recall, abs=0.05)


@pytest.mark.parametrize(
    ("recall", "precision", "said"),
    [
        (0.0, 1.0, "recall is 0.0; it must be above 0 and at most 1"),
        (1.0, 1.5, "precision is 1.5; it must be above 0"),
        (np.ones(3), 1.0, r"recall has shape \(3,\); it must be one number or 4"),
        (
            1.0,
            0.01,
            r"precision 0.01 at recall 1 predicts more neurons of layer \d than .* give at least 0\.3",
        ),
    ],
)
def test_a_quality_that_cannot_be_is_refused(small, recall, precision, said):
    with pytest.raises(InputError, match=said):
        with_predictor(small, recall, precision)


def test_published_precision_follows_from_the_published_figures():
    """facts/models.md: ReluLLaMA-13B 88%, ProSparse-13B 47%."""
    assert implied_precision(0.8641, 0.2844, 0.2807) == pytest.approx(0.88, abs=0.005)
    assert implied_precision(0.9111, 0.1120, 0.2172) == pytest.approx(0.47, abs=0.005)
    chance = false_chance(np.array([0.8641]), np.array([0.8755]), np.array([0.2844]))
    assert 0.8641 * 0.2844 + chance[0] * (1 - 0.2844) == pytest.approx(0.2807, abs=2e-4)


def test_a_predictors_rank_is_its_share_of_the_model():
    spec = load_model("relullama-13b")
    rank = predictor_rank(spec, 0.0671)
    assert predictor_bytes(spec, rank) == pytest.approx(0.0671 * 2 * spec.parameters, rel=1e-3)
    assert (
        layer_costs(spec, load_machine("pc-high"), "predicted", predictor_rank=rank).predict_seconds > 13e-6
    )


def test_simulate_refuses_predictions_of_other_tokens(small):
    plan = neuron_plan(small, BOX, budget(SPEC, 0.4), 32, None, perfect(small), {"name": "static"})
    with pytest.raises(InputError, match=r"predictions have shape \(3, 4, 4\); they must be \(40, 4, 4\)"):
        simulate(plan, small, predictor=Predictor(perfect(small).predictions[:3]))


def test_a_read_only_trace_is_replayed(small):
    """As a memory map of another process hands it over."""
    locked = replace(small, active=small.active.copy())
    locked.active.flags.writeable = False
    plan = neuron_plan(small, BOX, budget(SPEC, 0.4), 32, None, perfect(small), {"name": "lru"})
    assert simulate(plan, locked).same_decisions(simulate(plan, small))


def test_with_exact_activation_a_predictor_steers_the_prefetch_only(small):
    plan = neuron_plan(small, BOX, budget(SPEC, 0.4), 32, None, perfect(small), {"name": "lru"})
    exact = replace(plan, activation="exact")
    poor = Predictor(with_predictor(small, 0.5, 0.5))
    good, bad = (simulate(exact, small, predictor=p) for p in (perfect(small), poor))
    active = bits.count(small.active)
    for run in (good, bad):
        np.testing.assert_array_equal(run.work[..., 0] + run.work[..., 1], active)
    assert good.gpu_share > bad.gpu_share
    assert bad.work[..., 3].sum() > good.work[..., 3].sum() == 0
    # the plan's own prediction is the token before; a given predictor speaks of the token itself
    lagging = replace(exact, prediction="previous")
    assert simulate(lagging, small, predictor=perfect(small)).same_decisions(good)


# thresholds

COSTS = layer_costs(SPEC, BOX, "predicted")
RECALL, DENSITY = np.array([0.86, 0.91]), np.array([0.28, 0.11])
FALSE = false_chance(RECALL, np.array([0.88, 0.47]), DENSITY)


def test_tables_are_the_two_normal_distributions():
    tables = Balanced(levels=40, width=0.25).init(RECALL, FALSE, DENSITY)
    assert tables.shape == (2, 5, 41)
    np.testing.assert_array_equal(tables[:, :, 0], 0)
    assert (np.diff(tables) >= 0).all()
    predicted = DENSITY * RECALL + (1 - DENSITY) * FALSE
    # ten standard deviations away all is taken in or left out, with all the activity there is
    assert tables[:, ADDED, -1] == pytest.approx([1, 1], abs=1e-9)
    assert tables[:, DROPPED, -1] == pytest.approx([1, 1], abs=1e-9)
    assert tables[:, RECOVERED, -1] == pytest.approx(DENSITY * (1 - RECALL) / (1 - predicted), rel=1e-9)
    assert tables[:, LOST, -1] == pytest.approx(DENSITY * RECALL / predicted, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    hits=st.integers(0, 3000), spare=st.integers(0, 3000), misses=st.integers(0, 3000),
    layer=st.integers(0, 1),
    slow=st.floats(1e-3, 100),
)  # fmt: skip
def test_balancing_keeps_the_error_and_never_makes_a_layer_slower(hits, spare, misses, layer, slow):
    table = Balanced().init(RECALL, FALSE, DENSITY)[layer]
    costs = COSTS._replace(cpu_neuron_seconds=slow * COSTS.gpu_neuron_seconds)
    low, high = balance(table, costs, hits, spare, misses, 0)

    def seconds(low, high):
        gpu = hits + added_neurons(table, low, spare)
        cpu = misses - dropped_neurons(table, high, misses)
        cpu_seconds = costs.cpu_seconds(0, cpu) + costs.merge_seconds if cpu else 0
        return max(costs.gpu_seconds(0, gpu), cpu_seconds)

    assert table[LOST, high] * misses <= table[RECOVERED, low] * spare + 1e-12
    assert seconds(low, high) <= seconds(0, 0)
    allowed = [
        seconds(i, j)
        for i in range(table.shape[1])
        for j in range(table.shape[1])
        if table[LOST, j] * misses <= table[RECOVERED, i] * spare
    ]
    if slow > 10:  # where the CPU is the bottleneck by far, greedy is near the best pair of levels
        assert seconds(low, high) <= 1.1 * min(allowed) + costs.gpu_neuron_seconds * spare


def test_fixed_thresholds_never_move():
    table = THRESHOLDS["fixed"]().init(RECALL, FALSE, DENSITY)
    assert table.shape == (2, 5, 1)
    assert tuple(balance(table[0], COSTS, 10, 1000, 1000, 0)) == (0, 0)


def test_a_fast_cpu_keeps_its_neurons():
    table = Balanced().init(RECALL, FALSE, DENSITY)[0]
    assert tuple(balance(table, COSTS._replace(cpu_neuron_seconds=0.0), 2000, 1000, 100, 0)) == (0, 0)


@pytest.mark.parametrize("values", [{"levels": 0}, {"width": 0.0}])
def test_levels_without_sense_are_refused(values):
    with pytest.raises(InputError, match="balanced: levels"):
        Balanced(**values)
    with pytest.raises(InputError, match="balanced: density is"):
        Balanced().init(RECALL, FALSE, np.array([0.5, 1.0]))


def test_the_replay_balances_as_the_step_does(small):
    """Static placement: each layer's counts shift by the step's answer, and the work by what is expected
    active."""
    predictor = quality(small)
    vram = budget(SPEC, 0.4, predictor.rank)
    plan = neuron_plan(small, BOX, vram, 32, None, predictor, {"name": "static"}, lookahead=0)
    still = simulate(plan, small, predictor=fixed(predictor))
    run = simulate(plan, small, predictor=predictor)
    resident, slots = plan.placement.resident, plan.placement.slots
    for token in range(0, len(small), 7):
        for layer in range(SPEC.layers):
            hits, misses = count_split(predictor.predictions[token, layer], resident[layer])
            spare = slots[layer] - hits
            table = predictor.thresholds[layer]
            low, high = balance(table, plan.costs, hits, spare, misses, 0)
            gained = round(table[RECOVERED, low] * spare), -round(table[LOST, high] * misses)
            assert run.work[token, layer, :2].tolist() == (still.work[token, layer, :2] + gained).tolist()
    assert run.timeline.seconds < still.timeline.seconds
    assert run.timeline.busy("cpu") < still.timeline.busy("cpu")


def test_exact_activation_has_no_thresholds(small):
    predictor = quality(small)
    plan = neuron_plan(small, BOX, budget(SPEC, 0.4, predictor.rank), 32, None, predictor, {"name": "static"})
    exact = replace(plan, activation="exact")
    runs = [simulate(exact, small, predictor=p) for p in (predictor, fixed(predictor))]
    assert runs[0].timeline.seconds == runs[1].timeline.seconds
    assert isinstance(runs[0].timeline.to_frame(), pd.DataFrame)
