"""The predictor artefact: what it computes against plain formulas,
its bytes, and what it refuses."""

import json
import re
import struct
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.predictors import Predictors, predictor_bytes, rank_for_share
from dinfer.trace import Trace

SPEC = ModelSpec(
    name="small", family="llama", layers=3, hidden=4, neurons=70, activation="relu", heads=1, kv_heads=1, head_dim=4,
    vocab=10, max_positions=64,
)  # fmt: skip


def refuses(text: str):
    return pytest.raises(InputError, match=f"^{re.escape(text)}")


def some(spec: ModelSpec = SPEC, lookahead: int = 1, ranks=(1, 2, 3), **changes) -> Predictors:
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float16)  # noqa: E731
    given = {
        "first": tuple(draw(spec.hidden, r) for r in ranks),
        "second": tuple(draw(r, spec.neurons) for r in ranks),
        "bias": tuple(draw(spec.neurons) for _ in ranks),
        "thresholds": np.array([0.0, 0.25, 0.75], np.float32),
    }
    return Predictors(spec, lookahead, **{**given, **changes})


def trace_of(spec: ModelSpec, tokens: int, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"id": 1, "sequence": 0, "position": np.arange(tokens), "phase": "decode"})
    active = bits.pack(rng.random((tokens, spec.layers, spec.neurons)) < 0.3)
    hidden = (5 * rng.normal(size=(tokens, spec.layers, spec.hidden))).astype(np.float16)
    return Trace(spec, table, active, {"kind": "recorded"}, hidden=hidden)


def chance(predictors: Predictors, layer: int, row: np.ndarray) -> np.ndarray:
    """The formula of docs/predictor.md in float64, neuron by neuron."""
    row = row.astype(np.float64)
    x = row / np.sqrt((row**2).mean() + 1e-6)
    first, second = (a[layer].astype(np.float64) for a in (predictors.first, predictors.second))
    logits = [(x @ first) @ second[:, n] + float(predictors.bias[layer][n]) for n in range(second.shape[1])]
    return 1 / (1 + np.exp(-np.array(logits)))


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_sets_are_those_of_the_formula(lookahead):
    predictors, trace = some(lookahead=lookahead), trace_of(SPEC, 700)
    sets = bits.unpack(predictors.predict(trace), SPEC.neurons)
    for token in (0, 511, 512, 699):
        for layer in range(SPEC.layers):
            source = layer - lookahead if layer >= lookahead else 0
            expected = chance(predictors, layer, trace.hidden[token, source])
            scores = predictors.scores(layer, trace.hidden[token : token + 1, source])[0]
            assert np.allclose(scores, expected, atol=1e-5)
            clear = np.abs(expected - predictors.thresholds[layer]) > 1e-5
            assert (sets[token, layer] == (expected >= predictors.thresholds[layer]))[clear].all()
    assert sets[:, 0].all()  # threshold 0 predicts all, also what is least likely


def test_scale_of_the_residual_does_not_matter():
    predictors, trace = some(), trace_of(SPEC, 5)
    larger = replace(trace, hidden=trace.hidden * np.float16(4))
    assert np.array_equal(predictors.predict(trace), predictors.predict(larger))


def test_saved_and_loaded_it_is_the_same(tmp_path):
    predictors = some(quality={"recall": [0.5, 0.6, 0.7]}, training={"seed": 1}, weights="ab", activity=(0.1, 0.2, 0.3))
    predictors.save(tmp_path / "p")
    read = Predictors.load(tmp_path / "p")
    assert read.fingerprint() == predictors.fingerprint()
    assert read.ranks == (1, 2, 3)
    assert read.bytes == sum(2 * (r * (4 + 70) + 70) for r in (1, 2, 3))
    assert read.tag() == {"fingerprint": read.fingerprint(), "lookahead": 1, "rank": 2, "bytes": read.bytes}
    trace = trace_of(SPEC, 20)
    assert np.array_equal(read.predict(trace), predictors.predict(trace))
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["predictor.json", "predictor.safetensors"]


def test_the_format_is_pinned(tmp_path):
    tiny = replace(SPEC, layers=1, hidden=2, neurons=3)
    predictors = Predictors(
        tiny, 0, [np.array([[1], [2]], np.float16)], [np.array([[1, 2, 3]], np.float16)],
        [np.array([0, 0.5, 1], np.float16)], np.array([0.5], np.float32), (), "w", "t", {"recall": [1.0]}, {"seed": 0},
    )  # fmt: skip
    predictors.save(tmp_path)
    document = json.loads((tmp_path / "predictor.json").read_text())
    assert list(document) == (
        "format version model model_fingerprint weights trace lookahead ranks activity quality training fingerprint"
    ).split()
    assert document["format"] == "dinfer-predictor"
    assert document["version"] == 1
    assert document["ranks"] == [1]
    raw = (tmp_path / "predictor.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"predictor": document["fingerprint"]}
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        "first.0": ("F16", [2, 1]), "second.0": ("F16", [1, 3]), "bias.0": ("F16", [3]), "thresholds": ("F32", [1]),
    }  # fmt: skip
    begin, end = header["second.0"]["data_offsets"]
    assert raw[8 + length + begin : 8 + length + end] == bytes.fromhex("003c00400042")
    assert document["fingerprint"] == predictors.fingerprint() == "af84ac9cb982ad65"


def test_eight_bits_are_read_back_and_near_the_sixteen(tmp_path):
    """Each weight is off by at most half a step of its column, 1/254 of the column's largest."""
    wide = some()
    rounded = wide.rounded()
    assert (wide.bits, rounded.bits) == (16, 8)
    for layer in range(SPEC.layers):
        for before, after in zip(wide.wide(layer)[:2], rounded.wide(layer)[:2], strict=True):
            assert (np.abs(before - after) <= np.abs(before).max(axis=0) / 254 * 1.05 + 1e-7).all()
        assert np.array_equal(rounded.wide(layer)[2], wide.wide(layer)[2])
    assert rounded.bytes == sum(r * (4 + 70) + 2 * 70 + 2 * (r + 70) for r in (1, 2, 3))
    rounded.save(tmp_path / "p")
    read, trace = Predictors.load(tmp_path / "p"), trace_of(SPEC, 20)
    assert json.loads((tmp_path / "p" / "predictor.json").read_text())["version"] == 2
    assert (read.fingerprint(), read.bits, read.bytes) == (rounded.fingerprint(), 8, rounded.bytes)
    assert read.fingerprint() != wide.fingerprint()
    assert np.array_equal(read.predict(trace), rounded.predict(trace))
    assert np.array_equal(rounded.rounded().predict(trace), rounded.predict(trace))
    with refuses("predictor's scales has 1 layers; it must have 3"):
        replace(rounded, scales=rounded.scales[:1])
    with refuses("predictor's scales of layer 0 have shape (70,); it must be (71,)"):
        replace(rounded, scales=[scale[1:] for scale in rounded.scales])


def test_the_format_of_eight_bits_is_pinned(tmp_path):
    """127 steps to a column's largest: 2 / 127 in 16 bits is 0x2408, and 1 is 63.5 of them, just above."""
    tiny = replace(SPEC, layers=1, hidden=2, neurons=3)
    Predictors(
        tiny, 0, [np.array([[-1], [2]], np.float16)], [np.array([[1, 2, 0]], np.float16)],
        [np.array([0, 0.5, 1], np.float16)], np.array([0.5], np.float32),
    ).rounded().save(tmp_path)  # fmt: skip
    raw = (tmp_path / "predictor.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        "first.0": ("I8", [2, 1]), "second.0": ("I8", [1, 3]), "scale.0": ("F16", [4]), "bias.0": ("F16", [3]),
        "thresholds": ("F32", [1]),
    }  # fmt: skip

    def content(name: str) -> str:
        begin, end = header[name]["data_offsets"]
        return raw[8 + length + begin : 8 + length + end].hex()

    assert content("first.0") == "c07f"
    assert content("second.0") == "7f7f00"
    assert content("scale.0") == "0824082008240004"


def test_bytes_and_the_rank_of_a_share():
    """SmolLM2: 8% of 3 x 576 x 1536 16-bit weights is a rank of 99 with its bias, and of 197 in 8 bits."""
    spec = replace(SPEC, hidden=576, neurons=1536, layers=30)
    assert rank_for_share(spec, 0.08) == 99
    whole = 3 * 576 * 1536 * 2
    assert predictor_bytes(spec, 99) <= 0.08 * whole < predictor_bytes(spec, 100)
    assert rank_for_share(spec, 0.08, 8) == 197
    assert predictor_bytes(spec, 197, 8) <= 0.08 * whole < predictor_bytes(spec, 198, 8)
    with refuses("share is 0.0005 of the FFN's bytes; a predictor of rank 1 takes 0.0014, give more"):
        rank_for_share(spec, 0.0005)


def test_what_it_refuses(tmp_path):
    predictors = some(weights="mine")
    predictors.save(tmp_path / "p")
    with refuses("predictor is for small ("):
        predictors.check_model(replace(SPEC, hidden=8))
    with refuses("predictor is for other weights of small (mine, the model has other)"):
        predictors.check_model(SPEC, "other")
    predictors.check_model(SPEC, "mine")
    with refuses("the trace holds no residuals to predict from; record it with --hidden"):
        predictors.predict(replace(trace_of(SPEC, 2), hidden=None))
    with refuses("predictor's lookahead is 3; it must be 0 to 2 layers"):
        some(lookahead=3)
    with refuses("predictor's thresholds must be probabilities, 0 to 1"):
        some(thresholds=np.array([0, 1, 1.5], np.float32))
    with refuses("predictor's bias has 1 layers; it must have 3"):
        some(bias=predictors.bias[:1])
    with refuses("predictor of layer 1 has shapes (4, 1), (2, 70) and (70,); they must be (4, rank)"):
        some(first=(predictors.first[0], *predictors.first[:2]))
    with refuses(f"{tmp_path} is no predictor: it lacks predictor.json"):
        Predictors.load(tmp_path)


def test_damaged_files_are_refused(tmp_path):
    some().save(tmp_path)
    text, file = (tmp_path / "predictor.json").read_text(), tmp_path / "predictor.json"
    for change, message in [
        (("dinfer-predictor", "dinfer-plan"), f"{file} does not say format 'dinfer-predictor'"),
        (('"version": 1', '"version": 3'), f"predictor {file} has version 3, this dinfer reads up to 2; upgrade"),
        (('"version": 1', '"version": 2'), f"predictor {tmp_path} lacks 'scale.0'; train it again"),
        (('"lookahead": 1', '"lookahead": 2'), f"predictor {tmp_path} and its arrays do not belong together"),
        (('"lookahead"', '"ahead"'), f"predictor {tmp_path} lacks 'lookahead'; train it again"),
        (("{", ""), f"predictor {file} is not JSON ("),
    ]:
        file.write_text(text.replace(*change, 1))
        with refuses(message):
            Predictors.load(tmp_path)
    file.write_text(text)
    (tmp_path / "predictor.safetensors").write_bytes(b"nothing")
    with refuses(f"predictor arrays {tmp_path / 'predictor.safetensors'} cannot be read"):
        Predictors.load(tmp_path)
