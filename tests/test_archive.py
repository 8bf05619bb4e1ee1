"""A trace packed into an archive and unpacked is the same trace; a damaged or foreign file is refused.

And it is smaller than the trace that it holds, by what neighbours of like frequency have in common.
"""

import re
import zipfile

import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dinfer import archive, bits
from dinfer.archive import pack, unpack
from dinfer.cli import app
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.trace import Trace


def drawn(tokens: int, neurons: int = 70, layers: int = 2, seed: int = 0, levels: bool = False) -> Trace:
    rng = np.random.default_rng(seed)
    spec = ModelSpec("tiny", "llama", layers, 8, neurons, 2, 1, 4, 16, activation="relu")
    active = bits.pack(rng.random((tokens, layers, neurons)) < rng.beta(0.3, 1.5, (layers, neurons)))
    table = pd.DataFrame(
        {
            "id": np.arange(tokens, dtype=np.int32),
            "sequence": np.arange(tokens, dtype=np.int32) // 5,
            "position": np.arange(tokens, dtype=np.int32) % 5,
            "phase": ["prefill" if t % 5 < 2 else "decode" for t in range(tokens)],
        }
    ).astype({"phase": "str"})
    optional = {}
    if levels:
        optional["score"] = rng.integers(0, 256, (tokens, layers, neurons), dtype=np.uint8)
        optional["hidden"] = rng.standard_normal((tokens, layers, 8)).astype(np.float16)
    return Trace(spec, table, active, {"kind": "recorded", "note": "é"}, **optional)


def assert_same(one: Trace, other: Trace) -> None:
    assert one.spec == other.spec
    assert one.meta == other.meta
    pd.testing.assert_frame_equal(one.tokens, other.tokens)
    for name in ("active", "score", "contribution", "hidden"):
        np.testing.assert_equal(getattr(one, name), getattr(other, name))
    assert one.fingerprint == other.fingerprint


@given(
    tokens=st.integers(0, 40), neurons=st.sampled_from([1, 64, 70]), block=st.sampled_from([8, 16, 8192]),
    levels=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_a_trace_comes_back(tmp_path_factory, tokens, neurons, block, levels):
    path = tmp_path_factory.mktemp("archive") / "trace.zarr.zip"
    trace = drawn(tokens, neurons, levels=levels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive, "BLOCK", block)
        pack(trace, path)
        assert_same(unpack(path), trace)


def test_it_is_less_than_the_trace_and_near_the_entropy(tmp_path):
    trace = drawn(4096, 512, seed=1)
    pack(trace, tmp_path / "trace.zarr.zip")
    p = np.clip(trace.frequency.astype(float), 1e-9, 1 - 1e-9)
    entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p)).sum() * len(trace) / 8
    size = (tmp_path / "trace.zarr.zip").stat().st_size
    assert entropy < size < 0.75 * trace.active.nbytes
    assert size < 1.35 * entropy


def test_the_file_is_plain_zarr(tmp_path):
    pack(drawn(10), tmp_path / "trace.zarr.zip")
    with zarr.storage.ZipStore(tmp_path / "trace.zarr.zip", mode="r") as store:
        group = zarr.open_group(store, mode="r")
        assert group.attrs["format"] == "dinfer-trace-archive"
        assert group.attrs["version"] == 1
        assert group.attrs["arrays"] == {"active": "<u8"}
        assert sorted(group.array_keys()) == ["active", "id", "order", "phase", "position", "sequence"]
        assert group["active"].shape == (1, 2, 70, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.zarr.zip"]


def test_the_command_packs_and_unpacks(tmp_path):
    trace = drawn(30)
    trace.save(tmp_path / "trace")
    run = CliRunner().invoke
    assert run(app, ["archive", str(tmp_path / "trace"), "-o", str(tmp_path / "t.zarr.zip")]).exit_code == 0
    assert run(app, ["archive", str(tmp_path / "t.zarr.zip"), "-o", str(tmp_path / "again")]).exit_code == 0
    assert_same(Trace.load(tmp_path / "again"), trace)


def test_bad_files_are_refused(tmp_path):
    def refused(message, call, *arguments):
        with pytest.raises(InputError, match=f"^{re.escape(message)}"):
            call(*arguments)

    path, trace = tmp_path / "a.zarr.zip", drawn(5)
    refused(f"archive {tmp_path / 'a.zip'} must end in .zarr.zip", pack, trace, tmp_path / "a.zip")
    refused(f"archive {path} does not exist; make one with `dinfer archive TRACE -o {path}`", unpack, path)
    path.write_bytes(b"no zip")
    refused(f"{path} exists; an archive never overwrites, choose another -o", pack, trace, path)
    refused(f"archive {path} cannot be read (it is no zip file); make one with `dinfer archive TRACE -o`", unpack, path)
    for attributes, message in (
        ({}, f"{path} does not say format 'dinfer-trace-archive'; it is no archive of dinfer"),
        (
            {"format": "dinfer-trace-archive", "version": 2},
            f"archive {path} has version 2, this dinfer reads up to 1; upgrade dinfer",
        ),
    ):
        path.unlink()
        with zarr.storage.ZipStore(path, mode="w") as store:
            zarr.create_group(store, attributes=attributes)
        refused(message, unpack, path)
    pack(trace, tmp_path / "b.zarr.zip")
    with zipfile.ZipFile(tmp_path / "b.zarr.zip") as whole, zipfile.ZipFile(tmp_path / "c.zarr.zip", "w") as cut:
        for name in whole.namelist():
            if not name.startswith("order"):
                cut.writestr(name, whole.read(name))
    refused(f"archive {tmp_path / 'c.zarr.zip'} cannot be read (", unpack, tmp_path / "c.zarr.zip")
