"""Layers that a predictor cannot predict ahead: what a plan says of them, and that simulator and executor do it.
Tiny random models, untrained predictors."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from test_cli import dinfer
from test_execute import machine, prompts

from dinfer.errors import InputError
from dinfer.exec import Session
from dinfer.plan import Plan, early_layers
from dinfer.predictors import Predictors
from dinfer.record.recorder import record
from dinfer.report import layers_table, plan_lines
from dinfer.sim import simulate
from dinfer.sim.predictor import Predictor
from dinfer.solve import budget_for_share, make_plan
from dinfer.trace import Trace


@pytest.fixture(scope="module")
def trace(tiny_models, tmp_path_factory) -> Trace:
    out = tmp_path_factory.mktemp("early") / "trace"
    return record(tiny_models["llama-relu"], prompts(8), 60, out, hidden=True, max_new_tokens=12)


def predictors(trace: Trace, lookahead: int) -> Predictors:
    """Half of the neurons, by random maps."""
    spec, draw = trace.spec, np.random.default_rng(4).standard_normal
    shapes = {"first": (spec.hidden, 6), "second": (6, spec.neurons), "bias": (spec.neurons,)}
    parts = {k: [draw(shape).astype(np.float16) for _ in range(spec.layers)] for k, shape in shapes.items()}
    return Predictors(spec=spec, lookahead=lookahead, thresholds=np.full(spec.layers, 0.5, np.float32), **parts)


def planned(trace: Trace, lookahead: int, early: str, **changes) -> Plan:
    budget = budget_for_share(trace.spec, machine(), 0.6, 64) + predictors(trace, lookahead).bytes
    settings = {"context": 64, "cache": "lru", "window": 9, "activation": "predicted", "lookahead": lookahead}
    trained = predictors(trace, lookahead)
    return make_plan(trace, machine(), budget, predictor=trained, early=early, **settings | changes)


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("early", ["predicted", "resident"])
@pytest.mark.parametrize("activation", ["exact", "predicted"])
def test_simulator_and_executor_do_the_same_with_them(trace, tiny_models, lookahead, early, activation):
    plan, trained = planned(trace, lookahead, early, activation=activation), predictors(trace, lookahead)
    with Session(plan, tiny_models["llama-relu"], "cpu", predictor=trained) as session:
        executed = session.replay(trace)
    decoded = trace.phase("decode")
    simulated = simulate(plan, trace, predictor=Predictor(trained.predict(decoded), trained.rank))
    assert executed.same_decisions(simulated)
    assert np.array_equal(executed.work[..., 2], simulated.work[..., 2])
    held = np.arange(4) < (lookahead if early == "resident" else 0)
    assert np.array_equal(plan.held, held)
    assert (plan.placement.slots[held] == trace.spec.neurons).all()
    assert (plan.placement.slots[~held] < trace.spec.neurons).any()
    assert not simulated.work[:, held, 1:].any()  # nothing on the CPU, nothing fetched
    assert simulated.work[:, ~held, 2].any()
    # a layer that is computed whole misses none of its active neurons
    active = np.bitwise_count(decoded.active).sum(axis=2)
    assert np.array_equal(simulated.work[:, held, 0], active[:, held])
    assert executed.work[:, held, 0].sum() == pytest.approx(active[:, held].sum(), rel=0.1)
    scheduled = set(executed.timeline.to_frame().query("step == 'schedule'")["layer"])
    assert scheduled == set(np.flatnonzero(~held).tolist())


def test_the_plan_says_which_and_why(trace, tmp_path):
    plan = planned(trace, 1, "predicted")
    assert plan.predictor["early"] == {
        "layers": [0],
        "way": "predicted",
        "ahead": [0],
        "why": "no layer stands before layer 0",
    }
    cold = 160 - plan.placement.slots[0]
    assert plan_lines(plan)[3] == (
        "not predicted 1 ahead: layer 0, as no layer stands before layer 0; predicted from layer 0's "
        f"residual, k = 0: layer 0's prefetch is not hidden, and {cold} neurons of it are not resident"
    )
    resident = planned(trace, 2, "resident")
    assert plan_lines(resident)[3] == (
        "not predicted 2 ahead: layers 0 to 1, as no layer stands 2 before layers 0 to 1; resident and computed whole"
    )
    assert plan_lines(planned(trace, 0, "predicted"))[3] == (
        "no layer is predicted ahead: each layer is predicted from its own residual (k = 0)"
    )
    table = layers_table(resident)
    assert table["prediction"].tolist() == ["none: resident"] * 2 + ["trained"] * 2
    assert table["ahead"].tolist() == [None, None, 2, 2]
    assert table["gpu_share"][:2].tolist() == [1, 1]
    resident.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == resident
    out, _ = dinfer("show", tmp_path / "plan.json")
    assert plan_lines(resident)[3] in out
    rows = json.loads(dinfer("show", tmp_path / "plan.json", "-o", "json")[0])
    assert [row["ahead"] for row in rows] == [None, None, 2, 2]
    assert [row["slots"] for row in rows] == resident.placement.slots.tolist()


@pytest.mark.parametrize("solver", ["greedy", "ilp"])
def test_what_is_left_is_solved_as_without_them(trace, solver):
    plan = planned(trace, 1, "resident", solver=solver)
    slots = plan.placement.slots
    assert slots.sum() <= plan.memory["neurons"] // trace.spec.neuron_bytes
    if solver == "greedy":  # the hottest of the other layers: none that is left out is hotter than one that is in
        resident = np.arange(160) < slots[1:, None]
        ordered = -np.sort(-trace.frequency[1:], axis=1)
        assert ordered[resident].min() >= ordered[~resident].max() - 1e-6


def test_what_cannot_be_is_refused(trace):
    def refuses(message: str):
        return pytest.raises(InputError, match=f"^{re.escape(message)}")

    budget = budget_for_share(trace.spec, machine(), 0.1, 64)
    with refuses("early 'never' is not one of predicted, resident"):
        planned(trace, 1, "never")
    with refuses("early is 'resident', but there is no trained predictor that looks ahead; give --predictor DIR or"):
        make_plan(trace, machine(), budget, context=64, early="resident")
    with refuses("early layers 0 to 0 have 160 neurons that are to stay resident, the budget holds "):
        small = budget + predictors(trace, 1).bytes
        make_plan(trace, machine(), small, context=64, predictor=predictors(trace, 1), early="resident")
    plan = planned(trace, 1, "predicted")
    with refuses("early layers [0] are to stay resident, but have ["):
        replace(plan, predictor={**plan.predictor, "early": early_layers(1, "resident")})
    with refuses("early is {'layers': [3]"):
        replace(plan, predictor={**plan.predictor, "early": {**early_layers(1), "layers": [3]}})
