"""The executor against transformers, and against the simulator."""

import gc
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import LLAMA, save_tiny
from transformers import AutoModelForCausalLM

from dinfer import bits
from dinfer.errors import InputError, PlanWarning
from dinfer.exec import Session, execute
from dinfer.exec.bank import Bank, host_slab
from dinfer.exec.estimate import Estimate
from dinfer.exec.execute import empty_kv
from dinfer.exec.link import EmulatedLink
from dinfer.exec.prompts import sample
from dinfer.families import open_checkpoint
from dinfer.machine import Cost, Device, Factors, LayerCosts, Link, Machine
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.policies import CACHES
from dinfer.record.recorder import record
from dinfer.sim import simulate
from dinfer.timeline import Span

MODELS = ("llama-silu", "llama-relu", "opt")
FAST_LINK = Link("fast", 0.0, 1e12)


def machine(link: Link = FAST_LINK) -> Machine:
    gpu = Device("gpu", 2**40, attention=Cost(1e-4), gate=Cost(1e-6, 1e10), neuron=Cost(0, 1e10))
    cpu = Device("cpu", 2**40, gate=Cost(1e-6, 1e9), neuron=Cost(0, 1e9))
    return Machine("test", gpu, cpu, link, link, 1e11, emulated_link=link)


def make_plan(directory, slots, dtype="float32", **changes) -> Plan:
    """A plan whose placement and history are random, seeded; ``slots`` is a number a layer or an array."""
    spec = open_checkpoint(directory).spec.with_dtype(dtype)
    frequency = np.random.default_rng(1).random((spec.layers, spec.neurons), np.float32)
    placement = Placement.hottest(frequency, np.broadcast_to(slots, spec.layers))
    default = {"machine": machine(), "vram_bytes": 2**40, "context": 128}
    return Plan(spec=spec, placement=placement, frequency=frequency, **{**default, **changes})


def check_bank(bank: Bank) -> None:
    """Slots, buckets and the resident set tell the same."""
    for layer, bucket in enumerate(bank.bucket):
        assert np.array_equal(np.sort(bucket), bits.ids(bank.resident[layer], bank.neurons))
        assert np.array_equal(bank.slot_of[layer, bucket], np.arange(len(bucket)))
        assert torch.equal(bank.slots[layer].cpu(), bank.host[layer][torch.from_numpy(bucket).long()])


def splits(neurons: int, layers: int):
    """Slots a layer: none, one neuron in all, half, all but one, all."""
    one = np.eye(1, layers, dtype=int)[0]
    whole = np.full(layers, neurons)
    return {"none": 0, "one": one, "half": neurons // 2, "all but one": whole - one, "all": whole}


def prompts(count: int, vocab: int = 256) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab, size=rng.integers(2, 12)).tolist() for _ in range(count)]


def dense_greedy(model, ids: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits [tokens, vocab] of transformers, greedy, never stopping."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("split", ["none", "one", "half", "all but one", "all"])
def test_the_output_is_the_dense_models(tiny_models, name, split):
    # case 10: every split computes the same function
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=torch.float32)
    checkpoint = open_checkpoint(tiny_models[name])
    plan = make_plan(tiny_models[name], splits(160, 4)[split], cache={"name": "hot_predicted"})
    with Session(plan, checkpoint, "cpu") as session:
        for ids in prompts(8):
            seen: list[torch.Tensor] = []
            run = session.generate(ids, max_tokens=64, stop=False, on_logits=seen.append)
            expected, logits = dense_greedy(reference, ids, 64)
            error = (torch.stack(seen) - logits).norm() / logits.norm()
            assert error < 1e-4
            assert list(run.ids) == expected


@pytest.mark.parametrize("split", ["none", "half", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_gives_the_same_wherever_it_is_computed(tiny_models, name, split):
    ids = np.random.default_rng(3).integers(3, 256, 90).tolist()
    plan = make_plan(tiny_models[name], splits(160, 4)[split])
    seen: dict[str, list[torch.Tensor]] = {"cpu": [], "stream": []}
    for way, logits in seen.items():
        with Session(plan, tiny_models[name], "cpu", prefill=way) as session:
            run = session.generate(ids, max_tokens=3, stop=False, on_logits=logits.append)
        assert run.timeline.meta["prefill"] == [way]
    ours, theirs = (torch.stack(logits) for logits in seen.values())
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


@pytest.fixture(scope="module")
def long_models(tmp_path_factory):
    """Tiny models with 8k positions: one sees all of them, one a window of 700."""
    from transformers import LlamaConfig, MistralConfig

    home = tmp_path_factory.mktemp("long")
    shape = LLAMA | {"max_position_embeddings": 8192, "num_hidden_layers": 2}
    configs = {"llama": LlamaConfig(**shape), "mistral": MistralConfig(**shape, sliding_window=700)}
    return {name: save_tiny(config, home / name) for name, config in configs.items()}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_context_of_8k(long_models, name):
    # a prompt of 8,100 tokens in 16 chunks and 12 tokens after it: the dense model's logits, with the KV as planned
    ids = np.random.default_rng(3).integers(3, 256, 8100).tolist()
    plan = make_plan(long_models[name], 60, context=8192)
    seen: list[torch.Tensor] = []
    with Session(plan, long_models[name], "cpu", prefill="stream") as session:
        run = session.generate(ids, max_tokens=12, stop=False, on_logits=seen.append)
    reference = AutoModelForCausalLM.from_pretrained(long_models[name], dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([ids + list(run.ids[:-1])]), logits_to_keep=12).logits[0]
    assert (torch.stack(seen) - expected).norm() / expected.norm() < 1e-4
    held = sum(cache.nbytes for layer in empty_kv(plan, torch.device("cpu")) for cache in layer)
    assert held == plan.spec.kv_bytes(8192)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_stays_near_its_own_dense_model(tiny_models, name, dtype):
    # sums are taken in another order than the dense model's, each rounded to 8 (11) bits: a few units in the last place
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=getattr(torch, dtype))
    plan = make_plan(tiny_models[name], 80, dtype)
    with Session(plan, tiny_models[name], "cpu") as session:
        for ids in prompts(4):
            seen: list[torch.Tensor] = []
            session.generate(ids, max_tokens=1, stop=False, on_logits=seen.append)
            with torch.no_grad():
                expected = reference(torch.tensor([ids])).logits[0, -1]
            assert (seen[0] - expected).norm() / expected.norm() < (0.03 if dtype == "bfloat16" else 0.004)


@pytest.fixture(scope="module")
def relu_trace(tiny_models, tmp_path_factory):
    """Prefill and decode of three sequences of the tiny ReLU model."""
    return record(tiny_models["llama-relu"], prompts(3), tokens=36, out=tmp_path_factory.mktemp("t") / "trace")


@pytest.fixture(scope="module")
def short_traces(tiny_models, tmp_path_factory):
    """Five short sequences of the tiny ReLU model: two batches of two, and one left over."""
    out = tmp_path_factory.mktemp("t") / "short"
    return record(tiny_models["llama-relu"], prompts(5), tokens=50, out=out, max_new_tokens=10, levels=False)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("prediction", ["oracle", "previous"])
@pytest.mark.parametrize("cache", sorted(CACHES))
def test_a_replay_decides_as_the_simulator_does(tiny_models, relu_trace, cache, prediction, lookahead):
    plan = make_plan(
        tiny_models["llama-relu"], 60, cache={"name": cache}, prediction=prediction, lookahead=lookahead
    )
    simulated = simulate(plan, relu_trace)
    executed = execute(plan, tiny_models["llama-relu"], replay=relu_trace, device="cpu")
    assert executed.same_decisions(simulated)
    assert cache == "static" or len(executed.fetch) > 100
    # the model's own activity is the recorded one: the work is the same too
    assert np.array_equal(executed.work, simulated.work)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_writes_what_each_prompt_gets_alone(tiny_models, name):
    # prompts of unlike lengths side by side: the same tokens and logits as one at a time
    plan = make_plan(tiny_models[name], 60, cache={"name": "lru"}, batch=3)
    with Session(plan, tiny_models[name], "cpu") as session:
        for group in (prompts(9)[:3], prompts(9)[3:5]):
            seen: list[torch.Tensor] = []
            both = session.generate(group, max_tokens=24, stop=False, on_logits=seen.append)
            assert both.timeline.tokens == 23 * len(group)
            assert both.work.shape[0] == 23
            for index, ids in enumerate(group):
                alone: list[torch.Tensor] = []
                run = session.generate(ids, max_tokens=24, stop=False, on_logits=alone.append)
                assert both.answers[index] == run.answers[0]
                ours, theirs = torch.stack(seen)[:, index], torch.stack(alone)
                assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_a_sequence_that_ends_leaves_the_batch(tiny_models, monkeypatch):
    # the others go on as if it had never been there
    plan = make_plan(tiny_models["llama-relu"], 60, batch=3)
    group = prompts(3)
    with Session(plan, tiny_models["llama-relu"], "cpu") as session:
        whole = session.generate(group, max_tokens=24, stop=False)
        end = whole.answers[1].ids[5]
        monkeypatch.setitem(session.checkpoint.config, "eos_token_id", end)
        run = session.generate(group, max_tokens=24)
    for kept, full in zip(run.answers, whole.answers, strict=True):
        upto = full.ids.index(end) + 1 if end in full.ids else 24
        assert kept.ids == full.ids[:upto]
    assert len(run.answers[1].ids) <= 6
    assert run.timeline.tokens == sum(len(answer.ids) - 1 for answer in run.answers)


def test_a_prompt_draws_the_same_alone_and_in_a_batch(tiny_models):
    plan = make_plan(tiny_models["llama-silu"], 60, batch=2)
    group = prompts(2)
    with Session(plan, tiny_models["llama-silu"], "cpu") as session:
        both = session.generate(group, max_tokens=12, temperature=0.9, seed=5)
        alone = [session.generate(group[i], max_tokens=12, temperature=0.9, seed=5 + i) for i in range(2)]
    assert [answer.ids for answer in both.answers] == [run.ids for run in alone]


@pytest.mark.parametrize("activation", ["exact", "predicted"])
@pytest.mark.parametrize("prediction", ["oracle", "previous"])
def test_a_batched_replay_decides_as_the_simulator_does(tiny_models, short_traces, prediction, activation):
    plan = make_plan(
        tiny_models["llama-relu"], 60, cache={"name": "hot_predicted"}, prediction=prediction, batch=2,
        activation=activation,
    )  # fmt: skip
    simulated = simulate(plan, short_traces)
    executed = execute(plan, tiny_models["llama-relu"], replay=short_traces, device="cpu")
    assert executed.same_decisions(simulated)
    assert executed.timeline.tokens == simulated.timeline.tokens == 2 * len(executed.work)
    assert len(executed.fetch) > 50
    if activation == "exact":
        assert np.array_equal(executed.work, simulated.work)


@pytest.mark.parametrize(("issue", "group"), [("copy", 1), ("copy", 4), ("block", 1), ("gather", 1)])
@pytest.mark.parametrize("window", [0, 3, None])
def test_parity_holds_for_each_issue_and_window(tiny_models, relu_trace, issue, group, window):
    plan = make_plan(
        tiny_models["llama-relu"], 60, cache={"name": "lru"}, issue=issue, group=group, window=window
    )
    executed = execute(plan, tiny_models["llama-relu"], replay=relu_trace, device="cpu")
    assert executed.same_decisions(simulate(plan, relu_trace))


@pytest.mark.parametrize(("group", "copies"), [(0, 1), (1, 4), (3, 2), (64, 1)])
def test_an_emulated_link_pays_for_each_copy_of_a_group(group, copies):
    host, slots, spans = torch.rand(1, 8, 3, 4), torch.zeros(4, 3, 4), []
    bank = SimpleNamespace(host=host, slots=[slots], move_biases=lambda *where: None)
    link = EmulatedLink(bank, Link("slow", 1e-3, 1e6), group, lambda *span: spans.append(span))
    link.wait(link.prefetch(0, np.arange(2, 6, dtype=np.int32), np.arange(4, dtype=np.int32)))
    link.close()
    assert torch.equal(slots, host[0, 2:6])
    assert link.free_seconds - spans[0][3] == pytest.approx(link.link.seconds(copies, 4 * 48))


def test_predicted_activation_computes_the_predicted_set_only(tiny_models, relu_trace):
    plan = make_plan(
        tiny_models["llama-relu"], 60, cache={"name": "lru"}, activation="predicted", prediction="oracle"
    )
    executed = execute(plan, tiny_models["llama-relu"], replay=relu_trace, device="cpu")
    simulated = simulate(plan, relu_trace)
    assert executed.same_decisions(simulated)
    assert np.array_equal(executed.work, simulated.work)


@pytest.mark.parametrize("costs", ["plan", "running"])
def test_a_live_run_decides_as_a_simulation_of_its_own_recording(tiny_models, tmp_path, costs):
    # greedy decoding of the recorded prompt is the recorded sequence: live predictions are the trace's
    trace = record(tiny_models["llama-relu"], prompts(1), tokens=24, temperature=0.0, out=tmp_path / "trace")
    ids = trace.phase("prefill").tokens["id"].tolist()
    tokens = len(trace.phase("decode"))
    cache = {"name": "time_saved" if costs == "running" else "hot_predicted"}  # one that reads the costs at each step
    plan = make_plan(tiny_models["llama-relu"], 60, cache=cache)
    live = execute(plan, tiny_models["llama-relu"], ids, device="cpu", max_tokens=tokens + 1, costs=costs)
    assert list(live.ids[:-1]) == trace.phase("decode").tokens["id"].tolist()
    assert live.timeline.believed.shape == ((tokens, 5) if costs == "running" else (0, 5))
    assert live.same_decisions(simulate(plan, trace, believed=live.timeline.believed))


def test_a_replay_with_running_costs_decides_as_the_simulator_told_of_them(tiny_models, relu_trace):
    plan = make_plan(tiny_models["llama-relu"], 60, cache={"name": "lru"}, prediction="oracle")
    run = execute(plan, tiny_models["llama-relu"], replay=relu_trace, device="cpu", costs="running")
    told = simulate(plan, relu_trace, believed=run.timeline.believed)
    assert run.same_decisions(told)
    slow_link = np.array([[0, 1.0, 1.0, 1.0, 1e5]])
    assert not simulate(plan, relu_trace, believed=slow_link).same_decisions(simulate(plan, relu_trace))


def test_what_a_token_is_planned_to_take_is_what_the_simulator_says(tiny_models, relu_trace, monkeypatch):
    # what handing over and an emulated link's copies take from the GPU's part is planned: no running cost learns it
    box = machine()
    gpu, cpu = replace(box.gpu, delay=Cost(1e-4, 1e8)), replace(box.cpu, hand=Cost(5e-5))
    box = replace(box, gpu=gpu, cpu=cpu)
    plan = make_plan(tiny_models["llama-relu"], 60, cache={"name": "lru"}, prediction="oracle", machine=box, window=4)
    planned, update = [], Estimate.update
    monkeypatch.setattr(Estimate, "update", lambda self, spans, told: planned.append(told) or update(self, spans, told))
    run = execute(plan, tiny_models["llama-relu"], replay=relu_trace, device="cpu", costs="running")
    expected = simulate(plan, relu_trace, believed=run.timeline.believed).timeline.step_seconds()
    assert np.mean(planned, axis=0)[:2] == pytest.approx([expected["attention"], expected["ffn_gpu"]])


def test_the_estimate_forgets_what_was():
    # twice as slow from token 40 on: half of the way after 5 tokens, all of it after 40
    costs = make_costs()
    estimate = Estimate(costs)
    for token in range(80):
        slow = 2.0 if token >= 40 else 1.0
        spans = [
            Span(token, 0, "attention", "gpu", 0.0, 3e-3),
            Span(token, 0, "ffn_gpu", "gpu", 0.0, 1e-3),
            Span(token, 0, "wait", "gpu", 0.0, 9.0),
            Span(token, 0, "ffn_cpu", "d2h", 0.0, 9.0),
            Span(token, 0, "ffn_cpu", "cpu", 0.0, 2e-3 * slow),
            Span(token, 0, "prefetch", "h2d", 0.0, 4e-3 * slow, 10, 100),
        ]
        factors = estimate.update(estimate_spans(estimate, spans), Factors(1e-3, 2e-3, 1e-3))
        if token == 0:
            assert factors == Factors()  # a cold token
        else:
            assert factors[:2] == pytest.approx((3, 0.5))
        if token in (39, 44, 79):
            share = {39: 0.0, 44: 1 - 0.875**5, 79: 1.0}[token]
            assert factors.cpu == pytest.approx(2 + 2 * share, rel=0.01)
            planned = costs.prefetch_fixed_seconds + 10 * costs.prefetch_neuron_seconds
            assert factors.link == pytest.approx(4e-3 * (1 + share) / planned, rel=0.01)
    assert [row[0] for row in estimate.believed] == list(range(1, 81))


def estimate_spans(estimate: Estimate, spans: list[Span]) -> list[Span]:
    """``spans`` after those that the estimate has seen."""
    return [Span(0, 0, "wait", "gpu", 0.0, 1.0)] * estimate.seen + spans


def make_costs() -> LayerCosts:
    costs = LayerCosts(*[0.0] * len(LayerCosts._fields))
    return costs._replace(prefetch_fixed_seconds=1e-3, prefetch_neuron_seconds=1e-4)


def test_a_slower_link_is_followed(tiny_models, monkeypatch):
    # after some tokens the link gets 50 times slower, and what is believed of it follows
    link = Link("wire", 1e-4, 2e7)
    plan = make_plan(tiny_models["llama-relu"], 60, cache={"name": "lru"}, machine=machine(link), window=4)
    prefetch, asked = EmulatedLink.prefetch, []

    def slower(self, layer, ids, slots):
        asked.append(len(ids))
        if len(asked) == 20:
            self.link = Link("wire", 1e-4, 4e5)
        return prefetch(self, layer, ids, slots)

    monkeypatch.setattr(EmulatedLink, "prefetch", slower)
    run = execute(plan, tiny_models["llama-relu"], [9, 8, 7], device="cpu", max_tokens=40, costs="running")
    believed = run.timeline.believed[:, 4]
    changed = int(np.flatnonzero(np.cumsum((run.work[:, :, 2] > 0).sum(axis=1)) >= 20)[0])
    assert 2 < changed < 28
    assert believed[-1] > 2 * believed[changed - 1]


def test_silu_thresholds_silence_the_small_values(tiny_models):
    # a threshold above every value leaves attention only, one of 0 the whole model
    spec = open_checkpoint(tiny_models["llama-silu"]).spec
    silent = make_plan(tiny_models["llama-silu"], 80, thresholds=(1e9,) * spec.layers)
    run = execute(silent, tiny_models["llama-silu"], [5, 6, 7], device="cpu", max_tokens=4)
    assert run.work[:, :, :2].sum() == 0
    full = execute(replace(silent, thresholds=()), tiny_models["llama-silu"], [5, 6, 7], device="cpu", max_tokens=4)
    assert np.all(full.work[:, :, :2].sum(axis=2) == spec.neurons)


def test_slots_hold_what_the_buckets_say_after_many_swaps(tiny_models, relu_trace):
    plan = make_plan(tiny_models["llama-relu"], 50, cache={"name": "lru"}, prediction="oracle", lookahead=2)
    with Session(plan, tiny_models["llama-relu"], "cpu") as session:
        run = session.replay(relu_trace)
        check_bank(session.last_bank)
    assert len(run.fetch) > 500


def test_delays_change_no_decision_and_no_token(tiny_models, monkeypatch):
    # races: whatever thread is slow, the barrier holds
    plan = make_plan(tiny_models["llama-relu"], 60, cache={"name": "lru"}, lookahead=1)
    calm = execute(plan, tiny_models["llama-relu"], [9, 8, 7], device="cpu", max_tokens=12, costs="plan")
    rng = np.random.default_rng(3)
    prefetch = EmulatedLink.prefetch

    def slow(self, layer, ids, slots):
        time.sleep(rng.random() * 2e-3)
        return prefetch(self, layer, ids, slots)

    monkeypatch.setattr(EmulatedLink, "prefetch", slow)
    for _ in range(5):
        shaken = execute(plan, tiny_models["llama-relu"], [9, 8, 7], device="cpu", max_tokens=12, costs="plan")
        assert shaken.ids == calm.ids
        assert shaken.same_decisions(calm)


def test_the_emulated_link_keeps_its_rate(tiny_models, relu_trace):
    # 2 MB/s: rows of 64 x 3 floats are 768 B; moving n of them takes n * 384 us
    link = Link("slow", 1e-4, 2e6)
    plan = make_plan(tiny_models["llama-relu"], 60, cache={"name": "lru"}, machine=machine(link), window=20)
    run = execute(plan, tiny_models["llama-relu"], replay=relu_trace, device="cpu")
    spans = run.timeline.to_frame().query("step == 'prefetch'")
    took = (spans["end_seconds"] - spans["start_seconds"]).to_numpy()
    nominal = 1e-4 + spans["neurons"].to_numpy() * plan.spec.neuron_bytes / 2e6
    assert len(spans) > 50
    assert np.all(took >= nominal - 1e-9)
    assert np.median(took / nominal) < 1.5


def test_an_error_of_the_link_ends_the_run(tiny_models, monkeypatch):
    # the thread that copies must not leave the decoding thread waiting for ever
    def broken(*arguments):
        raise OSError("the link broke")

    plan = make_plan(tiny_models["llama-relu"], 60, cache={"name": "lru"})
    before = threading.active_count()
    with Session(plan, tiny_models["llama-relu"], "cpu") as session:
        monkeypatch.setattr(Bank, "move_biases", broken)
        with pytest.raises(OSError, match="^the link broke$"):
            session.generate([9, 8, 7], max_tokens=12)
    assert threading.active_count() == before


def test_memory_that_cannot_be_pinned_is_pageable_with_a_warning(monkeypatch):
    def refuse(*shape, **options):
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch, "empty", refuse)
    message = (
        "24.00 KiB of host memory cannot be pinned (CUDA error: out of memory): the neurons lie in pageable memory and "
        "prefetches go through a pinned block; raise `ulimit -l` or free memory to avoid this"
    )
    with pytest.warns(PlanWarning, match=f"^{re.escape(message)}$"):
        slab = host_slab((2, 16, 3, 64), torch.float32, torch.device("cuda"))
    assert slab.shape == (2, 16, 3, 64)
    assert not slab.is_pinned()


def test_threads_end_with_the_run(tiny_models):
    before = threading.active_count()
    execute(make_plan(tiny_models["opt"], 80), tiny_models["opt"], [4, 5], device="cpu", max_tokens=3)
    assert threading.active_count() == before


@pytest.mark.parametrize("cpu_threads", [1, 2, 3])
def test_any_number_of_cpu_threads_gives_the_same_tokens(tiny_models, cpu_threads):
    plan = make_plan(tiny_models["llama-silu"], 33)
    run = execute(plan, tiny_models["llama-silu"], [4, 5, 6], device="cpu", max_tokens=16, cpu_threads=cpu_threads)
    other = execute(plan, tiny_models["llama-silu"], [4, 5, 6], device="cpu", max_tokens=16)
    assert run.ids == other.ids


def test_sampling_is_seeded_and_top_p_cuts_the_tail():
    logits = torch.tensor([2.0, 1.0, 0.0, -5.0])
    draws = [sample(logits, 1.0, 0.9, torch.Generator().manual_seed(seed)) for seed in range(200)]
    again = [sample(logits, 1.0, 0.9, torch.Generator().manual_seed(seed)) for seed in range(200)]
    assert draws == again
    assert set(draws) == {0, 1}  # 0.66 + 0.24 reach 0.9
    assert sample(logits, 0.0, 1.0, None) == 0


def refuses(message: str):
    return pytest.raises(InputError, match=f"^{re.escape(message)}$")


def test_bad_input_is_refused_at_the_door(tiny_models, relu_trace):
    relu = tiny_models["llama-relu"]
    plan = make_plan(relu, 60)
    with refuses("device 'tpu' is not one of cuda, cpu, none"):
        execute(plan, relu, [1], device="tpu")
    with refuses("prompt has no token; give --prompt some text"):
        execute(plan, relu, [], device="cpu")
    with refuses("prompt is empty; give --prompt some text"):
        execute(plan, relu, "  ", device="cpu")
    with refuses(
        "prompt and answer take 202 tokens, the plan's KV cache holds 128; lower --tokens or plan with --context 202"
    ):
        execute(plan, relu, [1, 2], device="cpu", max_tokens=200)
    with pytest.raises(InputError, match=r"^plan is for llama-relu.*make a plan for this model with `dinfer plan`$"):
        execute(plan, tiny_models["opt"], [1], device="cpu")
    with refuses(
        "plan predicts by 'previous' with cache 'belady': that knows the future and runs only with --replay TRACE; "
        "plan with --prediction previous and another --cache"
    ):
        execute(replace(plan, cache={"name": "belady"}), relu, [1], device="cpu")
    with refuses(
        "activation 'predicted' needs predictions; run with --replay TRACE or plan with --activation exact or "
        "with a trained --predictor"
    ):
        execute(replace(plan, activation="predicted"), relu, [1], device="cpu")
    with refuses("2 prompts are more than the plan's batch of 1, whose KV is in its budget; plan with --batch 2"):
        execute(plan, relu, [[1], [2]], device="cpu")
    with refuses("the trace is batched already; give it as it was recorded, the plan says --batch"):
        execute(plan, relu, replay=relu_trace.batched(1), device="cpu")
    with refuses("batch is 9 sequences; it must be between 1 and 8"):
        replace(plan, batch=9)
    with refuses("prefill 'gpu' is not one of cpu, stream"):
        execute(plan, relu, [1], device="cpu", prefill="gpu")
    with refuses("costs 'free' is not one of running, plan"):
        execute(plan, relu, [1], device="cpu", costs="free")
    with refuses("tokens is 0; it must be at least 1"):
        execute(plan, relu, [1], device="cpu", max_tokens=0)
    with refuses("temperature is -1; it must be at least 0 (0 is greedy)"):
        execute(plan, relu, [1], device="cpu", temperature=-1)
    with refuses("top_p is 0; it must lie above 0 and be at most 1"):
        execute(plan, relu, [1], device="cpu", top_p=0)
    with refuses("the trace has no decode token to replay; record with --tokens 1 or more"):
        execute(plan, relu, replay=relu_trace.phase("prefill"), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_an_error_and_never_a_silent_fall_back(tiny_models):
    plan = replace(make_plan(tiny_models["opt"], 60), machine=replace(machine(), emulated_link=None))
    with pytest.raises(InputError, match=r"^device cuda is missing: torch sees no NVIDIA GPU here; run with --device"):
        execute(plan, tiny_models["opt"], [1])


def test_bank_bits_and_buckets_agree_at_the_start(tiny_models):
    plan = make_plan(tiny_models["opt"], np.array([0, 1, 80, 160]))
    with Session(plan, tiny_models["opt"], "cpu") as session:
        session.generate([3], max_tokens=1)
        check_bank(session.last_bank)
        assert [len(bucket) for bucket in session.last_bank.bucket] == [0, 1, 80, 160]
        assert np.array_equal(bits.count(session.last_bank.resident), [0, 1, 80, 160])


def test_the_collector_leaves_a_run_alone(tiny_models):
    """What was there before is frozen while tokens are decoded, and no longer: going through it would stop one."""
    frozen, before = [], gc.get_freeze_count()
    with Session(make_plan(tiny_models["llama-relu"], 4), tiny_models["llama-relu"], "cpu") as session:
        session.generate([1, 2, 3], max_tokens=2, on_logits=lambda _: frozen.append(gc.get_freeze_count()))
    assert min(frozen) > 10_000 > before == gc.get_freeze_count()
