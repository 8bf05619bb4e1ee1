"""The device's FFN and the copy of scattered rows against float64: torch, Triton's interpreter, and a GPU for both.

Triton's kernels are also compiled for GPUs that are not there, by the compiler that it brings.
"""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.exec import kernels_gpu
from dinfer.model import ModelSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton's kernels are compiled here, not interpreted")
WAYS = [
    pytest.param(("torch", "cpu"), id="torch"),
    pytest.param(("triton", "cpu"), id="triton", marks=interpreted),
    pytest.param(("torch", "cuda"), id="torch-cuda", marks=pytest.mark.cuda),
    pytest.param(("triton", "cuda"), id="triton-cuda", marks=pytest.mark.cuda),
]
KINDS = {
    "relu": ("relu", True, 0.0, 0.0),
    "fatrelu": ("fatrelu", True, 0.4, 0.0),
    "raised": ("fatrelu", True, 0.4, 0.7),
    "drelu": ("drelu", True, 0.0, 0.0),
    "silu": ("silu", True, 0.0, 0.3),
    "gelu": ("gelu", True, 0.0, 0.0),
    "opt": ("relu", False, 0.0, 0.0),
}
"""Kind -> activation, gated, gate threshold, the plan's threshold: of values, of a ReLU kind's gates."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """An ``ffn`` and the device that it runs on; Triton's with blocks small enough that few slots fill several."""
    name, device = request.param
    if name == "torch":
        return kernels_gpu.ffn, device
    kernels_triton = pytest.importorskip("dinfer.exec.kernels_triton", exc_type=ImportError)
    monkeypatch.setattr(kernels_triton, "VALUE_COLUMNS", 64)
    monkeypatch.setattr(kernels_triton, "SUM_SLOTS", 32)
    return kernels_triton.ffn, device


def shape(kind: str, neurons: int, hidden: int, dtype: str = "float32") -> ModelSpec:
    activation, gated, threshold, _ = KINDS[kind]
    return ModelSpec(
        "shape", "llama" if gated else "opt", 1, hidden, neurons, 1, 1, 1, 1,
        activation=activation, gated=gated, gate_threshold=threshold, dtype=dtype,
    )  # fmt: skip


def random(spec: ModelSpec, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, input and biases, so that values are of the order of 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(spec.neurons, spec.matrices, spec.hidden, generator=generator) / spec.hidden**0.5
    return rows, torch.randn(tokens, spec.hidden, generator=generator), torch.randn(spec.neurons, generator=generator)


def reference(rows, x, spec, bias, threshold):
    """The definition, in float64: values [tokens, neuron] and their sum over the down rows."""
    rows, x = rows.double(), x.double()
    gate = x @ rows[:, 0].T + (0 if bias is None else bias.double())
    values = {
        "silu": lambda: gate / (1 + torch.exp(-gate)),
        "gelu": lambda: gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
    }.get(spec.activation, lambda: gate * (gate > max(spec.gate_threshold, threshold)))()
    if spec.gated:
        up = x @ rows[:, 1].T
        values = values * (up.clamp(min=0) if spec.activation == "drelu" else up)
    if spec.sparsity_kind == "magnitude":
        values = values * (values.abs() > threshold)
    return values @ rows[:, -1], values


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((found.cpu().double() - expected).norm() <= tolerance * expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize(
    ("dtype", "tokens", "picks"),
    [(torch.float32, 2, False), (torch.float32, 1, True), (torch.float16, 1, False), (torch.bfloat16, 1, True)],
    ids=str,
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_ffn_is_the_definition(way, kind, dtype, tokens, picks):
    ffn, device = way
    spec, threshold = shape(kind, 40, 80), KINDS[kind][3]
    rows, x, bias = (t.to(dtype) for t in random(spec, tokens))
    chosen = torch.from_numpy(np.random.default_rng(1).permutation(40)[:19]) if picks else torch.arange(40)
    biased = bias if kind == "opt" else None
    expected, values = reference(rows[chosen], x, spec, None if biased is None else biased[chosen], threshold)
    given_bias = None if biased is None else biased.to(device)
    picked = chosen.to(device) if picks else None
    total, found = ffn(rows.to(device), x.to(device), spec, given_bias, threshold, picked)
    assert total.dtype == dtype
    assert total.shape == (tokens, 80)
    assert close(total, expected, TOLERANCE[dtype])
    assert close(found, values, TOLERANCE[dtype])
    if dtype == torch.float32:  # a half's rounding may move a value over its threshold
        assert torch.equal(found.cpu() != 0, values != 0)


TRITON = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", TRITON)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(neurons=st.integers(1, 40), hidden=st.integers(1, 140), tokens=st.integers(1, 3), seed=st.integers(0, 99))
def test_any_shape_is_the_definition(device, neurons, hidden, tokens, seed):
    kernels_triton = pytest.importorskip("dinfer.exec.kernels_triton", exc_type=ImportError)
    spec = shape("relu", neurons, hidden)
    rows, x, _ = random(spec, tokens, seed)
    expected, values = reference(rows, x, spec, None, 0.0)
    total, found = kernels_triton.ffn(rows.to(device), x.to(device), spec, None, 0.0)
    assert close(total, expected, 1e-5)
    assert torch.equal(found.cpu() != 0, values != 0)


def test_no_active_slot_gives_a_sum_of_exactly_nothing(way):
    ffn, device = way
    spec = replace(shape("fatrelu", 70, 64), gate_threshold=1e9)
    rows, x, _ = (t.to(device) for t in random(spec, tokens=1))
    rows[:, 1:] = float("nan")  # neither up nor down rows of the inactive may be read
    if ffn is kernels_gpu.ffn:
        rows[:, 1:] = 1.0  # torch reads them
    total, values = ffn(rows, x, spec, None, 0.0)
    assert not total.any()
    assert not values.any()


def test_the_same_input_gives_the_same_bits(way):
    ffn, device = way
    spec = shape("relu", 70, 64)
    rows, x, _ = (t.to(device) for t in random(spec, tokens=1))
    first, again = ffn(rows, x, spec, None, 0.0), ffn(rows, x, spec, None, 0.0)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def quantised(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows [..., hidden] as docs/quantisation.md lays them out, and the float64 weights that those bytes mean."""
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    limit = 127 if dtype == "int8" else 7
    scales = (np.abs(groups).max(axis=-1) / limit).astype(np.float16)
    quants = np.clip(np.rint(groups / scales[..., None].astype(float)), -limit, limit).astype(np.int8)
    if dtype == "int8":
        stored = quants.view(np.uint8)
    else:
        nibbles = (quants + 8).astype(np.uint8)
        stored = nibbles[..., :16] | nibbles[..., 16:] << 4
    parts = stored.reshape(*rows.shape[:-1], -1), np.ascontiguousarray(scales).view(np.uint8)
    meant = (quants * scales[..., None].astype(float)).reshape(rows.shape)
    return np.concatenate(parts, axis=-1), meant


@pytest.mark.parametrize("way", WAYS[1:2] + WAYS[3:], indirect=True)
@pytest.mark.parametrize("picks", [False, True], ids=["all", "picked"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("hidden", [32, 96])
def test_quantised_rows_are_decoded_within(way, dtype, hidden, picks):
    ffn, device = way
    spec = shape("silu", 20, hidden, dtype)
    rows, x, _ = random(spec, tokens=2)
    stored, meant = quantised(rows.numpy(), dtype)
    chosen = torch.tensor([3, 19, 0, 7]) if picks else torch.arange(20)
    expected, values = reference(torch.from_numpy(meant)[chosen], x, spec, None, 0.1)
    picked = chosen.to(device) if picks else None
    total, found = ffn(torch.from_numpy(stored).to(device), x.to(device), spec, None, 0.1, picked)
    assert close(total, expected, 1e-5)
    assert torch.equal(found.cpu() != 0, values != 0)


@pytest.mark.parametrize("device", TRITON)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(words=st.integers(1, 300), count=st.integers(1, 30), seed=st.integers(0, 99))
def test_scattered_rows_arrive_bit_for_bit(device, words, count, seed):
    kernels_triton = pytest.importorskip("dinfer.exec.kernels_triton", exc_type=ImportError)
    rng = np.random.default_rng(seed)
    host = torch.from_numpy(rng.integers(0, 256, (50, 2 * words)).astype(np.uint8))
    ids, slots = (torch.from_numpy(rng.permutation(size)[:count]) for size in (50, 40))
    if device == "cuda":
        host, ids, slots = host.pin_memory(), ids.pin_memory(), slots.pin_memory()
    target = torch.zeros((40, 2 * words), dtype=torch.uint8, device=device)
    kernels_triton.copy_scattered(host, ids, target, slots)
    expected = torch.zeros((40, 2 * words), dtype=torch.uint8)
    expected[slots] = host[ids]
    assert torch.equal(target.cpu(), expected)


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dinfer.exec import kernels_triton as kernels

def build(kernel, capability, types, constants, warps=4):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    wide = "v4.b32" in built.asm["ptx"]
    print(capability, kernel.__name__, bool(built.asm["cubin"]) and wide)

STORED = {16: ("*bf16", "*bf16", 4096), 8: ("*u8", "*fp16", 4352), 4: ("*u8", "*fp16", 2304)}
for capability in map(int, sys.argv[1].split(",")):
    for bits in map(int, sys.argv[2].split(",")):
        stored, given, row = STORED[bits]
        shape = {"HIDDEN": 4096, "MATRICES": 3, "ROW": row, "BITS": bits}
        rows = {"rows": stored, "scales": "*fp16" if bits < 16 else stored, "values": "*fp32", "picked": "*i64"}
        build(
            kernels._slot_values, capability,
            rows | dict(x=given, bias=given, count="i32", gate_threshold="fp32", value_threshold="fp32"),
            shape | dict(PICKED=False, BIASED=True, GATED=True, ACTIVATION=0, SLOTS=kernels.VALUE_SLOTS,
                         COLUMNS=kernels.VALUE_COLUMNS),
        )
        build(
            kernels._slot_sums, capability, rows | dict(total=given, count="i32"),
            shape | dict(PICKED=True, SLOTS=kernels.SUM_SLOTS, COLUMNS=kernels.SUM_COLUMNS), kernels.SUM_WARPS,
        )
    build(
        kernels._copy_scattered, capability,
        dict(host="*i16", ids="*i64", target="*i16", slots="*i64", count="i32"),
        dict(WORDS=12288, BLOCK=kernels.COPY_WORDS),
    )
"""


@pytest.mark.parametrize(
    ("capabilities", "bits"), [("80", "16"), pytest.param("75,86,89,90", "16,8,4", marks=pytest.mark.slow)]
)
def test_the_kernels_compile_for_gpus_and_load_in_whole_vectors(capabilities, bits, tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, capabilities, bits]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == (2 * len(bits.split(",")) + 1) * len(capabilities.split(","))
    assert all(line.endswith("True") for line in lines), done.stdout
