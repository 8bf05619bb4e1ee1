"""int8 and int4 rows against the gguf package, in theory, and through the bank, the link and a run.

gguf is the independent library: its Q8_0 and Q4_0 blocks must be ours bit for bit.
"""

import re
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_execute import check_bank, dense_greedy, make_plan, prompts, splits
from transformers import AutoModelForCausalLM

from dinfer.errors import InputError
from dinfer.exec import Session, execute, kernels_gpu
from dinfer.families import open_checkpoint, quantise
from dinfer.families.quantise import QUANT_BYTES, dequantise, relative_error, row_bytes
from dinfer.record.recorder import record
from dinfer.sim import simulate

DTYPES = list(QUANT_BYTES)
KINDS = {"int8": Kind.Q8_0, "int4": Kind.Q4_0}
STEPS = {"int8": 127, "int4": 8}


def random_weights(seed: int, shape=(7, 3, 96)) -> torch.Tensor:
    """Rows of very different sizes, a row of zeros among them."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1e-3, 1e-2, 1, 30], (*shape[:-1], 1))
    weights = rng.standard_normal(shape) * sizes
    weights[0, 0] = 0
    return torch.from_numpy(weights).float()


def as_blocks(rows: torch.Tensor, dtype: str) -> np.ndarray:
    """Our rows as GGUF blocks [..., group, bytes]: the scale, then the quants."""
    size, packed = QUANT_BYTES[dtype], rows.numpy()
    groups = packed.shape[-1] // (size + 2)
    quants = packed[..., : groups * size].reshape(*packed.shape[:-1], groups, size)
    scales = packed[..., groups * size :].reshape(*packed.shape[:-1], groups, 2)
    return np.concatenate([scales, quants], axis=-1)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_bits_and_values_are_those_of_the_gguf_package(seed, dtype):
    weights = random_weights(seed)
    rows = quantise.quantise(weights, dtype)
    theirs = gguf.quants.quantize(weights.numpy(), KINDS[dtype])
    np.testing.assert_array_equal(as_blocks(rows, dtype), theirs.reshape(7, 3, 3, -1))
    values = dequantise(rows, dtype, torch.float32).numpy()
    np.testing.assert_array_equal(values, gguf.quants.dequantize(theirs, KINDS[dtype]))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_an_error_is_at_most_half_a_step(seed, dtype):
    """Half the scale, and what rounding the scale to float16 adds; int4's 8 is cut off to 7."""
    weights = random_weights(seed)
    error = (dequantise(quantise.quantise(weights, dtype), dtype, torch.float32) - weights).abs().view(7, 3, 3, 32)
    most = weights.abs().view(7, 3, 3, 32).amax(dim=-1, keepdim=True)
    half = most / STEPS[dtype] * (1.0 if dtype == "int4" else 0.5)
    rounded_scale = most * 2**-11 + STEPS[dtype] * 2**-25
    assert (error <= half * 1.001 + rounded_scale).all()
    near = weights.view(7, 3, 3, 32).abs() <= most * 7 / 8
    assert (error[near] <= (most / STEPS[dtype] * 0.501 + rounded_scale).expand_as(error)[near]).all()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_values_of_a_gguf_file_become_the_same_bits_again(seed, dtype):
    """So a Q8_0 or Q4_0 tensor is taken as it is, though it passes through float32."""
    weights = random_weights(seed)[1:]  # without the row of zeros: a zero's scale may change its sign
    blocks = gguf.quants.quantize(weights.numpy(), KINDS[dtype])
    again = quantise.quantise(torch.from_numpy(gguf.quants.dequantize(blocks, KINDS[dtype])), dtype)
    np.testing.assert_array_equal(as_blocks(again, dtype), blocks.reshape(6, 3, 3, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_between_does_not_keep_them(dtype):
    """Which is why a GGUF model is kept as float32, and quantised from that."""
    values = dequantise(quantise.quantise(random_weights(1), dtype), dtype, torch.float32)
    assert not torch.equal(quantise.quantise(values.bfloat16(), dtype), quantise.quantise(values, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_gives_the_values_that_the_cpu_gives(dtype):
    rows = quantise.quantise(random_weights(3), dtype)
    expected = dequantise(rows, dtype, torch.float32)
    size = 3 * QUANT_BYTES[dtype]
    scales = rows[..., size:].contiguous().view(torch.float16).float()
    assert torch.equal(quantise._dequantise_on_device(rows[..., :size], scales, dtype), expected)
    assert torch.equal(dequantise(rows, dtype, torch.bfloat16), expected.bfloat16())


def test_the_bytes_of_a_row_are_pinned():
    weights = torch.zeros(1, 64)
    weights[0, :3], weights[0, 40] = torch.tensor([1.0, -8.0, 3.0]), 127.0
    int8 = quantise.quantise(weights, "int8")[0].numpy().tobytes()
    assert int8[:4] == bytes([16, 129, 48, 0])
    assert int8[40] == 127
    assert np.frombuffer(int8[64:], "<f2").tolist() == [np.float16(8 / 127), 1.0]
    int4 = quantise.quantise(weights, "int4")[0].numpy().tobytes()
    assert int4[:16] == bytes([0x89, 0x80, 0x8B]) + b"\x88" * 13
    assert int4[16:32] == b"\x88" * 8 + b"\x80" + b"\x88" * 7
    assert np.frombuffer(int4[32:], "<f2").tolist() == [1.0, -127 / 8]


def test_the_relative_error_is_what_it_says():
    weights = random_weights(4, (1500, 3, 64))
    rows = quantise.quantise(weights, "int4")
    lost = dequantise(rows, "int4", torch.float32) - weights
    assert relative_error(weights, rows, "int4") == pytest.approx(float(lost.norm() / weights.norm()), rel=1e-5)
    assert relative_error(torch.zeros(2, 64), quantise.quantise(torch.zeros(2, 64), "int8"), "int8") == 0


@pytest.mark.parametrize(("width", "dtype"), [(48, "int8"), (32, "int4"), (100, "int4")])
def test_a_width_that_groups_do_not_fit_is_refused(width, dtype):
    message = (
        f"rows of {width} weights cannot be {dtype}: they must be a multiple of 32 and at least 64; take a float dtype"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        row_bytes(width, dtype)


@pytest.fixture(scope="module")
def rounded_models(tiny_models, tmp_path_factory):
    """Each tiny model with the values that its quantised neurons have, for transformers: the dense reference."""
    made = {}
    for name in ("llama-silu", "llama-relu", "opt"):
        for dtype in DTYPES:
            target = tmp_path_factory.mktemp("rounded") / f"{name}-{dtype}"
            model = AutoModelForCausalLM.from_pretrained(tiny_models[name], dtype=torch.float32)
            for key, weight in model.named_parameters():
                if re.search(r"gate_proj|up_proj|fc1\.weight", key):
                    weight.data = rounded(weight.data, dtype)
                elif re.search(r"down_proj|fc2\.weight", key):
                    weight.data = rounded(weight.data.T.contiguous(), dtype).T.contiguous()
            model.save_pretrained(target)
            made[name, dtype] = target
    return made


def rounded(weights: torch.Tensor, dtype: str) -> torch.Tensor:
    return dequantise(quantise.quantise(weights, dtype), dtype, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt"])
def test_the_output_is_that_of_the_dense_model_with_the_same_weights(tiny_models, rounded_models, name, dtype):
    reference = AutoModelForCausalLM.from_pretrained(rounded_models[name, dtype], dtype=torch.float32)
    for split in ("none", "half", "all"):
        plan = quantised_plan(tiny_models[name], splits(160, 4)[split], dtype, cache={"name": "hot_predicted"})
        with Session(plan, tiny_models[name], "cpu") as session:
            for ids in prompts(3):
                seen: list[torch.Tensor] = []
                run = session.generate(ids, max_tokens=24, stop=False, on_logits=seen.append)
                expected, logits = dense_greedy(reference, ids, 24)
                assert (torch.stack(seen) - logits).norm() / logits.norm() < 2e-4
                assert list(run.ids) == expected
            check_bank(session.last_bank)


def quantised_plan(directory, slots, dtype: str, **changes):
    """The models are small and kept in float32: so are the parts that are not quantised."""
    plan = make_plan(directory, slots, "float32", **changes)
    return replace(plan, spec=plan.spec.as_run(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replay_of_quantised_neurons_decides_as_the_simulator_does(tiny_models, tmp_path, dtype):
    trace = record(tiny_models["llama-relu"], prompts(2), tokens=24, out=tmp_path / "trace")
    plan = quantised_plan(tiny_models["llama-relu"], 60, dtype, cache={"name": "lru"}, prediction="oracle")
    with Session(plan, tiny_models["llama-relu"], "cpu") as session:
        executed = session.replay(trace)
        check_bank(session.last_bank)
    assert executed.same_decisions(simulate(plan, trace))
    moved = executed.timeline.to_frame().query("step == 'prefetch'")
    assert len(moved) > 10
    assert (moved["bytes"] == moved["neurons"] * plan.spec.neuron_bytes).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_states_what_quantising_changed(tiny_models, dtype):
    plan = quantised_plan(tiny_models["opt"], 60, dtype)
    run = execute(plan, tiny_models["opt"], [1, 2], device="cpu", max_tokens=2)
    checkpoint = open_checkpoint(tiny_models["opt"])
    expected = []
    for layer in range(plan.spec.layers):
        rows = checkpoint.neurons(layer).rows
        expected.append(relative_error(rows, quantise.quantise(rows, dtype), dtype))
    assert run.timeline.meta["quantisation_errors"] == pytest.approx(expected)
    assert all(0.002 < error < 0.01 if dtype == "int8" else 0.05 < error < 0.12 for error in expected)
    whole = execute(make_plan(tiny_models["opt"], 60), tiny_models["opt"], [1, 2], device="cpu", max_tokens=2)
    assert "quantisation_errors" not in whole.timeline.meta


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_slabs_take_the_bytes_that_the_plan_counts(tiny_models, dtype):
    plan = quantised_plan(tiny_models["llama-silu"], 60, dtype)
    with Session(plan, tiny_models["llama-silu"], "cpu") as session:
        session.generate([1, 2], max_tokens=1)
        bank = session.last_bank
    assert bank.host.numel() == plan.spec.ffn_bytes
    assert sum(slots.numel() for slots in bank.slots) == 4 * 60 * plan.spec.neuron_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_quantised_neurons_are_taken_in_chunks(dtype, tiny_models, monkeypatch):
    spec = open_checkpoint(tiny_models["llama-silu"]).spec.as_run(dtype)
    rows = quantise.quantise(random_weights(9, (50, 3, 64)) / 8, dtype)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((5, 64))).float()
    expected = kernels_gpu.ffn(dequantise(rows, dtype, torch.float32), x, spec, None, 0.1)
    monkeypatch.setattr(kernels_gpu, "CHUNK", 16)
    for mine, theirs in zip(kernels_gpu.ffn(rows, x, spec, None, 0.1), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_gguf_models_gate_and_up_are_taken_as_they_are(tmp_path, tiny_models):
    """Through float32 safetensors, as ``dinfer fetch`` keeps them; its down has groups along the neurons."""
    checkpoint = open_checkpoint(tiny_models["llama-silu"])
    rows = checkpoint.neurons(0).rows.float()
    gate = rows[:, 0].contiguous()
    blocks = gguf.quants.quantize(gate.numpy(), Kind.Q4_0)
    save_file({"gate": torch.from_numpy(gguf.quants.dequantize(blocks, Kind.Q4_0))}, tmp_path / "model.safetensors")
    replaced = replace(checkpoint, directory=tmp_path).tensor("gate")
    taken = as_blocks(quantise.quantise(replaced, "int4"), "int4")
    np.testing.assert_array_equal(taken, blocks.reshape(len(gate), 2, -1))


def test_a_plan_that_counts_attention_as_quantised_is_refused(tiny_models):
    plan = make_plan(tiny_models["opt"], 60)
    plan = replace(plan, spec=plan.spec.with_dtype("int4"))
    message = (
        "plan counts attention as int4, a run keeps it in float32; plan with --dtype int4, or with spec.as_run"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        execute(plan, tiny_models["opt"], [1], device="cpu")
