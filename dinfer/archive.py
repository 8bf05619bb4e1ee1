"""The archive form of a trace: one compressed .zarr.zip, a third of the trace's size and a tenth of its speed.

Neuron-major: within a block of tokens each layer's neurons stand by how often they are active, each as a row of bits
over the tokens, so that like rows are neighbours. No token can be read alone: unpack it to work with it.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dinfer import bits
from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.trace import ARRAYS, Trace

FORMAT = "dinfer-trace-archive"
VERSION = 1
BLOCK = 8192
"""Tokens that are compressed together, one layer at a time."""

LEVEL = 9
"""Of zstd."""

PHASES = ("prefill", "decode")


def pack(trace: Trace, path: str | Path) -> None:
    """Write ``trace`` to the new file ``path`` (.zarr.zip), complete or not at all.

    Raises InputError for another suffix, for a file that exists, and where zarr is not installed.
    """
    path, zarr = Path(path), _zarr()
    if not path.name.endswith(".zarr.zip"):
        raise InputError(f"archive {path} must end in .zarr.zip")
    if path.exists():
        raise InputError(f"{path} exists; an archive never overwrites, choose another -o")
    partial = path.with_name(path.name + ".new")
    attributes = {
        "format": FORMAT,
        "version": VERSION,
        "tokens": len(trace),
        "arrays": {name: ARRAYS[name] for name in ("active", *trace.optional_arrays)},
        "spec": trace.spec.to_dict(),
        "made": dict(trace.meta),
    }
    try:
        with zarr.storage.ZipStore(partial, mode="w") as store:
            group = zarr.create_group(store, attributes=attributes)
            _pack_tokens(group, trace.tokens)
            _pack_active(group, trace)
            for name in trace.optional_arrays:
                array = getattr(trace, name)
                made = _create(group, name, array.shape, (BLOCK // 32, 1, array.shape[2]), array.dtype)
                for start in range(0, len(trace), BLOCK):
                    made[start : start + BLOCK] = array[start : start + BLOCK]
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def unpack(path: str | Path) -> Trace:
    """The trace in the archive ``path``, in memory; raises InputError for what is no archive, or a later one."""
    path, zarr = Path(path), _zarr()
    if not path.is_file():
        raise InputError(f"archive {path} does not exist; make one with `dinfer archive TRACE -o {path}`")
    if not zipfile.is_zipfile(path):
        raise InputError(f"archive {path} cannot be read (it is no zip file); make one with `dinfer archive TRACE -o`")
    try:
        with zarr.storage.ZipStore(path, mode="r") as store:
            group = zarr.open_group(store, mode="r")
            meta = _checked(path, dict(group.attrs))
            spec, arrays = ModelSpec.from_dict(meta["spec"]), meta["arrays"]
            optional = {name: group[name][:] for name in arrays if name != "active"}
            return Trace(spec, _tokens(group), _active(group, spec), meta["made"], **optional)
    except InputError:
        raise
    except Exception as error:  # zip, zarr and zstd each have their own
        raise InputError(f"archive {path} cannot be read ({error}); it is damaged or no archive") from None


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise InputError("archives need zarr; install it with `pip install dinfer[archive]`") from None
    return zarr


def _create(group: Any, name: str, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: Any) -> Any:
    from zarr.codecs import ZstdCodec

    chunks = tuple(max(min(chunk, size), 1) for chunk, size in zip(chunks, shape, strict=True))
    return group.create_array(name, shape=shape, chunks=chunks, dtype=dtype, compressors=ZstdCodec(level=LEVEL))


def _pack_tokens(group: Any, tokens: pd.DataFrame) -> None:
    for name in ("id", "sequence", "position"):
        _create(group, name, (len(tokens),), (len(tokens),), "int32")[:] = tokens[name].to_numpy(np.int32)
    phases = np.array([PHASES.index(phase) for phase in tokens["phase"]], np.uint8)
    _create(group, "phase", phases.shape, phases.shape, "uint8")[:] = phases


def _tokens(group: Any) -> pd.DataFrame:
    table = {name: group[name][:] for name in ("id", "sequence", "position")}
    return pd.DataFrame(table | {"phase": [PHASES[code] for code in group["phase"][:]]}).astype({"phase": "str"})


def _pack_active(group: Any, trace: Trace) -> None:
    # order [layer, neuron] by frequency; active [block, layer, neuron in that order, 8 tokens a byte]
    spec, size = trace.spec, min(BLOCK, max(len(trace), 1))
    order = np.argsort(-trace.frequency, axis=1, kind="stable").astype(np.int32)
    _create(group, "order", order.shape, (1, spec.neurons), "int32")[:] = order
    blocks, width = -(-len(trace) // size), -(-size // 8)
    made = _create(group, "active", (blocks, spec.layers, spec.neurons, width), (1, 1, spec.neurons, width), "uint8")
    for block in range(blocks):
        for layer in range(spec.layers):
            words = np.ascontiguousarray(trace.active[block * size : (block + 1) * size, layer])
            rows = np.packbits(bits.unpack(words, spec.neurons)[:, order[layer]].T, axis=1, bitorder="little")
            made[block, layer, :, : rows.shape[1]] = rows


def _active(group: Any, spec: ModelSpec) -> np.ndarray:
    tokens, order, packed = group["id"].shape[0], group["order"][:], group["active"]
    size = min(BLOCK, max(tokens, 1))
    active = np.zeros((tokens, spec.layers, spec.words), "<u8")
    for block in range(packed.shape[0]):
        here = slice(block * size, min((block + 1) * size, tokens))
        for layer in range(spec.layers):
            rows = np.unpackbits(packed[block, layer], axis=1, count=here.stop - here.start, bitorder="little")
            members = np.empty(rows.shape[::-1], bool)
            members[:, order[layer]] = rows.T
            active[here, layer] = bits.pack(members)
    return active


def _checked(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    if meta.get("format") != FORMAT:
        raise InputError(f"{path} does not say format {FORMAT!r}; it is no archive of dinfer")
    if not isinstance(meta["version"], int) or not 1 <= meta["version"] <= VERSION:
        version = meta["version"]
        raise InputError(f"archive {path} has version {version}, this dinfer reads up to {VERSION}; upgrade dinfer")
    return meta
