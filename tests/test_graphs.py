"""A token's dense part with its position as a tensor: as the dynamic one, as a whole run, and captured on a GPU."""

import sys
from dataclasses import replace

import pytest
import torch
from test_execute import make_plan, prompts
from transformers import LlamaConfig

from dinfer.exec import Session, execute
from dinfer.exec.graphs import SHORTEST, lengths
from dinfer.families import FAMILIES, open_checkpoint


@pytest.mark.parametrize(
    ("context", "expected"), [(1, [1]), (128, [128]), (129, [128, 129]), (1000, [128, 256, 512, 1000])]
)
def test_lengths_double_up_to_the_context(context, expected):
    assert lengths(context) == expected
    assert SHORTEST == 128


@pytest.mark.parametrize("window", [0, 5, 24])
@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt"])
def test_attention_at_a_position_is_attention(tiny_models, name, window):
    # token by token, over several lengths, and past a window that is a ring (5 of a cache of 5) or a mask (5 of 24)
    checkpoint = open_checkpoint(tiny_models[name])
    spec = checkpoint.spec
    family = FAMILIES[spec.family]
    dense = family.dense(checkpoint, 24, torch.device("cpu"), torch.float32)
    if window:
        dense = dense._replace(spec=replace(spec, windows=(window,) * spec.layers))
    hidden = torch.randn(20, spec.hidden, generator=torch.Generator().manual_seed(0))
    for ring in {24, window or 24} if spec.family == "llama" else {24}:
        ours, theirs = (torch.zeros(2, spec.kv_heads, ring, spec.head_dim) for _ in range(2))
        for position in range(20):
            expected = family.attention(dense, 1, hidden[position, None], [theirs], [position])
            length = next(each for each in (4, 8, 16, 24) if each > position)
            found = family.attention_at(dense, 1, hidden[position, None], ours, torch.tensor([position]), length)
            torch.testing.assert_close(found, expected)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama-relu", "opt"])
def test_a_run_of_the_static_form_is_the_dynamic_run(tiny_models, monkeypatch, name):
    plan = make_plan(tiny_models[name], 70, cache={"name": "lru"})
    for ids in prompts(2):
        expected = execute(plan, tiny_models[name], ids, device="cpu", max_tokens=24, costs="plan")
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules["dinfer.exec.execute"], "graphed", lambda plan, device: True)
            patched.setattr("dinfer.exec.graphs.SHORTEST", 8)
            found = execute(plan, tiny_models[name], ids, device="cpu", max_tokens=24, costs="plan")
        assert found.answers[0].ids == expected.answers[0].ids
        assert found.same_decisions(expected)


@pytest.mark.parametrize("cache", ["static", "lru"])
def test_values_may_arrive_late(tiny_models, monkeypatch, cache):
    # what a GPU does: who was active is learnt when the layer is scheduled again, or at the end
    plan = make_plan(tiny_models["llama-relu"], 60, cache={"name": cache})
    expected = execute(plan, tiny_models["llama-relu"], [9, 8, 7], device="cpu", max_tokens=12, costs="plan")
    monkeypatch.setattr("dinfer.exec.link.EmulatedLink.lazy", True)
    found = execute(plan, tiny_models["llama-relu"], [9, 8, 7], device="cpu", max_tokens=12, costs="plan")
    assert found.same_decisions(expected)
    assert (found.work == expected.work).all()
    assert found.work.sum() > 0


@pytest.mark.cuda
def test_captured_graphs_are_the_static_form(tmp_path):
    from conftest import save_tiny

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=512, hidden_act="relu",
    )  # fmt: skip
    model = save_tiny(config, tmp_path / "model")
    plan = make_plan(model, 80, cache={"name": "lru"}, context=300)
    plan = replace(plan, machine=replace(plan.machine, emulated_link=None))
    ids = prompts(1)[0] * 12  # past the shortest graph's length
    with Session(plan, model, "cuda") as session:
        found = session.generate(ids, max_tokens=60, stop=False)
    on_cpu = execute(make_plan(model, 80, cache={"name": "lru"}, context=300), model, ids, device="cpu", max_tokens=60)
    assert found.answers[0].ids[:20] == on_cpu.answers[0].ids[:20]
