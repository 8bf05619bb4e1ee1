"""ggml's dense gated FFN on one token: ``ggml_peer.py JOB.json`` in an interpreter that has llama-cpp-python.

ggml is called through ctypes, from the shared libraries that llama-cpp-python brings. Layers rotate over several GiB of
one memory; all hold the same numbers. What is printed as JSON is the seconds of each call.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

TYPES = {"float32": 0, "float16": 1, "bfloat16": 30, "int8": 8, "int4": 2}
"""Weight dtype -> ggml_type; int8 is Q8_0, int4 is Q4_0."""

F32 = 0
SCRATCH_BYTES = 2**28  # for the tensors' headers, the activations and ggml's plan


class Parameters(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def library() -> ctypes.CDLL:
    """libggml-base and libggml-cpu as one: pointers in and out, 64-bit numbers."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    base, cpu = (
        ctypes.CDLL(str(next(folder.glob(f"*ggml-{name}.*"))), mode=ctypes.RTLD_GLOBAL) for name in ("base", "cpu")
    )
    pointer, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, result, arguments in (
        ("ggml_init", pointer, [Parameters]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_2d", pointer, [pointer, integer, number, number]),
        ("ggml_get_data", pointer, [pointer]),
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_mul_mat", pointer, [pointer] * 3),
        ("ggml_relu", pointer, [pointer] * 2),
        ("ggml_mul", pointer, [pointer] * 3),
        ("ggml_new_graph", pointer, [pointer]),
        ("ggml_build_forward_expand", None, [pointer] * 2),
        ("ggml_quantize_chunk", ctypes.c_size_t, [integer, pointer, pointer, number, number, number, pointer]),
    ):
        function = getattr(base, name)
        function.restype, function.argtypes = result, arguments
    cpu.ggml_graph_compute_with_ctx.restype = integer
    cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, integer]
    base.ggml_graph_compute_with_ctx = cpu.ggml_graph_compute_with_ctx
    cpu.ggml_cpu_init()
    return base


def dense(ggml: ctypes.CDLL, job: dict) -> dict[str, list[float]]:
    """Seconds of ``job["repeat"]`` calls by number of threads: down @ (relu(gate @ x) * (up @ x))."""
    hidden, neurons, kind = job["hidden"], job["neurons"], TYPES[job["dtype"]]
    shapes = [(hidden, neurons), (hidden, neurons), (neurons, hidden)]
    stored = [quantised(ggml, kind, columns, rows) for columns, rows in shapes]
    layers = max(1, round(job["gib"] * 2**30 / sum(map(len, stored))))
    context = ggml.ggml_init(Parameters(layers * (sum(map(len, stored)) + 2**20) + SCRATCH_BYTES, None, False))
    x = ggml.ggml_new_tensor_2d(context, F32, hidden, 1)
    fill(ggml, x, np.random.default_rng(1).standard_normal(hidden).astype(np.float32).tobytes())
    graphs = []
    for _ in range(layers):
        gate, up, down = (ggml.ggml_new_tensor_2d(context, kind, *shape) for shape in shapes)
        for tensor, content in zip((gate, up, down), stored, strict=True):
            fill(ggml, tensor, content)
        active = ggml.ggml_relu(context, ggml.ggml_mul_mat(context, gate, x))
        value = ggml.ggml_mul(context, active, ggml.ggml_mul_mat(context, up, x))
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, ggml.ggml_mul_mat(context, down, value))
        graphs.append(graph)
    return {str(threads): timed(ggml, graphs, threads, job) for threads in job["threads"]}


def quantised(ggml: ctypes.CDLL, kind: int, columns: int, rows: int) -> bytes:
    """A matrix of random normal numbers in ggml's own format."""
    values = np.random.default_rng(0).standard_normal((rows, columns), np.float32) / columns**0.5
    if kind == F32:
        return values.tobytes()
    out = ctypes.create_string_buffer(values.nbytes)
    size = ggml.ggml_quantize_chunk(kind, values.ctypes.data, out, 0, rows, columns, None)
    return out.raw[:size]


def fill(ggml: ctypes.CDLL, tensor: int, content: bytes) -> None:
    """Write ``content`` to ``tensor``, whose size it must have."""
    if ggml.ggml_nbytes(tensor) != len(content):
        raise ValueError(f"a tensor of {ggml.ggml_nbytes(tensor)} bytes got {len(content)}")
    ctypes.memmove(ggml.ggml_get_data(tensor), content, len(content))


def timed(ggml: ctypes.CDLL, graphs: list[int], threads: int, job: dict) -> list[float]:
    """Seconds of each call, one layer after another, after one that warms up."""
    # ggml plans each call anew in the context's memory: a context of its own for that, thrown away after each call
    seconds = []
    for call in range(job["repeat"] + 1):
        scratch = ggml.ggml_init(Parameters(SCRATCH_BYTES // 16, None, False))
        start = time.perf_counter()
        status = ggml.ggml_graph_compute_with_ctx(scratch, graphs[call % len(graphs)], threads)
        seconds.append(time.perf_counter() - start)
        ggml.ggml_free(scratch)
        if status:
            raise RuntimeError(f"ggml_graph_compute ended with {status}")
    return seconds[1:]


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({"seconds": dense(library(), given), "version": f"llama-cpp-python {llama_cpp.__version__}"}))
