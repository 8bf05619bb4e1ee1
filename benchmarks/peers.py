"""One system decoding one prompt in a process of its own: ``peers.py JOB.json`` prints what it measured as JSON.

All decode greedily, one sequence, on the same number of threads; time counts from the first logits to the last, and
the prompt apart. ``llama_peer.py`` is the same for an interpreter that has llama-cpp-python.
"""

import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

LINK = {"name": "emulated PCIe", "fixed_seconds": 10e-6, "bytes_per_second": 4e9}


def transformers_dense(job: dict[str, Any]) -> dict[str, Any]:
    """transformers with its default (growing) cache, stepped by hand: no generate() around the forward pass."""
    return _transformers(job, _load(job))


def accelerate_offload(job: dict[str, Any]) -> dict[str, Any]:
    """The same under accelerate's cpu_offload with a CPU as execution device: its hooks at work, and no link."""
    from accelerate import cpu_offload

    return _transformers(job, cpu_offload(_load(job), execution_device="cpu"))


def _load(job: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    config = AutoConfig.from_pretrained(job["model"])
    fatrelu = getattr(config, "hidden_act", "") == "fatrelu"  # a ReLU above a threshold, which transformers lacks
    config.hidden_act = "relu" if fatrelu else getattr(config, "hidden_act", None)
    kind = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], config=config, dtype=kind, trust_remote_code=False)
    for layer in model.model.layers if fatrelu else ():
        layer.mlp.act_fn = torch.nn.Threshold(config.hidden_act_param, 0.0)
    return model.eval()


def _transformers(job: dict[str, Any], model: Any) -> dict[str, Any]:
    import torch

    def once() -> tuple[float, float, list[int]]:
        start = time.perf_counter()
        out = model(torch.tensor([job["prompt"]]), use_cache=True, logits_to_keep=1)
        ids = [int(out.logits[0, -1].argmax())]
        first = time.perf_counter()
        for step in range(job["steps"]):
            given = job["forced"][step] if job["forced"] else ids[-1]
            out = model(torch.tensor([[given]]), past_key_values=out.past_key_values, use_cache=True)
            ids.append(int(out.logits[0, -1].argmax()))
        return first - start, time.perf_counter() - first, ids

    with torch.inference_mode():
        return {**_repeated(once, job["repeat"]), "version": f"transformers {version('transformers')}"}


def dinfer(job: dict[str, Any]) -> dict[str, Any]:
    """dinfer with ``share`` of the neurons on an emulated GPU, or none and no GPU at all.

    ``thresholds`` are a SiLU model's (none: dense). With a ``trace`` its tokens are decoded and its sets computed:
    what an oracle predictor would have the random weights do.
    """
    from dataclasses import replace

    import numpy as np

    from dinfer.exec import Session
    from dinfer.families import open_checkpoint
    from dinfer.machine import Link, load_machine
    from dinfer.placement import Placement
    from dinfer.plan import Plan
    from dinfer.trace import Trace

    checkpoint = open_checkpoint(job["model"])
    spec = checkpoint.spec.with_dtype(job["dtype"])
    trace = Trace.load(job["trace"]) if job["trace"] else None
    gpu = job["share"] > 0
    machine = load_machine("pc-low")  # prices what a plan may move: these plans move nothing
    machine = replace(machine, emulated_link=Link(**LINK)) if gpu else machine
    frequency = np.random.default_rng(0).random((spec.layers, spec.neurons), np.float32)
    plan = Plan(
        spec=spec,
        machine=machine,
        placement=Placement.hottest(frequency, np.full(spec.layers, int(job["share"] * spec.neurons))),
        frequency=frequency,
        vram_bytes=2**50,
        context=len(job["prompt"]) + job["steps"] + 2,
        thresholds=tuple(job["thresholds"]),
        activation="predicted" if trace else "exact",
        prediction="oracle" if trace else "previous",
    )
    active = []

    def once() -> tuple[float, float, list[int]]:
        if trace is not None:
            run = session.replay(trace)
        else:
            run = session.generate(job["prompt"], max_tokens=job["steps"] + 1, stop=False)
        active.append(run.work[..., :2].sum() / (len(run.work) * spec.layers * spec.neurons))
        return sum(seconds for _, seconds in run.timeline.meta["prefills"]), run.timeline.seconds, list(run.ids)

    threads = max(1, job["threads"] // 2) if gpu else job["threads"]
    with Session(plan, checkpoint, "cpu" if gpu else "none", cpu_threads=threads) as session:
        measured = _repeated(once, job["repeat"])
    return {**measured, "active_share": float(np.median(active)), "version": f"dinfer {version('dinfer')}"}


def bandwidth(job: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second of a pure read of 1 GiB by all threads at once: ours, the limit of every system here."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from dinfer.exec.kernels_cpu import read_rows

    words = np.random.default_rng(0).integers(0, 2**32, (int(job["gib"] * 2**16), 4096), np.uint32)
    parts = np.array_split(np.arange(len(words), dtype=np.int32), job["threads"])
    read_rows(words, parts[0])
    rates = []
    with ThreadPoolExecutor(job["threads"]) as pool:
        for _ in range(job["repeat"]):
            start = time.perf_counter()
            list(pool.map(lambda part: read_rows(words, part), parts))
            rates.append(words.nbytes / (time.perf_counter() - start))
    return {"bytes_per_second": rates}


def _repeated(once: Any, repeat: int) -> dict[str, Any]:
    """Prompt and decode seconds of ``repeat`` runs after one that warms up, and the first tokens."""
    ids = once()[2]
    runs = [once() for _ in range(repeat)]
    return {"first_seconds": [run[0] for run in runs], "seconds": [run[1] for run in runs], "ids": ids}


SYSTEMS = {
    "transformers": transformers_dense,
    "accelerate cpu_offload": accelerate_offload,
    "dinfer": dinfer,
    "bandwidth": bandwidth,
}

if __name__ == "__main__":
    from transformers.utils.logging import disable_progress_bar

    warnings.simplefilter("ignore")
    disable_progress_bar()
    given = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(SYSTEMS[given["system"]](given)))
