"""The greedy sharing of sparsity among layers against brute force, numpy's quantiles and a model run by hand."""

import itertools

import numpy as np
import pytest
import torch
from test_execute import prompts

from dinfer.errors import InputError
from dinfer.record.allocate import STEPS, allocate, curves, sensitivities
from dinfer.record.calibrate import calibrate
from dinfer.record.generate import load
from dinfer.record.recorder import record


def test_no_other_sharing_costs_less():
    # three layers whose errors rise ever faster: greedy is the optimum, which trying all finds
    rng = np.random.default_rng(4)
    for sparsity in (0.02, 0.05, 0.1):
        errors = np.concatenate([np.zeros((3, 1)), np.cumsum(np.cumsum(rng.random((3, STEPS - 1)), axis=1), axis=1)], 1)
        weights = rng.random(3)
        parts = allocate(errors, weights, sparsity)
        assert parts.sum() == round(sparsity * 3 * STEPS)

        def cost(chosen):
            return (weights * errors[np.arange(3), list(chosen)]).sum()  # noqa: B023

        most = parts.sum() + 1
        every = [c for c in itertools.product(range(most), repeat=3) if sum(c) == parts.sum()]
        assert cost(parts) == pytest.approx(min(map(cost, every)))


def test_equal_layers_share_equally_and_no_layer_falls_silent():
    errors = np.tile(np.arange(STEPS, dtype=float) ** 2, (4, 1))
    assert allocate(errors, np.ones(4), 0.6).tolist() == [60] * 4
    assert allocate(errors, np.array([0.0, 1, 1, 1]), 0.5).tolist() == [99, 34, 34, 33]
    assert allocate(errors, np.ones(4), 0.999).tolist() == [99] * 4


def test_curves_are_quantiles_and_sums_below_them():
    rng = np.random.default_rng(1)
    counts, errors = rng.integers(0, 50, (2, 400)), rng.random((2, 400))
    edges, dropped = curves(counts, errors, 10)
    for layer in range(2):
        values = np.repeat(np.arange(400), counts[layer])
        for step in range(1, STEPS, 7):
            edge = edges[layer, step]
            assert (values < edge).mean() <= step / STEPS <= (values <= edge).mean()
            assert dropped[layer, step] == pytest.approx(errors[layer, : edge + 1].sum() / 10)
        assert dropped[layer, 0] == 0


def test_sensitivities_are_divergences_of_one_layer_at_a_time(tiny_models):
    loaded = load(tiny_models["llama-silu"])
    texts, thresholds, errors = prompts(5), np.full(4, 0.05), np.array([1.0, 2.0, 3.0, 4.0])
    weights = sensitivities(loaded, texts, thresholds, errors)
    down = loaded.model.model.layers[2].mlp.down_proj
    handle = down.register_forward_pre_hook(lambda module, inputs: (inputs[0] * (inputs[0].abs() > 0.05),))
    total = 0.0
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([text])
            given = loaded.model(input_ids=ids).logits[0].double().log_softmax(-1)
            handle.remove()
            dense = loaded.model(input_ids=ids).logits[0].double().log_softmax(-1)
            handle = down.register_forward_pre_hook(lambda module, inputs: (inputs[0] * (inputs[0].abs() > 0.05),))
            total += float((dense.exp() * (dense - given)).sum())
    assert weights[2] == pytest.approx(total / sum(map(len, texts)) / 3, rel=1e-3)


def test_greedy_reaches_the_sparsity_in_the_mean_and_differs_by_layer(tiny_models):
    loaded, texts = load(tiny_models["llama-silu"]), prompts(12)
    uniform, greedy = (calibrate(loaded, texts, sparsity=0.6, allocation=kind) for kind in ("uniform", "greedy"))
    assert uniform.sparsity == pytest.approx(np.full(4, 0.6), abs=0.06)
    assert greedy.sparsity.mean() == pytest.approx(0.6, abs=0.04)
    assert np.ptp(greedy.sparsity) > np.ptp(uniform.sparsity)


def test_an_unknown_allocation_is_refused(tiny_models, tmp_path):
    with pytest.raises(InputError, match="^allocation 'fair' is not one of uniform, greedy$"):
        record(tiny_models["llama-silu"], prompts(4), 4, tmp_path / "t", sparsity=0.6, allocation="fair")
