"""Long runs: what must not drift, what must not race, and how much memory is taken."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import LLAMA, save_tiny
from test_execute import make_plan, prompts
from transformers import AutoModelForCausalLM

from dinfer.exec import Session
from dinfer.exec.execute import empty_kv
from dinfer.exec.link import EmulatedLink
from dinfer.exec.workers import Workers
from dinfer.families import FAMILIES, open_checkpoint
from dinfer.record.recorder import record
from dinfer.solve import budget_for_share
from dinfer.solve import make_plan as solve_plan


@pytest.mark.parametrize("runs", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_random_delays_change_no_bit(tiny_models, monkeypatch, runs):
    """The link's thread, the CPU's threads and the decoding thread are held up at random:
    the same tokens, decisions and logits to the last bit."""
    plan = make_plan(tiny_models["llama-relu"], 60, cache={"name": "lru"}, issue="block")
    rng, quick = np.random.default_rng(11), [False]

    def delayed(kind, name):
        method = getattr(kind, name)

        def slow(self, *arguments):
            if not quick[0] and rng.random() < 0.3:
                time.sleep(rng.random() * 1e-3)
            return method(self, *arguments)

        monkeypatch.setattr(kind, name, slow)

    delayed(EmulatedLink, "_move")
    delayed(EmulatedLink, "prefetch")
    delayed(Workers, "start")
    delayed(Workers, "_compute")
    with Session(plan, tiny_models["llama-relu"], "cpu", cpu_threads=2, costs="plan") as session:

        def run():
            seen: list[torch.Tensor] = []
            return session.generate([9, 8, 7], max_tokens=10, stop=False, on_logits=seen.append), torch.stack(seen)

        quick[0] = True
        calm, logits = run()
        quick[0] = False
        for _ in range(runs):
            shaken, theirs = run()
            assert shaken.ids == calm.ids
            assert shaken.same_decisions(calm)
            assert torch.equal(theirs, logits)


def drift(plan, model, ids, tokens):
    """Relative error of each token's logits against the dense model fed the same tokens, float32."""
    seen: list[torch.Tensor] = []
    with Session(plan, model, "cpu") as session:
        run = session.generate(ids, max_tokens=tokens, stop=False, on_logits=seen.append)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([ids + list(run.ids[:-1])]), logits_to_keep=tokens).logits[0]
    ours = torch.stack(seen)
    return ((ours - expected).norm(dim=1) / expected.norm(dim=1)).numpy(), ours, expected


def check_drift(errors, ours, expected):
    assert errors.max() < 1e-4
    tenth = len(errors) // 10
    assert np.median(errors[-tenth:]) < 3 * np.median(errors[:tenth])
    assert torch.equal(ours.argmax(dim=1), expected.argmax(dim=1))


def test_500_tokens_do_not_drift(tmp_path_factory):
    from transformers import LlamaConfig

    shape = LLAMA | {"max_position_embeddings": 1024, "num_hidden_layers": 2}
    model = save_tiny(LlamaConfig(**shape), tmp_path_factory.mktemp("drift") / "model")
    plan = make_plan(model, 60, cache={"name": "lru"}, context=600)
    check_drift(*drift(plan, model, prompts(1)[0], 500))


@pytest.mark.slow
def test_2000_tokens_of_a_real_model_do_not_drift(smollm2):
    plan = make_plan(smollm2, 700, cache={"name": "hot_predicted"}, context=2048)
    check_drift(*drift(plan, smollm2, [1, 4093, 314, 253], 2000))


@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt"])
def test_what_is_allocated_is_what_the_plan_counts(tiny_models, name):
    """Slab, slots and KV to the byte, the dense part within what tables of positions add."""
    plan = make_plan(tiny_models[name], 70, context=100, batch=2)
    spec = plan.spec
    with Session(plan, tiny_models[name], "cpu") as session:
        session.generate([3], max_tokens=2)
        bank = session.last_bank
        dense = sum(tensor.untyped_storage().nbytes() for tensor in dense_tensors(session.dense).values())
    assert bank.host.nbytes == spec.ffn_bytes
    assert sum(slots.nbytes for slots in bank.slots) == int(plan.placement.slots.sum()) * spec.neuron_bytes
    kv = [cache for layer in empty_kv(plan, torch.device("cpu")) for cache in layer]
    assert sum(cache.nbytes for cache in kv) == 2 * spec.kv_bytes(100)
    biases = 0 if bank.down_bias is None else bank.up_bias.nbytes + bank.down_bias.nbytes
    tables = 0 if name == "opt" else 2 * session.dense.cos.nbytes
    assert dense + biases == spec.dense_bytes + tables


def dense_tensors(dense) -> dict[int, torch.Tensor]:
    """The tensors in ``dense``, each storage once."""
    found: dict[int, torch.Tensor] = {}

    def visit(value):
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part)

    visit(dense)
    return found


PEAK = """
import gc, re, sys, threading, time, warnings
import numpy as np, torch
from dinfer.plan import Plan
from dinfer.exec import Session
warnings.simplefilter("ignore")

def resident():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

def mapped(tensor):
    start = tensor.untyped_storage().data_ptr()
    for line in open("/proc/self/maps"):
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= start < high:
            return tensor.untyped_storage().nbytes() if len(line.split()) > 5 else 0

sys.path.insert(0, TESTS)
from test_runtime import dense_tensors
small, plan, model = sys.argv[1:]
def work(plan, model):
    with Session(Plan.load(plan), model, "cpu") as session:
        session.generate(list(range(5, 1021)), max_tokens=4, stop=False)  # fills the KV cache
        return sum(mapped(tensor) for tensor in dense_tensors(session.dense).values())
work(small, model)  # what libraries take is taken now
gc.collect()
before, peak, going = resident(), [0], [True]
def watch():
    while going[0]:
        peak[0] = max(peak[0], resident())
        time.sleep(0.002)
watcher = threading.Thread(target=watch); watcher.start()
kept = work(plan, model)
going[0] = False; watcher.join()
print(before, peak[0], kept)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's resident set")
def test_peak_memory_is_what_the_plan_says(smollm2, tmp_path):
    """Device and host together, as the device is the host here: the plan's terms and the slab, within 5%.

    Matrices that are used as the checkpoint's file has them stay mapped and are no memory of the process.
    """
    from test_execute import machine

    trace = record(smollm2, [[1, 2, 3, 4]], tokens=8, out=tmp_path / "trace", sparsity=0.5, levels=False)
    spec = trace.spec.with_dtype("float32")
    plan = solve_plan(trace, machine(), budget_for_share(spec, machine(), 0.5, 1024), context=1024, spec=spec)
    plan.save(tmp_path / "plan.json")
    code = f"TESTS = {str(Path(__file__).parent)!r}" + PEAK
    command = [sys.executable, "-c", code, str(tmp_path / "plan.json"), str(tmp_path / "plan.json"), str(smollm2)]
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    before, peak, mapped = map(int, run.stdout.split())
    counted = sum(plan.memory.values()) - plan.memory["margin"] + spec.ffn_bytes
    assert peak - before + mapped == pytest.approx(counted, rel=0.05)


def test_families_hold_their_dense_part_once(tiny_models):
    """A tied head is the embedding itself."""
    checkpoint = open_checkpoint(tiny_models["llama-relu"])
    dense = FAMILIES["llama"].dense(checkpoint, 16, torch.device("cpu"), torch.float32)
    assert dense.head.data_ptr() == dense.embedding.data_ptr()
