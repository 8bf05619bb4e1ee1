"""The healed FATReLU model, end to end: slow, skipped where `make healed` has not made it.

Its executor is compared with transformers, with the simulator, and its sparsity with what its recording says.
"""

import json

import numpy as np
import pytest
import torch
from test_execute import dense_greedy, make_plan, splits

from dinfer import bits
from dinfer.exec import Session
from dinfer.families import open_checkpoint
from dinfer.policies import CACHES
from dinfer.record.generate import load
from dinfer.sim import simulate
from dinfer.trace import Trace

SMALL = "traces/smollm2-relu-small"
PROMPTS = ("Why is the sky blue?", "Name three rivers of Europe.", "Explain what a compiler does.")


def test_the_committed_trace_is_sparse_by_itself():
    """No threshold was calibrated: the model's own one is the same in each layer, and about four fifths lie below."""
    trace = Trace.load(SMALL)
    assert trace.spec.activation == "fatrelu"
    assert trace.meta["thresholds"] == pytest.approx([trace.spec.gate_threshold] * 30)  # they are kept in float32
    assert 0.75 < 1 - bits.unpack(trace.active, trace.spec.neurons).mean() < 0.85


@pytest.mark.slow
@pytest.mark.parametrize("split", ["none", "half", "all"])
def test_every_split_of_its_relu_twin_is_dense_to_rounding(healed, tmp_path, split):
    """The same weights with plain ReLU, which does not jump: 48 greedy tokens are equal, all logits within 1e-4."""
    from transformers import AutoTokenizer

    config = json.loads((healed / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("hidden_act_param", "auto_map")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    (tmp_path / "model.safetensors").symlink_to(healed / "model.safetensors")
    tokenizer, reference = AutoTokenizer.from_pretrained(healed), load(tmp_path).model
    plan = make_plan(tmp_path, splits(1536, 30)[split], cache={"name": "hot_predicted"})
    with Session(plan, open_checkpoint(tmp_path), "cpu") as session:
        for prompt in PROMPTS:
            ids = tokenizer(prompt)["input_ids"]
            seen: list[torch.Tensor] = []
            run = session.generate(ids, max_tokens=48, stop=False, on_logits=seen.append)
            expected, logits = dense_greedy(reference, ids, 48)
            assert list(run.ids) == expected
            assert (torch.stack(seen) - logits).norm() / logits.norm() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("split", ["none", "half", "all"])
def test_every_split_writes_what_the_dense_model_writes(healed, split):
    """Silenced neurons count exactly nothing: 48 greedy tokens in fp32 are the same, to rounding.

    FATReLU jumps by t, so a gate that rounds to the other side moves the logits by percents from that token on, and
    moves those of transformers in float64 against float32 as far. Before that they must agree, for a while.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(healed)
    reference = load(healed).model
    plan = make_plan(healed, splits(1536, 30)[split], cache={"name": "hot_predicted"})
    alike = []
    with Session(plan, open_checkpoint(healed), "cpu") as session:
        for prompt in PROMPTS:
            ids = tokenizer(prompt)["input_ids"]
            seen: list[torch.Tensor] = []
            run = session.generate(ids, max_tokens=48, stop=False, on_logits=seen.append)
            expected, logits = dense_greedy(reference, ids, 48)
            errors = (torch.stack(seen) - logits).norm(dim=-1) / logits.norm(dim=-1)
            first = next((token for token, error in enumerate(errors) if error > 1e-4), 48)
            assert list(run.ids)[:first] == expected[:first]
            alike.append(first)
            if list(run.ids) == expected:
                assert errors.max() < 0.1
    assert sum(alike) > 24, alike


@pytest.mark.slow
@pytest.mark.parametrize("cache", sorted(CACHES))
def test_replaying_its_trace_decides_and_works_as_the_simulator(healed, cache):
    """The decisions are equal by id; the work is too where the weights are those that the trace was recorded with."""
    trace = Trace.load(SMALL).sequence(0)
    plan = make_plan(healed, 400, cache={"name": cache}, lookahead=1, context=256)
    if trace.meta["weights"] != open_checkpoint(healed).fingerprint:
        pytest.skip("the trace was recorded with another training's weights")
    with Session(plan, healed, "cpu") as session:
        executed = session.replay(trace)
    simulated = simulate(plan, trace)
    assert executed.same_decisions(simulated)
    assert len(executed.fetch) > 100 or cache == "static"
    # recorded batched by transformers, run one by one here: a gate may fall on the other side of the threshold
    difference = np.abs(executed.work - simulated.work).sum()
    assert difference < 1e-3 * simulated.work.sum()


@pytest.mark.slow
def test_it_says_what_it_is(healed):
    source = json.loads((healed / "source.json").read_text())
    spec = open_checkpoint(healed).spec
    assert (spec.layers, spec.hidden, spec.neurons, spec.activation) == (30, 576, 1536, "fatrelu")
    assert source["licence"] == "Apache-2.0"
    for kind in ("text", "chat"):
        assert 1 < source["healed"][kind] / source["teacher"][kind] < 2
