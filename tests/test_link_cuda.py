"""The real link of a GPU: what lands in the slots, in each way and under races, and runs on it against the CPU device.

Without a GPU only the fits of made-up times and the refusals are tested.
"""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_execute import FAST_LINK, check_bank, make_plan, prompts

from dinfer.errors import InputError
from dinfer.exec import Session, execute
from dinfer.exec.bank import fill_bank
from dinfer.exec.link import CudaLink
from dinfer.exec.profile import _calibration_plans
from dinfer.exec.profile_link import SIZES, TURNS, _fit, link_fits
from dinfer.families import open_checkpoint
from dinfer.machine import ISSUES, Device, Machine
from dinfer.model import load_model
from dinfer.record.recorder import record
from dinfer.sim import simulate

cuda = pytest.mark.cuda


def on_cuda(plan):
    """The plan for a machine that is not emulated."""
    return replace(plan, machine=replace(plan.machine, emulated_link=None))


def test_affine_times_are_fitted_exactly():
    sizes = np.array(SIZES)
    fit = _fit("block", sizes, 5e-6 + sizes * 2e-7)
    assert fit.step == "prefetch block"
    assert (fit.fixed_us, fit.per_unit_ns) == pytest.approx((5.0, 200.0))
    assert fit.residual == pytest.approx(0.0, abs=1e-9)
    assert fit.points == TURNS * len(SIZES)


def test_a_gather_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["dinfer.exec.link"], "find_spec", lambda name: None)
    link = CudaLink.__new__(CudaLink)
    message = "issue 'gather' needs Triton, which is not installed here; plan with --issue block"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        link._compile()


@cuda
@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize("name", ["llama-relu", "opt"])
def test_prefetched_rows_and_biases_land_in_their_slots(tiny_models, name, issue):
    plan = make_plan(tiny_models[name], 60)
    bank = fill_bank(open_checkpoint(tiny_models[name]), plan.placement, "float32", torch.device("cuda"))
    link, rng = CudaLink(bank, issue, 1, 60, lambda *_: None), np.random.default_rng(0)
    for _ in range(50):
        layer, n = int(rng.integers(4)), int(rng.integers(1, 30))
        fetch = rng.permutation(bank.cold[layer])[:n].astype(np.int32)
        evict = rng.permutation(bank.bucket[layer])[:n].astype(np.int32)
        link.wait(link.prefetch(layer, fetch, bank.swap(layer, fetch, evict)))
    link.close()
    for layer, bucket in enumerate(bank.bucket):
        ids = torch.from_numpy(bucket).long()
        assert torch.equal(bank.slots[layer].cpu(), bank.host[layer][ids])
        if bank.slot_bias is not None:
            assert torch.equal(bank.slot_bias[layer].cpu(), bank.up_bias[layer][ids])


@cuda
@pytest.mark.parametrize("issue", ISSUES)
def test_a_replay_on_the_gpu_decides_as_the_simulator_does(tiny_models, tmp_path, issue):
    model = tiny_models["llama-relu"]
    trace = record(model, prompts(2), tokens=24, out=tmp_path / "trace")
    plan = on_cuda(make_plan(model, 60, cache={"name": "lru"}, issue=issue, prediction="oracle"))
    with Session(plan, model, "cuda") as session:
        run = session.replay(trace)
        check_bank(session.last_bank)
    assert run.same_decisions(simulate(plan, trace))
    assert np.array_equal(run.work, simulate(plan, trace).work)
    spans = run.timeline.to_frame()
    assert (spans["end_seconds"] >= spans["start_seconds"]).all()
    assert {"attention", "ffn_gpu", "ffn_cpu", "merge", "prefetch", "head"} <= set(spans["step"])


@cuda
@pytest.mark.parametrize("activation", ["exact", "predicted"])
@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt"])
def test_the_gpus_tokens_are_the_cpu_devices(tiny_models, tmp_path, name, activation):
    model = tiny_models[name]
    sparsity = 0.3 if name == "llama-silu" else None
    trace = record(model, prompts(1), tokens=16, out=tmp_path / "trace", sparsity=sparsity)
    thresholds = tuple(trace.meta.get("thresholds", ())) if sparsity else ()
    plan = make_plan(
        model, 60, cache={"name": "lru"}, activation=activation, prediction="oracle", thresholds=thresholds
    )
    here, there = (execute(p, model, replay=trace, device=d) for p, d in ((plan, "cpu"), (on_cuda(plan), "cuda")))
    assert there.same_decisions(here)
    assert np.abs(there.work - here.work).max() <= 1  # a value at its threshold may round to the other side


@cuda
def test_a_slow_link_changes_no_token(tiny_models, monkeypatch):
    # races: a stream that is kept busy delays each copy by some milliseconds
    plan = on_cuda(make_plan(tiny_models["llama-relu"], 60, cache={"name": "lru"}, issue="gather"))
    calm = execute(plan, tiny_models["llama-relu"], [9, 8, 7], device="cuda", max_tokens=12)
    move = CudaLink._move

    def slow(self, *arguments):
        torch.cuda._sleep(5_000_000)
        move(self, *arguments)

    monkeypatch.setattr(CudaLink, "_move", slow)
    shaken = execute(plan, tiny_models["llama-relu"], [9, 8, 7], device="cuda", max_tokens=12)
    assert shaken.answers == calm.answers
    assert shaken.same_decisions(calm)


@cuda
def test_each_way_of_the_link_is_fitted(tiny_models):
    spec = open_checkpoint(tiny_models["llama-relu"]).spec
    fits = link_fits(spec, torch.device("cuda"))
    assert [fit.step for fit in fits] == [f"prefetch {issue}" for issue in ISSUES]
    assert all(fit.fixed_us + fit.per_unit_ns > 0 for fit in fits)


def test_calibration_plans_fit_the_gpu():
    # of a 7B model in fp16 a GPU of 8 GiB holds a quarter: 0.9 * 8 GiB less context and 4.8 GB that are no neurons
    spec = load_model("relullama-7b")
    blank = Machine("m", Device("small", 8 * 2**30, 2**29), Device("cpu", 2**36), FAST_LINK, FAST_LINK, 1e11)
    most = [int(plan.placement.slots.max()) for plan, _ in _calibration_plans(spec, blank, ())]
    room = 0.9 * 8 * 2**30 - 2**29 - spec.dense_bytes
    assert max(most) == int(room / spec.ffn_bytes * 11008)
    assert 1000 < max(most) < 11008
    large = replace(blank, gpu=replace(blank.gpu, memory_bytes=80 * 2**30))
    assert max(int(plan.placement.slots.max()) for plan, _ in _calibration_plans(spec, large, ())) == 11008
