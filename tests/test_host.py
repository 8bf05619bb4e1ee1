"""Decoding wholly on the CPU against transformers, and against the executor that steps through torch."""

import re
import threading

import numpy as np
import pytest
import torch
from conftest import LLAMA, save_tiny
from test_execute import dense_greedy, make_plan, prompts
from transformers import AutoModelForCausalLM

from dinfer.errors import InputError
from dinfer.exec import Session, execute, measure_machine
from dinfer.families import open_checkpoint
from dinfer.record.recorder import record

MODELS = ("llama-silu", "llama-relu", "opt")


def decoded(directory, plan, device, ids, tokens=24, **options):
    """The run, and its logits [token, vocab] in fp32."""
    seen: list[torch.Tensor] = []
    with Session(plan, directory, device, **options) as session:
        run = session.generate(ids, max_tokens=tokens, stop=False, on_logits=seen.append)
    return run, torch.stack(seen).float()


@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_the_dense_models(tiny_models, name):
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=torch.float32)
    with Session(make_plan(tiny_models[name], 0), open_checkpoint(tiny_models[name]), "none") as session:
        for ids in prompts(4):
            seen: list[torch.Tensor] = []
            run = session.generate(ids, max_tokens=64, stop=False, on_logits=seen.append)
            expected, logits = dense_greedy(reference, ids, 64)
            assert (torch.stack(seen) - logits).norm() / logits.norm() < 1e-5
            assert list(run.ids) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_nearer_to_float32_than_the_dense_model_is(tiny_models, name, dtype):
    # weights, keys and values are rounded as there, the sums are not: they are taken in fp32
    kind = getattr(torch, dtype)
    rounded = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=kind)
    exact = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=kind).float()
    ours, theirs = [], []
    with Session(make_plan(tiny_models[name], 0, dtype), tiny_models[name], "none") as session:
        for ids in prompts(6):
            seen: list[torch.Tensor] = []
            run = session.generate(ids, max_tokens=2, stop=False, on_logits=seen.append)
            whole = torch.tensor([[*ids, run.ids[0]]])
            with torch.no_grad():
                expected = exact(whole).logits[0, -1]
                dense = rounded(whole).logits[0, -1].float()
            ours.append(float((seen[1].float() - expected).norm() / expected.norm()))
            theirs.append(float((dense - expected).norm() / expected.norm()))
    assert np.mean(ours) < np.mean(theirs)
    assert max(ours) < (0.03 if dtype == "bfloat16" else 0.004)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same_logits(tiny_models, threads):
    plan = make_plan(tiny_models["llama-silu"], 0, thresholds=(0.1, 0.2, 0.05, 0.3))
    expected, logits = decoded(tiny_models["llama-silu"], plan, "cpu", [4, 5, 6])
    run, ours = decoded(tiny_models["llama-silu"], plan, "none", [4, 5, 6], cpu_threads=threads)
    assert (ours - logits).norm() / logits.norm() < 1e-5
    assert run.ids == expected.ids
    assert np.array_equal(run.work, expected.work)
    assert 0 < run.work[..., 1].mean() < 160
    again, same = decoded(tiny_models["llama-silu"], plan, "none", [4, 5, 6], cpu_threads=threads)
    assert torch.equal(ours, same)
    assert again.ids == run.ids


def test_a_window_hides_what_lies_before_it(tmp_path):
    from transformers import MistralConfig

    directory = save_tiny(MistralConfig(**LLAMA, sliding_window=7), tmp_path / "mistral")
    plan = make_plan(directory, 0)
    assert plan.spec.windows == (7,) * 4
    ids = prompts(1)[0][:3]
    expected, logits = decoded(directory, plan, "cpu", ids)
    run, ours = decoded(directory, plan, "none", ids)
    assert (ours - logits).norm() / logits.norm() < 1e-5
    assert run.ids == expected.ids


@pytest.mark.parametrize("activation", ["exact", "predicted"])
def test_a_replay_does_the_work_that_the_executor_does(tiny_models, tmp_path, activation):
    relu = tiny_models["llama-relu"]
    trace = record(relu, prompts(3), tokens=30, out=tmp_path / "trace")
    plan = make_plan(relu, 0, activation=activation, prediction="oracle")
    expected = execute(plan, relu, replay=trace, device="cpu")
    run = execute(plan, relu, replay=trace, device="none")
    assert np.array_equal(run.work, expected.work)
    assert run.work[..., 1].sum() > 0
    assert np.array_equal(run.work[..., 1], np.bitwise_count(trace.phase("decode").active).sum(axis=-1))


def test_spans_tell_the_whole_token(tiny_models):
    run, _ = decoded(tiny_models["opt"], make_plan(tiny_models["opt"], 0), "none", [4, 5], tokens=6)
    spans = run.timeline.to_frame().sort_values("start_seconds")
    assert set(spans["step"]) == {"attention", "ffn_cpu", "head"}
    assert len(spans) == 5 * (2 * 4 + 1)
    gaps = spans["start_seconds"].to_numpy()[1:] - spans["end_seconds"].to_numpy()[:-1]
    assert np.abs(gaps).max() < 1e-6
    assert spans["end_seconds"].to_numpy()[-1] == pytest.approx(run.timeline.seconds, abs=1e-3)
    assert run.timeline.meta["device"] == "none: the CPU"
    assert not run.timeline.meta["emulated"]


def test_threads_end_with_the_run(tiny_models):
    before = threading.active_count()
    execute(make_plan(tiny_models["opt"], 0), tiny_models["opt"], [4, 5], device="none", max_tokens=3, cpu_threads=3)
    assert threading.active_count() == before


def test_what_needs_a_gpu_is_refused(tiny_models):
    opt = tiny_models["opt"]
    message = (
        "plan holds 240 neurons on the GPU, which --device none cannot do; plan with --vram 0% or run with --device cpu"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        execute(make_plan(opt, 60), opt, [1], device="none")
    message = (
        "plan decodes 2 sequences together, which --device none cannot do; plan with --batch 1 or run with --device cpu"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        execute(make_plan(opt, 0, batch=2), opt, [1], device="none")
    message = "device none has no GPU whose steps could be measured; give --device cuda or cpu"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        measure_machine(opt, device="none")
