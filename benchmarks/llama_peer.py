"""llama.cpp decoding one prompt: ``llama_peer.py JOB.json`` in an interpreter that has llama-cpp-python.

Through the C functions, so that Python adds one call a token; keys and values are kept in the weights' precision.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}


def main() -> None:
    """Run the job and print what was measured as JSON."""
    job = json.loads(Path(sys.argv[1]).read_text())
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(job["gguf"].encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = max(256, len(job["prompt"]) + job["steps"] + 2)
    settings.n_threads = settings.n_threads_batch = job["threads"]
    settings.type_k = settings.type_v = KV_TYPES[job["dtype"]]
    context = llama_cpp.llama_init_from_model(model, settings)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    once(job, context, vocab)
    runs = [once(job, context, vocab) for _ in range(job["repeat"])]
    measured = {"first_seconds": [run[0] for run in runs], "seconds": [run[1] for run in runs], "ids": runs[0][2]}
    print(json.dumps({**measured, "version": f"llama-cpp-python {llama_cpp.__version__}"}))


def once(job, context, vocab):
    """Seconds of the prompt and of the steps after it, and the tokens."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    start = time.perf_counter()
    ids = [step(context, job["prompt"], vocab)]
    first = time.perf_counter()
    for index in range(job["steps"]):
        ids.append(step(context, [job["forced"][index] if job["forced"] else ids[-1]], vocab))
    return first - start, time.perf_counter() - first, ids


def step(context, ids, vocab) -> int:
    """The likeliest token after ``ids``."""
    tokens = (llama_cpp.llama_token * len(ids))(*ids)
    if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))):
        raise RuntimeError("llama_decode failed")
    return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (vocab,)).argmax())


@llama_cpp.llama_log_callback
def _silent(level, text, data) -> None:
    pass


if __name__ == "__main__":
    main()
