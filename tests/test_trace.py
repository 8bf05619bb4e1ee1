"""The trace format: its bytes, what survives a kill, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.trace import Trace, TraceWriter, decode_levels, encode_levels

SPEC = ModelSpec(
    name="tiny",
    family="llama",
    layers=2,
    hidden=4,
    neurons=70,
    heads=2,
    kv_heads=1,
    head_dim=2,
    vocab=8,
    activation="relu",
)


def rows(count, first=0):
    """Token table and arrays of rows ``first`` and on: neuron ``i`` is active where i % (2 + row) == 0."""
    index = np.arange(first, first + count)
    table = pd.DataFrame({"id": index % 8, "sequence": 0, "position": index, "phase": "decode"})
    members = np.arange(70) % (2 + index[:, None, None]) == 0
    members = np.repeat(members, 2, axis=1)
    return table, bits.pack(members)


def write(path, count=3):
    with TraceWriter(path, SPEC, {"kind": "recorded"}) as writer:
        writer.append(*rows(count)[:1], active=rows(count)[1])
    return path


def refusal(path):
    with pytest.raises(InputError) as caught:
        Trace.load(path)
    return str(caught.value).replace(str(path), "DIR")


def test_bytes_of_a_tiny_trace(tmp_path):
    """Other tools read these files,
    so every byte of the arrays and every key of the meta is pinned here."""
    table = pd.DataFrame({"id": [5, 6], "sequence": 0, "position": [0, 1], "phase": "prefill"})
    members = np.zeros((2, 2, 70), bool)
    members[0, 0, [0, 9, 63]] = members[0, 1, 64] = members[1, 1, 69] = True
    score = np.arange(2 * 2 * 70, dtype=np.uint8).reshape(2, 2, 70)
    hidden = np.full((2, 2, 4), -1.5, np.float16)
    with TraceWriter(tmp_path / "t", SPEC, {"kind": "recorded"}, ("score", "hidden")) as writer:
        writer.append(table, bits.pack(members), score=score, hidden=hidden)

    files = {file.name: file.read_bytes() for file in (tmp_path / "t").iterdir()}
    assert sorted(files) == ["active.bin", "hidden.bin", "meta.json", "score.bin", "tokens.parquet"]
    assert files["active.bin"].hex(" ", 8).split() == [
        *("0102000000000080", "0000000000000000"),  # token 0, layer 0: neurons 0, 9, 63
        *("0000000000000000", "0100000000000000"),  # token 0, layer 1: neuron 64
        *("0000000000000000", "0000000000000000"),  # token 1, layer 0
        *("0000000000000000", "2000000000000000"),  # token 1, layer 1: neuron 69
    ]
    assert files["score.bin"] == bytes(i % 256 for i in range(280))
    assert files["hidden.bin"] == bytes.fromhex("00be") * 16
    assert json.loads(files["meta.json"]) == {
        "format": "dinfer-trace",
        "version": 1,
        "tokens": 2,
        "arrays": {"active": "<u8", "score": "|u1", "hidden": "<f2"},
        "spec": SPEC.to_dict(),
        "made": {"kind": "recorded"},
    }
    stored = pd.read_parquet(tmp_path / "t" / "tokens.parquet")
    assert list(stored) == ["id", "sequence", "position", "phase"]
    assert [str(stored[c].dtype) for c in ("id", "sequence", "position")] == ["int32"] * 3
    assert stored["phase"].tolist() == ["prefill", "prefill"]


def test_save_and_load_give_the_same_trace(tmp_path):
    """What was saved comes back equal, array by array,
    and its fingerprint does not change on the way."""
    table, active = rows(300)
    random = np.random.default_rng(0)
    levels = random.integers(0, 256, (300, 2, 70)).astype(np.uint8)
    hidden = random.standard_normal((300, 2, 4)).astype(np.float16)
    trace = Trace(SPEC, table, active, {"kind": "synthetic"}, levels, levels // 2, hidden, levels // 3)
    trace.save(tmp_path / "t")
    loaded = Trace.load(tmp_path / "t")
    assert loaded.spec == SPEC
    assert loaded.meta == {"kind": "synthetic"}
    for name in ("active", "score", "contribution", "hidden", "gate"):
        assert np.array_equal(getattr(loaded, name), getattr(trace, name))
    assert loaded.fingerprint == trace.fingerprint
    assert loaded.summary().to_dict("records") == trace.summary().to_dict("records")


def test_frequency_and_density_count_members(tmp_path):
    """Placement starts from these shares, so they are checked against a plain mean."""
    trace = Trace.load(write(tmp_path / "t", 30))
    members = bits.unpack(trace.active, 70)
    assert np.allclose(trace.frequency, members.mean(axis=0))
    assert np.allclose(trace.density, members.mean(axis=(0, 2)))


def test_rows_by_phase_and_sequence(tmp_path):
    """A reader takes one sequence or one phase,
    and gets the rows in the order in which they were written."""
    table, active = rows(6)
    table["sequence"] = [0, 1, 0, 1, 1, 0]
    table["phase"] = ["prefill", "prefill", *["decode"] * 4]
    trace = Trace(SPEC, table, active)
    assert trace.sequence(1).tokens["position"].tolist() == [1, 3, 4]
    assert trace.phase("decode").sequence(0).tokens["position"].tolist() == [2, 5]
    assert np.array_equal(trace.sequence(1).active, active[[1, 3, 4]])
    with pytest.raises(InputError) as caught:
        trace.sequence(2)
    assert str(caught.value) == "sequence 2 is not in the trace; it holds 0 to 1"


def test_appended_rows_are_readable_after_each_commit(tmp_path):
    """A long recording can be looked at while it runs: what is committed is there, the rest is not."""
    with TraceWriter(tmp_path / "t", SPEC, {}, commit_every=4) as writer:
        assert len(Trace.load(tmp_path / "t")) == 0
        for first, seen in ((0, 0), (3, 6), (6, 6)):
            table, active = rows(3, first)
            writer.append(table, active)
            assert len(Trace.load(tmp_path / "t")) == seen
    assert len(Trace.load(tmp_path / "t")) == 9


def test_an_exception_keeps_what_was_appended(tmp_path):
    """A recording that fails at token 5 has lost nothing of the 4 before it."""

    def record():
        with TraceWriter(tmp_path / "t", SPEC, {}) as writer:
            writer.append(*rows(4))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        record()
    assert np.array_equal(Trace.load(tmp_path / "t").active, rows(4)[1])


WRITE_FOREVER = """
import sys
sys.path.insert(0, {tests!r})
from test_trace import SPEC, rows
from dinfer.trace import TraceWriter
writer = TraceWriter({path!r}, SPEC, {{}}, commit_every=50)
first = 0
while True:
    table, active = rows(7, first)
    writer.append(table, active)
    first += 7
"""


def test_a_killed_recording_is_readable(tmp_path):
    """The process is killed without warning in the middle of its work,
    and every token up to its last commit is there and right."""
    path = tmp_path / "t"
    code = WRITE_FOREVER.format(tests=str(Path(__file__).parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while committed(path) < 200 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    trace = Trace.load(path)
    table, active = rows(len(trace))
    assert len(trace) >= 200
    assert np.array_equal(trace.active, active)
    assert trace.tokens["position"].tolist() == table["position"].tolist()


def committed(path):
    try:
        return json.loads((path / "meta.json").read_text())["tokens"]
    except FileNotFoundError:
        return 0


def test_nothing_is_overwritten(tmp_path):
    """A second recording into the same place is refused,
    and the first one is untouched."""
    write(tmp_path / "t")
    before = {file.name: file.read_bytes() for file in (tmp_path / "t").iterdir()}
    with pytest.raises(InputError) as caught:
        TraceWriter(tmp_path / "t", SPEC, {})
    assert str(caught.value) == (
        f"{tmp_path / 't'} exists and is not empty; a recording never overwrites, choose another -o"
    )
    assert {file.name: file.read_bytes() for file in (tmp_path / "t").iterdir()} == before


def test_truncated_trace_is_refused(tmp_path):
    """A copy that broke off is told by the bytes that are missing, never read as a shorter trace."""
    path = write(tmp_path / "t")
    with (path / "active.bin").open("r+b") as file:
        file.truncate(95)
    assert refusal(path) == (
        "DIR/active.bin has 95 bytes, its 3 tokens need 96; the trace is truncated, record it again"
    )
    (path / "active.bin").unlink()
    assert "has 0 bytes, its 3 tokens need 96" in refusal(path)
    shutil.copytree(write(tmp_path / "whole"), path, dirs_exist_ok=True)
    rows(2)[0].to_parquet(path / "tokens.parquet")
    assert refusal(path) == ("DIR/tokens.parquet has 2 rows, meta.json says 3; it is truncated")
    (path / "tokens.parquet").write_bytes(b"PAR1")
    assert refusal(path).startswith("DIR/tokens.parquet cannot be read (")


def test_foreign_directories_are_refused(tmp_path):
    """Neither an empty directory nor another program's meta.json passes for a trace."""
    path = tmp_path / "t"
    assert refusal(path) == ("DIR is no trace: it lacks meta.json; record one with `dinfer record MODEL -o DIR`")
    path.mkdir()
    (path / "meta.json").write_text('{"format": "other"}')
    assert refusal(path) == ("DIR/meta.json does not say format 'dinfer-trace'; it is not a trace of dinfer")
    (path / "meta.json").write_text("[1, 2")
    assert refusal(path).startswith("DIR/meta.json is not JSON (Expecting ',' delimiter")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "DIR/meta.json has version 2, this dinfer reads up to 1; upgrade dinfer"),
        (
            {"arrays": {"active": "<u8", "gates": "|u1"}},
            "DIR/meta.json names the array 'gates'; known are active, score, contribution, hidden, gate",
        ),
        (
            {"arrays": {"score": "|u1"}},
            "DIR/meta.json lacks the array active; the trace is damaged, record it again",
        ),
        (
            {"arrays": {"active": ">u8"}},
            "DIR/meta.json stores active as '>u8'; it must be '<u8'",
        ),
        (
            {"tokens": -1},
            "DIR/meta.json has tokens -1; it must be a whole number of at least 0",
        ),
        (
            {"spec": None},
            "DIR/meta.json lacks spec; the trace is damaged, record it again",
        ),
    ],
)
def test_meta_that_breaks_a_rule_is_refused(tmp_path, changes, said):
    """A later version or a damaged meta.json is named by what is wrong in it."""
    path = write(tmp_path / "t")
    meta = json.loads((path / "meta.json").read_text()) | changes
    meta = {key: value for key, value in meta.items() if value is not None}
    (path / "meta.json").write_text(json.dumps(meta))
    assert refusal(path) == said


def test_appending_the_wrong_arrays_is_refused(tmp_path):
    """A row with a missing array or a wrong shape would shift all later rows, so it never gets in."""
    with TraceWriter(tmp_path / "t", SPEC, {}, ("score",)) as writer:
        table, active = rows(2)
        with pytest.raises(InputError) as caught:
            writer.append(table, active)
        assert str(caught.value) == (f"trace {tmp_path / 't'} holds active, score, but active was appended")
        with pytest.raises(InputError) as caught:
            writer.append(table, active, score=np.zeros((2, 2, 64), np.uint8))
        assert str(caught.value) == ("trace array score has shape (2, 2, 64); it must be (2, 2, 70)")
    assert len(Trace.load(tmp_path / "t")) == 0


@given(hnp.arrays(bool, hnp.array_shapes(min_dims=1, max_dims=3, max_side=140)))
def test_bits_round_trip(members):
    """Any set of any number of neurons comes back, and no bit is set past the last neuron."""
    neurons = members.shape[-1]
    words = bits.pack(members)
    assert words.dtype == np.dtype("<u8")
    assert words.shape == (*members.shape[:-1], -(-neurons // 64))
    assert np.array_equal(bits.unpack(words, neurons), members)
    assert not bits.unpack(words, 64 * words.shape[-1])[..., neurons:].any()
    assert np.array_equal(bits.count(words), members.sum(axis=-1))


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_ids_round_trip(case):
    """A set written as ids is the same set, sorted, when it is read as ids."""
    neurons, members = case
    words = bits.from_ids(np.array(sorted(members), int), neurons)
    assert bits.ids(words, neurons).tolist() == sorted(members)


MAGNITUDES = hnp.arrays(np.float32, 20, elements=st.floats(-(2.0**10), 2.0**10, width=32, allow_subnormal=False))


@given(MAGNITUDES, st.floats(0.125, 1024.0, width=32))
def test_levels_round_trip(values, scale):
    """Eight bits keep a magnitude to 2.2% over the 15.9 octaves below the scale,
    tell 0 from everything else, and clip what lies above."""
    codes = encode_levels(values, scale)
    back = decode_levels(codes, scale)
    magnitude = np.abs(values)
    assert ((codes == 0) == (magnitude == 0)).all()
    inside = (magnitude <= scale) & (magnitude >= scale * 2.0 ** (-254 / 16))
    assert (np.abs(back - magnitude)[inside] <= 0.0221 * magnitude[inside]).all()
    assert (codes[magnitude > scale * 1.03] == 255).all()
    assert np.array_equal(encode_levels(back, scale), codes)


@given(MAGNITUDES, st.floats(0.125, 1024.0, width=32))
def test_levels_keep_the_order(values, scale):
    """A threshold on codes must mean a threshold on magnitudes: the codes never swap two values."""
    magnitude = np.sort(np.abs(values))
    assert (np.diff(encode_levels(magnitude, scale).astype(int)) >= 0).all()
