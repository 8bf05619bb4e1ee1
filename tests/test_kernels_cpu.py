"""The CPU kernels against numpy in float64."""

import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.exec.kernels_cpu import VIEWS, copy_rows, ffn_cpu, read_rows
from dinfer.families.quantise import QUANT_BYTES, dequantise, quantise
from dinfer.model import ACTIVATIONS, ModelSpec

NEURONS = 37
GATED = ["relu", "fatrelu", "drelu", "silu", "gelu"]
UNGATED = ["relu", "fatrelu", "silu", "gelu"]
KINDS = [(name, True) for name in GATED] + [(name, False) for name in UNGATED]
HIDDEN = [1, 31, 32, 64, 100, 128, 576, 1000]
FLOATS = [dtype for dtype in VIEWS if dtype not in QUANT_BYTES]
WIDTHS = [(dtype, hidden) for dtype in FLOATS for hidden in HIDDEN]
WIDTHS += [(dtype, hidden) for dtype in QUANT_BYTES for hidden in (64, 96, 160, 576, 1056)]


def spec(activation: str, gated: bool, hidden: int) -> ModelSpec:
    return ModelSpec(
        "small", "llama" if gated else "opt", layers=1, hidden=hidden, neurons=NEURONS, heads=1,
        kv_heads=1, head_dim=1, vocab=2, gated=gated, activation=activation,
    )  # fmt: skip


def random_rows(rng, dtype: str, matrices: int, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """The view that the kernels take and the weights that it holds, in float64."""
    values = rng.standard_normal((NEURONS, matrices, hidden)) / hidden**0.5
    if dtype in QUANT_BYTES:
        rows = quantise(torch.from_numpy(values), dtype)
        return rows.numpy().view(VIEWS[dtype]), dequantise(rows, dtype, torch.float64).numpy()
    weights = torch.from_numpy(values).to(getattr(torch, dtype))
    view = weights.view(getattr(torch, VIEWS[dtype])).numpy()
    return view, weights.double().numpy()


def tolerance(dtype: str) -> float:
    """Of a sum's error to its size: floats are summed in float32; for integer dots x is rounded to 16 bits."""
    return 1e-4 if dtype in QUANT_BYTES else 1e-6


def activate(activation: str, gate: np.ndarray) -> np.ndarray:
    if activation == "silu":
        return gate / (1 + np.exp(-gate))
    if activation == "gelu":
        return 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    return np.maximum(gate, 0)


def reference(activation, weights, x, ids, threshold, bias):
    """Output [hidden], values and active [ids] in float64."""
    first = weights[ids, 0] @ x.astype(np.float64)
    if weights.shape[1] == 3:
        up = weights[ids, 1] @ x.astype(np.float64) + bias[ids]
        value = activate(activation, first) * (np.maximum(up, 0) if activation == "drelu" else up)
    else:
        first = first + bias[ids]
        value = activate(activation, first)
    told = first if ACTIVATIONS[activation] == "relu" else abs(value)
    active = told > threshold
    values = np.where(active, value, 0)
    return values @ weights[ids, -1], values, active


def some_ids(rng, count: int) -> np.ndarray:
    return np.sort(rng.choice(NEURONS, count, replace=False)).astype(np.int32)


@pytest.mark.parametrize(("activation", "gated"), KINDS)
@pytest.mark.parametrize(("dtype", "hidden"), WIDTHS)
def test_ffn_equals_float64(dtype, activation, gated, hidden):
    rng = np.random.default_rng([hidden, len(activation), gated, len(dtype)])
    rows, weights = random_rows(rng, dtype, 3 if gated else 2, hidden)
    x = rng.standard_normal(hidden).astype(np.float32)
    threshold = 0.0 if activation == "relu" else 0.05
    for count, biased, predicted in itertools.product([0, 1, 4, 22, NEURONS], [0, 1], [0, 1]):
        ids = some_ids(rng, count)
        bias = (rng.standard_normal(NEURONS) * biased).astype(np.float32)
        before = rng.standard_normal(hidden).astype(np.float32)
        out, values = before.copy(), np.full(count, np.nan, np.float32)
        active = np.ones(count, np.bool_)
        found = ffn_cpu(
            spec(activation, gated, hidden), rows, x, ids, out, values, threshold,
            bias if biased else None, active, bool(predicted),
        )  # fmt: skip
        total, expected, who = reference(activation, weights, x, ids, threshold, bias)
        assert found == active.sum()
        if dtype in QUANT_BYTES and (active != who).any():  # nearer to the threshold than the dots are exact
            assert (active != who).sum() == 1
            continue
        np.testing.assert_array_equal(active, who)
        np.testing.assert_allclose(values, expected, rtol=10 * tolerance(dtype), atol=2 * tolerance(dtype))
        assert not values[~who].any()
        error = np.linalg.norm(out - (before + total))
        assert error <= tolerance(dtype) * (np.linalg.norm(before) + np.linalg.norm(total))


@pytest.mark.parametrize("dtype", VIEWS)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_ffn_is_exact_at_a_real_width(dtype, activation):
    rng = np.random.default_rng(4096)
    rows, weights = random_rows(rng, dtype, 3, 4096)
    x = rng.standard_normal(4096).astype(np.float32)
    ids, out = np.arange(NEURONS, dtype=np.int32), np.zeros(4096, np.float32)
    values = np.empty(NEURONS, np.float32)
    ffn_cpu(spec(activation, True, 4096), rows, x, ids, out, values, 0.0)
    total, expected, _ = reference(activation, weights, x, ids, 0.0, np.zeros(NEURONS))
    assert np.linalg.norm(out - total) < tolerance(dtype) * np.linalg.norm(total)
    assert np.linalg.norm(values - expected) < tolerance(dtype) * np.linalg.norm(expected)


@settings(deadline=None, max_examples=60)
@given(
    ids=st.lists(st.integers(0, NEURONS - 1), unique=True).map(sorted),
    dtype=st.sampled_from(list(VIEWS)),
    kind=st.sampled_from(KINDS),
    threshold=st.floats(0, 0.5),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_of_any_id_set_add_up_to_the_whole(ids, dtype, kind, threshold, seed):
    """Values do not depend on the company, and two sides' partial sums give the layer."""
    rng = np.random.default_rng(seed)
    rows, weights = random_rows(rng, dtype, 3 if kind[1] else 2, 96)
    x = rng.standard_normal(96).astype(np.float32)
    everyone, mine = np.arange(NEURONS, dtype=np.int32), np.array(ids, np.int32)
    theirs = np.setdiff1d(everyone, mine).astype(np.int32)
    shape = spec(*kind, 96)

    def run(which):
        out, values = np.zeros(96, np.float32), np.empty(len(which), np.float32)
        return ffn_cpu(shape, rows, x, which, out, values, threshold), out, values

    (n, whole, values), (a, one, mine_values), (b, two, _) = run(everyone), run(mine), run(theirs)
    assert n == a + b
    np.testing.assert_array_equal(values[mine], mine_values)
    np.testing.assert_allclose(one + two, whole, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gated", [True, False])
def test_a_gate_at_the_threshold_is_inactive(dtype, gated):
    """The first matrix has one weight a neuron, so that its dot with x is exact."""
    rng = np.random.default_rng(1)
    rows, weights = random_rows(rng, dtype, 3 if gated else 2, 64)
    rows[:, 0, 1:] = 0
    x = np.ones(64, np.float32)
    ids = np.arange(NEURONS, dtype=np.int32)
    for tie in sorted(abs(weights[:, 0, 0]))[::9]:
        out, values = np.zeros(64, np.float32), np.empty(NEURONS, np.float32)
        active = np.empty(NEURONS, np.bool_)
        kind = spec("fatrelu", gated, 64)
        found = ffn_cpu(kind, rows, x, ids, out, values, float(tie), None, active)
        np.testing.assert_array_equal(active, weights[:, 0, 0] > tie)
        assert found == active.sum() < NEURONS


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_value_at_the_threshold_is_inactive(activation):
    rng = np.random.default_rng(2)
    rows, _ = random_rows(rng, "float32", 3, 64)
    x, ids = rng.standard_normal(64).astype(np.float32), np.arange(NEURONS, dtype=np.int32)
    out, values = np.zeros(64, np.float32), np.empty(NEURONS, np.float32)
    ffn_cpu(spec(activation, True, 64), rows, x, ids, out, values, 0.0)
    size = abs(values)
    for tie in size[::7]:
        again, active = np.empty_like(values), np.empty(NEURONS, np.bool_)
        kind = spec(activation, True, 64)
        ffn_cpu(kind, rows, x, ids, out, again, float(tie), None, active)
        np.testing.assert_array_equal(active, size > tie)
        np.testing.assert_array_equal(again, np.where(active, values, 0))


def test_a_decimal_threshold_is_rounded_as_torch_rounds_it():
    """float32(0.1) is above 0.1: a gate of exactly float32(0.1) is still at the threshold."""
    rows = np.random.default_rng(3).standard_normal((NEURONS, 2, 8)).astype(np.float32)
    rows[:, 0] = 0
    rows[:, 0, 0] = 0.1
    out, values = np.zeros(8, np.float32), np.empty(NEURONS, np.float32)
    ids = np.arange(NEURONS, dtype=np.int32)
    x = np.ones(8, np.float32)
    assert ffn_cpu(spec("fatrelu", False, 8), rows, x, ids, out, values, 0.1) == 0
    assert not out.any()


def test_a_drelu_neuron_with_a_negative_up_is_active_and_adds_nothing():
    rng = np.random.default_rng(5)
    rows, _ = random_rows(rng, "float32", 3, 16)
    rows[:, 0], rows[:, 1] = 1, -1
    out, values = np.zeros(16, np.float32), np.empty(NEURONS, np.float32)
    active = np.zeros(NEURONS, np.bool_)
    ids, x = np.arange(NEURONS, dtype=np.int32), np.ones(16, np.float32)
    found = ffn_cpu(spec("drelu", True, 16), rows, x, ids, out, values, 0.0, None, active)
    assert found == NEURONS
    assert active.all()
    assert not values.any()
    assert not out.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_weight_is_decoded_exactly(dtype):
    """With hidden 1, ungated, x = 1 the value is the weight, subnormals too; a NaN stays one."""
    words = np.arange(2**16).astype(np.uint16)
    rows = np.stack([words, np.zeros_like(words)], axis=1)[:, :, None].view(VIEWS[dtype])
    weights = torch.from_numpy(words).view(getattr(torch, dtype)).float().numpy()
    out, values = np.zeros(1, np.float32), np.empty(2**16, np.float32)
    ids, x = np.arange(2**16, dtype=np.int32), np.ones(1, np.float32)
    smallest = -float(np.finfo(np.float32).max)
    ffn_cpu(spec("fatrelu", False, 1), rows, x, ids, out, values, smallest)
    usual = np.isfinite(weights) & (weights > smallest)
    np.testing.assert_array_equal(values[usual], weights[usual])
    assert np.isnan(values[np.isnan(weights)]).all()


@pytest.mark.parametrize("dtype", VIEWS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_nan_in_x_is_not_hidden(dtype, wrong):
    rng = np.random.default_rng(6)
    rows, _ = random_rows(rng, dtype, 3, 64)
    x = rng.standard_normal(64).astype(np.float32)
    x[[7, 40]] = wrong, np.nan
    out, values = np.zeros(64, np.float32), np.empty(2, np.float32)
    ffn_cpu(spec("relu", True, 64), rows, x, np.array([3, 8], np.int32), out, values, 0.0)
    assert np.isnan(out).all()
    assert np.isnan(values).all()


ids_and_slots = st.lists(
    st.tuples(st.integers(0, 10), st.integers(0, 6)), max_size=7, unique_by=lambda pair: pair[1]
)


@settings(deadline=None, max_examples=60)
@given(pairs=ids_and_slots, dtype=st.sampled_from(["uint8", "uint16", "uint64", "float32"]))
def test_copy_rows_equals_numpy_indexing(pairs, dtype):
    rng = np.random.default_rng(len(pairs))
    source = rng.integers(0, 256, (11, 3, 20)).astype(dtype)
    destination = rng.integers(0, 256, (7, 3, 20)).astype(dtype)
    ids, slots = np.array(pairs, np.int32).reshape(-1, 2).T.copy()
    expected = destination.copy()
    expected[slots] = source[ids]
    copy_rows(source, ids, destination, slots)
    np.testing.assert_array_equal(destination, expected)


@pytest.mark.parametrize("words", [1, 31, 32, 96, 300])
@pytest.mark.parametrize("count", [0, 1, 19])
def test_read_rows_reads_every_word(words, count):
    rng = np.random.default_rng([words, count])
    rows = rng.integers(0, 2**32, (19, words), np.uint32)
    ids = np.sort(rng.choice(19, count, replace=False)).astype(np.int32)
    assert read_rows(rows, ids) == np.bitwise_xor.reduce(rows[ids], axis=None)


@pytest.mark.parametrize("dtype", QUANT_BYTES)
def test_the_largest_x_of_a_group_decides_the_error_of_its_group_only(dtype):
    """Dots of int8 and int4 rows round x to 16 bits with a scale for each 32: an outlier spoils 31 neighbours."""
    rng = np.random.default_rng(8)
    rows, weights = random_rows(rng, dtype, 2, 96)
    x = rng.standard_normal(96).astype(np.float32)
    x[40] = 1e4
    out, values = np.zeros(96, np.float32), np.empty(NEURONS, np.float32)
    ids, smallest = np.arange(NEURONS, dtype=np.int32), -float(np.finfo(np.float32).max)
    ffn_cpu(spec("fatrelu", False, 96), rows, x, ids, out, values, smallest)
    step = np.repeat(abs(x).reshape(3, 32).max(axis=1) / 32767, 32)
    bound = abs(weights[:, 0]) @ (step / 2) + 1e-6 * (abs(weights[:, 0]) @ abs(x))
    assert (abs(values - weights[:, 0] @ x.astype(np.float64)) <= bound).all()


PORTABLE = """
import numpy as np, sys
sys.path.insert(0, sys.argv[1])
import test_kernels_cpu as t
for dtype in sys.argv[2:]:
    for activation, hidden in (("relu", 96), ("silu", 576)):
        t.test_ffn_equals_float64(dtype, activation, True, hidden)
    t.test_ffn_is_exact_at_a_real_width(dtype, "relu")
print("same")
"""


def portable(level: str, dtypes: list[str]) -> str:
    """What the tests above say in a process that compiles for another CPU than this one."""
    environment = {**os.environ, "NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-W", "error", "-c", PORTABLE, str(Path(__file__).parent), *dtypes]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    return run.stdout or run.stderr


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names CPUs of x86-64")


@x86
def test_no_kernel_needs_avx_512():
    assert portable("x86-64-v3", ["float16", "int4"]) == "same\n"


@x86
@pytest.mark.slow
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_every_level_of_the_cpu_gives_the_same(level):
    assert portable(level, list(VIEWS)) == "same\n"
