"""Balanced thresholds from recorded contributions: tables against brute force, the error bound measured on text that
did not make them, and the same choice in simulator and executor. Tiny random models."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import fatrelu
from test_execute import machine, prompts
from test_kernels_cpu import random_rows, some_ids
from test_kernels_cpu import spec as kernel_spec

from dinfer import bits
from dinfer.errors import InputError
from dinfer.exec import Session, quality
from dinfer.exec.decode import decode_token, end_token
from dinfer.exec.kernels_cpu import ffn_cpu
from dinfer.exec.quality import Scorer, ways_of
from dinfer.machine import Cost, Factors
from dinfer.policies.balanced import ADDED, DROPPED, LOST, RECOVERED, SKIPPED, Levels
from dinfer.record.generate import listening, load, thresholded
from dinfer.record.predictor import Settings, train
from dinfer.record.recorder import record
from dinfer.sim import simulate
from dinfer.solve import budget_for_share, make_plan
from dinfer.trace import Trace, decode_levels

CPU_BOUND = machine()
CPU_BOUND = replace(
    CPU_BOUND,
    gpu=replace(CPU_BOUND.gpu, gate=Cost(1e-6, 1e12), neuron=Cost(0, 1e12)),
    cpu=replace(CPU_BOUND.cpu, gate=Cost(1e-6, 1e8), neuron=Cost(0, 1e8)),
)


@pytest.fixture(scope="module", params=["llama-silu", "fatrelu"])
def directory(request, tiny_models, tmp_path_factory):
    """A magnitude kind, and a ReLU kind with a threshold of its own, which the plans raise."""
    return tiny_models.get(request.param) or fatrelu(tmp_path_factory.mktemp("fat") / "fatrelu", 0.1)


@pytest.fixture(scope="module")
def trace(directory, tmp_path_factory) -> Trace:
    out = tmp_path_factory.mktemp("levels") / "trace"
    if directory.name == "fatrelu":  # a fifth is active: more tokens for as many neurons
        return record(directory, prompts(64), 600, out, sparsity=0.8, max_new_tokens=12)
    return record(directory, prompts(16), 120, out, sparsity=0.6, max_new_tokens=12)


@pytest.fixture(scope="module")
def plan(trace):
    budget = budget_for_share(trace.spec, CPU_BOUND, 0.4, 64)
    return make_plan(trace, CPU_BOUND, budget, context=64, cache="static", threshold="balanced")


def test_tables_are_what_counting_gives(trace, plan):
    # every level of every layer, recounted neuron by neuron from the trace's decoded magnitudes
    residents = bits.unpack(plan.placement.resident, 160)
    relu, own = trace.spec.sparsity_kind == "relu", trace.spec.gate_threshold
    for layer in range(4):
        active = bits.unpack(trace.active[:, layer], 160)
        error = decode_levels(trace.contribution[:, layer], trace.meta["contribution_scale"][layer]).astype(float) ** 2
        value = decode_levels(trace.score[:, layer], trace.meta["score_scale"][layer])
        gate = own + value if relu else decode_levels(trace.gate[:, layer], trace.meta["gate_scale"][layer])
        spare, misses = ~active & residents[layer], active & ~residents[layer]
        cold = np.broadcast_to(~residents[layer], active.shape)
        counts = [(active & residents[layer]).sum(), spare.sum(), misses.sum(), cold.sum()]
        assert plan.levels.expected[layer] == pytest.approx(np.array(counts) / len(trace), abs=0.5)
        table = plan.levels.tables[layer]
        assert (np.diff(table, axis=1) >= 0).all()
        assert not table[:, 0].any()
        for level in range(1, table.shape[1]):
            added = spare & (value > max(plan.levels.gpu[layer, level] - own, 0))
            skipped = gate <= plan.levels.cpu[layer, level]
            assert table[ADDED, level] == pytest.approx(added.sum() / spare.sum())
            assert table[RECOVERED, level] == pytest.approx(error[added].sum() / spare.sum())
            assert table[DROPPED, level] == pytest.approx((misses & skipped).sum() / misses.sum())
            assert table[LOST, level] == pytest.approx(error[misses & skipped].sum() / misses.sum())
            if not relu:
                assert table[SKIPPED, level] == pytest.approx((cold & skipped).sum() / cold.sum())
        if relu:  # all that is not 0 in the model, and equal parts of the CPU's active neurons
            assert table[ADDED, -1] == pytest.approx((spare & (value > 0)).sum() / spare.sum())
            assert table[DROPPED] == pytest.approx(np.arange(25) / 25, abs=0.06)
            assert not table[SKIPPED].any()
        else:
            assert table[ADDED, -1] == 1
            assert table[SKIPPED] == pytest.approx(np.arange(25) / 25, abs=0.06)
        assert plan.levels.gpu[layer, -1] == np.float32(own)


def test_where_the_cpu_is_slow_the_gpu_wins_back_what_the_cpu_drops(plan):
    chosen = plan.levels.choose(plan.costs)
    assert (chosen[:, 0] > 0).all()
    assert (chosen[:, 1] > 0).all()
    assert (plan.levels.relative_error(chosen) <= 0).all()
    fast = plan.costs._replace(cpu_gate_seconds=0.0, cpu_neuron_seconds=0.0, cpu_fixed_seconds=0.0)
    assert not plan.levels.choose(fast).any()


def layer_errors(directory, blocks, plan, chosen) -> tuple[np.ndarray, np.ndarray]:
    """Squared change of each layer's FFN output by the plan's thresholds, [layer]: one for all, and of each side."""
    loaded = load(directory)
    heard: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def sink(layer, hidden, gate, value):
        heard[layer] = gate, value

    residents = torch.from_numpy(bits.unpack(plan.placement.resident, plan.spec.neurons))
    theta = torch.from_numpy(plan.levels.thresholds(chosen))
    fixed, sides = np.zeros((2, plan.spec.layers))
    with torch.inference_mode(), listening(loaded, sink):
        for block in blocks:
            loaded.model(input_ids=torch.from_numpy(block)[None], use_cache=False)
            for layer, (gate, value) in heard.items():
                relu = plan.spec.sparsity_kind == "relu"
                decides, activated = (gate, gate) if relu else (value.abs(), torch.nn.functional.silu(gate).abs())
                below = decides <= plan.thresholds[layer]
                left_out = below | (activated <= theta[layer, 1])
                left_out = torch.where(residents[layer], decides <= theta[layer, 0], left_out)
                down = loaded.model.model.layers[layer].mlp.down_proj.weight
                fixed[layer] += float(torch.nn.functional.linear(value * below, down).square().sum())
                sides[layer] += float(torch.nn.functional.linear(value * left_out, down).square().sum())
    return fixed, sides


def test_the_bound_holds_on_text_that_did_not_make_it(directory, plan):
    """Err(theta_g, theta_c) <= Err(theta), measured as the change of each layer's output on new random text:
    a fifth is left for chance, as 16 short prompts made the tables. The logits change no more either."""
    blocks = np.random.default_rng(21).integers(3, 256, (24, 30))
    chosen = plan.levels.choose(plan.costs)
    fixed, sides = layer_errors(directory, blocks, plan, chosen)
    assert (sides <= 1.2 * fixed).all()
    assert sides.sum() <= 1.05 * fixed.sum()
    assert (sides > 0).all()
    with Session(plan, directory, "cpu") as session:
        found = {one.way: one for one in quality(session, blocks, ways_of(plan))}
    assert list(found) == ["dense", "sparse", "dynamic"]
    assert found["dynamic"].divergence.mean() <= 1.2 * found["sparse"].divergence.mean()


def test_whole_texts_score_as_balanced_decoding_does(directory, plan):
    ids = np.random.default_rng(2).integers(3, 256, 24)
    with Session(plan, directory, "cpu") as session:
        scorer = Scorer(session)
        scorer.run.estimate = None  # costs that move would choose other levels
        at_once = scorer.logits(ids, "dynamic")
        one_by_one = []
        for position, token in enumerate(ids):
            one_by_one.append(decode_token(scorer.run, [int(token)], [position])[0])
            end_token(scorer.run)
        assert scorer.computed["dynamic"] == sum(int(work[:, :2].sum()) for work in scorer.run.work)
        scorer.close()
    assert (at_once - torch.stack(one_by_one)).norm() / at_once.norm() < 1e-4


def test_the_sparse_way_of_a_balanced_plan_is_that_of_the_plan_with_one_threshold(directory, trace, plan):
    """And not that of the CPU's own, higher threshold for all."""
    fixed = make_plan(trace, CPU_BOUND, plan.vram_bytes, context=64, cache="static")
    ids, found = np.random.default_rng(3).integers(3, 256, 24), []
    for one in (plan, fixed):
        with Session(one, directory, "cpu") as session:
            scorer = Scorer(session)
            found.append((scorer.logits(ids, "sparse"), scorer.computed["sparse"]))
            scorer.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_simulator_and_executor_choose_the_same_levels_and_do_nearly_the_same_work(directory, trace, plan):
    relu = trace.spec.sparsity_kind == "relu"
    with Session(plan, directory, "cpu") as session:
        executed = session.replay(trace)
        run = session.start()
        chosen = plan.levels.thresholds(plan.levels.choose(plan.costs))
        assert run.gpu_thresholds == pytest.approx(chosen[:, 0])
        cpu = run.workers.thresholds if relu else run.workers.gate_thresholds
        assert cpu == pytest.approx(np.maximum(chosen[:, 1], plan.thresholds) if relu else chosen[:, 1])
        run.costs = plan.costs._replace(cpu_gate_seconds=0.0, cpu_neuron_seconds=0.0, cpu_fixed_seconds=0.0)
        run.balance()  # the measured costs have moved
        assert run.gpu_thresholds == pytest.approx(plan.thresholds)
        assert run.workers.thresholds == pytest.approx(plan.thresholds)
        assert not any(run.workers.gate_thresholds)
        run.close()
    simulated = simulate(plan, trace)
    assert executed.same_decisions(simulated)
    assert executed.work[..., :2].sum(axis=(0, 1)) == pytest.approx(simulated.work[..., :2].sum(axis=(0, 1)), rel=0.05)
    fixed = replace(plan, threshold={"name": "fixed"}, levels=None)
    assert simulated.timeline.seconds < 0.97 * simulate(fixed, trace).timeline.seconds


def test_levels_are_chosen_again_when_the_measured_costs_have_moved(directory, trace, plan, monkeypatch):
    # after each token, by the factors that the timeline records: those by which `simulate --believed` chooses too
    chosen, choose = [], Levels.choose
    monkeypatch.setattr(Levels, "choose", lambda self, costs: chosen.append(choose(self, costs)) or chosen[-1])
    few = trace.rows((trace.tokens["sequence"] < 3).to_numpy())
    with Session(plan, directory, "cpu", costs="running") as session:
        believed = session.replay(few).timeline.believed
    assert len(believed) == len(few.phase("decode"))
    costs = [plan.costs, *(plan.costs.scaled(Factors(*factors)) for _, *factors in believed.tolist())]
    assert len({tuple(each) for each in costs}) > 2
    assert np.array_equal(chosen, [choose(plan.levels, each) for each in costs])


@pytest.mark.parametrize("hidden", [64, 70])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernel_stops_at_small_gates(dtype, hidden):
    # whose activated gate is small contributes nothing; all else is as without
    rng = np.random.default_rng([hidden, len(dtype)])
    rows, weights = random_rows(rng, dtype, 3, hidden)
    x, ids = rng.standard_normal(hidden).astype(np.float32), some_ids(rng, 22)
    gate, up = (weights[ids, part] @ x.astype(np.float64) for part in (0, 1))
    activated = gate / (1 + np.exp(-gate))
    value = activated * up
    kept = (abs(activated) > 0.1) & (abs(value) > 0.05)
    out, values, active = np.zeros(hidden, np.float32), np.full(22, np.nan, np.float32), np.ones(22, np.bool_)
    model = kernel_spec("silu", True, hidden)
    found = ffn_cpu(model, rows, x, ids, out, values, 0.05, active=active, gate_threshold=0.1)
    assert 0 < found == kept.sum() < 22
    assert np.array_equal(active, kept)
    assert np.allclose(values, np.where(kept, value, 0), rtol=1e-3, atol=1e-5)
    assert np.allclose(out, np.where(kept, value, 0) @ weights[ids, -1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-relu", "opt", "fatrelu"])
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_raised_threshold_is_the_model_with_it(tiny_models, tmp_path, name, device):
    """Wherever the neurons are, and in a run as in a simulation: active is what transformers' gates say, token by
    token, when all gates up to the raised threshold are set to 0."""
    directory = fatrelu(tmp_path / name) if name == "fatrelu" else tiny_models[name]
    thresholds = [0.5, 0.6, 0.45, 0.7]
    recorded = record(directory, prompts(4), 24, tmp_path / "t", thresholds=thresholds, max_new_tokens=8)
    share = 0.4 if device == "cpu" else 0.0
    budget = budget_for_share(recorded.spec, CPU_BOUND, share, 64)
    plan = make_plan(recorded, CPU_BOUND, budget, context=64, cache="static")
    assert plan.thresholds == pytest.approx(thresholds)
    loaded, active, logits = load(directory), [], []
    ids = prompts(1)[0]
    with Session(plan, directory, device) as session:
        run = session.generate(ids, max_tokens=10, stop=False, on_logits=logits.append)
    with torch.inference_mode(), thresholded(loaded, thresholds):
        sink = lambda layer, hidden, gate, value: active.append(int((gate[-1] > thresholds[layer]).sum()))  # noqa: E731
        with listening(loaded, sink):
            for step, given in enumerate(logits):
                all_ids = torch.tensor([ids + list(run.ids[:step])])
                expected = loaded.model(input_ids=all_ids, use_cache=False).logits[0, -1]
                assert (given - expected).norm() / expected.norm() < 1e-4
    counts = np.array(active).reshape(len(logits), -1)[1:]
    assert run.work[:, :, :2].sum(axis=2).tolist() == counts.tolist()
    if device == "cpu":
        simulated = simulate(plan, recorded)
        decoded = recorded.phase("decode")
        assert np.array_equal(simulated.work[..., :2].sum(axis=2), bits.count(decoded.active))


def test_a_predictor_of_raised_thresholds_is_for_plans_with_these(tiny_models, tmp_path):
    own, raised = (
        record(tiny_models["llama-relu"], prompts(8), 60, tmp_path / name, hidden=True, max_new_tokens=8, **settings)
        for name, settings in (("own", {}), ("raised", {"thresholds": [0.5, 0.6, 0.45, 0.7]}))
    )
    predictor = train(raised, tmp_path / "p", Settings(share=0.4, epochs=1, batch=64))
    assert predictor.activity == pytest.approx(raised.meta["thresholds"])
    budget = budget_for_share(own.spec, CPU_BOUND, 0.4, 64) + predictor.bytes
    settings = {"context": 64, "activation": "predicted", "predictor": predictor}
    plan = make_plan(raised, CPU_BOUND, budget, **settings)
    with Session(plan, tiny_models["llama-relu"], "cpu", predictor=predictor) as session:
        assert len(session.generate([5, 7, 9], max_tokens=4, stop=False).ids) == 4
    with pytest.raises(InputError, match="^predictor learnt other activity thresholds than the trace's; plan with"):
        make_plan(own, CPU_BOUND, budget, **settings)


def test_what_cannot_balance_is_refused(trace, plan, tiny_models, tmp_path):
    budget = budget_for_share(trace.spec, CPU_BOUND, 0.4, 64)
    absent = "score" if trace.gate is None else "gate"
    with pytest.raises(InputError, match=f"^the trace has no {absent}, of which balanced thresholds are made; record"):
        make_plan(replace(trace, **{absent: None}), CPU_BOUND, budget, context=64, threshold="balanced")
    with pytest.raises(InputError, match=f"^{re.escape('threshold ' + repr('magic'))} is not one of balanced, fixed$"):
        make_plan(trace, CPU_BOUND, budget, context=64, threshold="magic")
    for change in ({"activation": "predicted"}, {"batch": 2}):
        with pytest.raises(InputError, match="^threshold 'balanced' is for exact activation of one sequence, not '"):
            replace(plan, **change)
    relu = record(tiny_models["llama-relu"], prompts(4), 8, tmp_path / "t", max_new_tokens=4)
    with pytest.raises(InputError, match="^llama-relu is a relu model at its own threshold of 0, below which neurons"):
        make_plan(relu, CPU_BOUND, budget_for_share(relu.spec, CPU_BOUND, 0.4, 64), context=64, threshold="balanced")
