"""Measure this machine: run the executor's own decoding under calibration plans, of which each step's cost is fitted.

As the paper does with its first decoding steps. Each fit is affine in neurons (or positions) and states its
residual; the plans used here hold other shares of neurons than a user asks for, so that predicting is not recalling.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import nnls

from dinfer import bits
from dinfer.errors import InputError
from dinfer.exec.execute import Session, open_device
from dinfer.exec.kernels_cpu import read_rows
from dinfer.exec.predictor import measure_predict
from dinfer.exec.profile_fit import fit_machine, rate
from dinfer.exec.profile_link import Fit, link_fits
from dinfer.families import Checkpoint, open_checkpoint
from dinfer.machine import PREFILL_CHUNK, Cost, Device, Link, Machine
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.plan import Plan
from dinfer.timeline import Run
from dinfer.trace import Trace

SHARES = (0.0, 0.12, 0.37, 0.62, 0.87, 1.0)
"""Resident shares of the calibration plans, of what the GPU can hold; at the ends of all one side works alone."""

MOVED = ((0.37, 0.03), (0.37, 0.12), (0.62, 0.06))
"""Resident share and window (a share of a layer's neurons) of the calibration plans that move neurons."""

EMULATED_LINK = Link("emulated PCIe", 10e-6, 4e9)
"""What a CPU device takes for a link when none is given: ours."""

SILENT = 3e38
"""A magnitude threshold that silences every neuron, so that only the cost of the gates is left."""

WARM_TOKENS, TOKENS = 2, 16
"""Of each calibration plan's run. All plans run twice, the second time in the opposite order: a machine drifts."""

SHORT_PROMPT, LONG_PROMPTS = 8, (128, 384)


def measure_machine(
    model: str | Path,
    *,
    device: str = "cpu",
    link: Link | None = None,
    dtype: str | None = None,
    thresholds: Sequence[float] = (),
    cpu_threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[Machine, pd.DataFrame]:
    """This machine's costs for the shapes of ``model``, and the table of the fits.

    ``device`` "cpu" emulates the GPU behind ``link`` (default EMULATED_LINK); "cuda" measures the real one.
    ``dtype`` is what the weights are run in, ``thresholds`` [layer] the magnitude thresholds of the runs.
    ``progress`` is called with the share done.
    """
    if device == "none":
        raise InputError("device none has no GPU whose steps could be measured; give --device cuda or cpu")
    checkpoint = open_checkpoint(model)
    spec = checkpoint.spec.as_run(dtype or ("float32" if device == "cpu" else checkpoint.spec.dtype))
    blank = _blank_machine(device, link or EMULATED_LINK)
    plans = list(_calibration_plans(spec, blank, tuple(thresholds)))
    plans += reversed(plans)
    frames: list[pd.DataFrame] = []
    prefills: list[list[float]] = []
    for number, (plan, prompt_tokens) in enumerate(plans):
        with Session(plan, checkpoint, device, cpu_threads, prefill="cpu") as session:
            run = session.replay(_random_activity(spec, prompt_tokens))
        frames.append(_samples(run, plan, number, prompt_tokens))
        prefills += run.timeline.meta["prefills"]
        if progress is not None:
            progress((number + 1) / len(plans))
    machine, fits = fit_machine(spec, blank, pd.concat(frames, ignore_index=True), _read_bytes_per_second())
    prefill, described = _fit_prefill(spec, machine, prefills, "prefill")
    predict, timed = _fit_predict(spec, device)
    fits += [described, timed]
    streamed = prefill  # an emulated GPU is the same cores
    if device == "cuda":
        fits += link_fits(spec, torch.device(device))
    if device == "cuda" and _most(spec, blank) == 1:
        prompts = _streamed_prefills(spec, machine, checkpoint, cpu_threads)
        streamed, described = _fit_prefill(spec, machine, prompts, "prefill on the GPU")
        fits.append(described)
    gpu, cpu = replace(machine.gpu, predict=predict, prefill=streamed), replace(machine.cpu, prefill=prefill)
    return replace(machine, gpu=gpu, cpu=cpu), pd.DataFrame(fits)


def _streamed_prefills(
    spec: ModelSpec, machine: Machine, checkpoint: Checkpoint, cpu_threads: int | None
) -> list[list[float]]:
    """Tokens and seconds of prompts whose FFNs the GPU computes, all neurons resident: nothing is streamed."""
    frequency = np.ones((spec.layers, spec.neurons), np.float32)
    placement = Placement.hottest(frequency, np.full(spec.layers, spec.neurons))
    vram, context = machine.gpu.memory_bytes, min(512, spec.max_positions)
    plan = Plan(spec, machine, placement, frequency, issue="block", vram_bytes=vram, context=context)
    with Session(plan, checkpoint, "cuda", cpu_threads, prefill="stream") as session:
        runs = [session.replay(_random_activity(spec, tokens)) for tokens in (SHORT_PROMPT, *LONG_PROMPTS) * 2]
    return [prompt for run in runs[len(runs) // 2 :] for prompt in run.timeline.meta["prefills"]]


def _calibration_plans(spec: ModelSpec, machine: Machine, thresholds: tuple[float, ...]) -> Iterator[tuple[Plan, int]]:
    frequency = np.random.default_rng(0).random((spec.layers, spec.neurons), np.float32)
    most = _most(spec, machine)

    def plan(share: float, prompt_tokens: int = SHORT_PROMPT, **changes: Any) -> tuple[Plan, int]:
        default = {"thresholds": thresholds, "context": min(512, spec.max_positions)}
        slots = np.full(spec.layers, int(share * most * spec.neurons))
        return Plan(
            spec=spec,
            machine=machine,
            placement=Placement.hottest(frequency, slots),
            frequency=frequency,
            vram_bytes=machine.gpu.memory_bytes,
            issue="gather" if machine.emulated else "block",
            **{**default, **changes},
        ), prompt_tokens

    for share in SHARES:
        yield plan(share)
    if spec.sparsity_kind == "magnitude":
        yield plan(SHARES[0], thresholds=(SILENT,) * spec.layers)
        yield plan(SHARES[2], thresholds=(SILENT,) * spec.layers)
        yield plan(SHARES[3], thresholds=(0.0,) * spec.layers)
    for share, window in MOVED:
        yield plan(share, cache={"name": "lru"}, window=max(1, int(window * spec.neurons)))
    for prompt_tokens in LONG_PROMPTS:
        yield plan(SHARES[2], min(prompt_tokens, spec.max_positions - WARM_TOKENS - TOKENS))


def _most(spec: ModelSpec, machine: Machine) -> float:
    """The share of the neurons that the GPU holds beside the rest with a tenth of it left free, at most all."""
    rest = machine.gpu.context_bytes + spec.dense_bytes
    return min(1.0, max(0.0, (0.9 * machine.gpu.memory_bytes - rest) / spec.ffn_bytes))


def _random_activity(spec: ModelSpec, prompt_tokens: int) -> Trace:
    """Random tokens whose random activity makes a moving plan move; what is computed is the model's own."""
    rng = np.random.default_rng(0)
    count = prompt_tokens + WARM_TOKENS + TOKENS
    position = np.arange(count)
    phase = np.where(position < prompt_tokens, "prefill", "decode")
    ids = rng.integers(0, spec.vocab, count)
    tokens = pd.DataFrame({"id": ids, "sequence": 0, "position": position, "phase": phase})
    active = bits.pack(rng.random((count, spec.layers, spec.neurons), np.float32) < 0.3)
    return Trace(spec, tokens, active)


def _samples(run: Run, plan: Plan, number: int, prompt_tokens: int) -> pd.DataFrame:
    """Spans with what they worked on; each layer's spans of one token share ``run``, ``token`` and ``layer``."""
    frame = run.timeline.to_frame()
    frame["run"] = number
    frame["seconds"] = frame["end_seconds"] - frame["start_seconds"]
    frame["position"] = prompt_tokens + frame["token"]
    layer = frame["layer"].clip(lower=0).to_numpy()
    token = frame["token"].clip(upper=len(run.work) - 1).to_numpy()
    frame["gpu_active"], frame["cpu_active"] = run.work[token, layer, 0], run.work[token, layer, 1]
    frame["slots"] = plan.placement.slots[layer]
    frame["cold"] = plan.spec.neurons - frame["slots"]
    frame["moves"] = plan.policy.moves
    return frame[frame["token"].between(WARM_TOKENS, len(run.work) - 1)]


def _fit_prefill(spec: ModelSpec, machine: Machine, prefills: list[list[float]], name: str) -> tuple[Cost, Fit]:
    """A fixed part for each layer and chunk, and a rate of flops, from prompts of several lengths."""
    per_token = 2.0 * (spec.attention_parameters + spec.neurons * spec.matrices * spec.hidden)
    tokens, seconds = np.array(prefills).T
    target = np.maximum(seconds / spec.layers - machine.gpu.head.fixed_seconds / spec.layers, 1e-9)
    design = np.column_stack([np.ceil(tokens / PREFILL_CHUNK), tokens * per_token])
    scale = design.max(axis=0)
    fixed, per_flop = nnls(design / scale / target[:, None], np.ones(len(target)))[0] / scale
    fitted = design @ [fixed, per_flop]
    residual = float(np.abs(fitted / target - 1).mean())
    described = Fit(name, fixed * 1e6, per_flop * per_token * 1e9, "token", residual, len(target))
    return Cost(float(fixed), flops_per_second=float(rate(1.0, per_flop))), described


def _fit_predict(spec: ModelSpec, device: str) -> tuple[Cost, Fit]:
    """A trained predictor's step by its rank, timed alone: no calibration plan has one."""
    fixed, each = measure_predict(spec, open_device(device))
    rank_bytes = 2 * (spec.hidden + spec.neurons)
    return Cost(fixed, rate(rank_bytes, each)), Fit("predict", fixed * 1e6, each * 1e9, "rank", float("nan"), 2)


def _blank_machine(device: str, link: Link) -> Machine:
    name = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = Device("torch CPU device", memory)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        context = properties.total_memory - torch.cuda.mem_get_info()[0]
        gpu = Device(properties.name, properties.total_memory, context)
        link = Link("measured", 0.0, float("inf"))
    return Machine(
        name=f"{platform.node() or 'this'}-{'emulated' if device == 'cpu' else device}",
        gpu=gpu,
        cpu=Device(name, memory, threads=os.cpu_count() or 1),
        h2d=link,
        d2h=replace(link, fixed_seconds=0.0),
        dram_bytes_per_second=1e12,
        emulated_link=link if device == "cpu" else None,
    )


def _read_bytes_per_second() -> float:
    """Bytes per second that all cores together read from DRAM, the best of a few passes over 1 GiB."""
    threads = os.cpu_count() or 1
    words = np.ones((threads, 2**14, 2**14 // threads), np.uint32)
    ids = np.arange(2**14, dtype=np.int32)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            start = time.perf_counter()
            list(pool.map(lambda part: read_rows(part, ids), words))
            best = max(best, words.nbytes / (time.perf_counter() - start))
    return best
