"""Tokens a second of dinfer, transformers, accelerate's offload and llama.cpp: same weights, prompt, precision, cores.

Each system decodes in a process of its own, one after another and once more in the reverse order, as a shared machine
reads memory at half its speed in some minutes; what a token must read over what this machine can read is the roofline.
Without an NVIDIA GPU all of them compute on the CPU: dinfer's sparse decoding against dense decoding on the same cores,
and once with a GPU and a link that are emulated.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parent))
from rows import OUTPUTS, Row, machine_line, spread, write

from dinfer.model import ModelSpec
from dinfer.trace import Trace

HERE = Path(__file__).parent
SMALL_TRACE = HERE.parent / "traces" / "smollm2-small"
PROMPT = "Explain to a child why the sky is blue, and why it turns red in the evening."
PRESETS = {"relullama-7b": "relullama-7b", "opt-6.7b": "opt-6.7b"}
INSTALL = "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python"


@dataclass
class Case:
    """One model in one precision; ``forced`` tokens are decoded whatever the logits say, with ``trace``'s activity."""

    name: str
    directory: Path
    spec: ModelSpec
    dtype: str
    prompt: list[int]
    steps: int
    forced: list[int]
    trace: Path | None
    thresholds: tuple[float, ...]
    gguf_agrees: bool

    @property
    def setting(self) -> str:
        """What the rows call it."""
        return f"{self.name}, {self.dtype}"


def main(
    case: Annotated[str, typer.Option(help="smollm2, relullama-7b, opt-6.7b or a model directory; commas")] = "smollm2",
    dtypes: str = "float32,bfloat16",
    llama_python: Annotated[Path | None, typer.Option(help="an interpreter that has llama-cpp-python")] = None,
    layers: Annotated[int, typer.Option(help="of a 7B shape's 32 layers")] = 8,
    steps: Annotated[int, typer.Option(help="tokens decoded in a run")] = 48,
    repeat: int = 5,
    threads: int = os.cpu_count() or 1,
    systems: Annotated[
        str, typer.Option(help="of: transformers, accelerate, llama.cpp, emulated; dinfer runs always")
    ] = ("transformers,accelerate,llama.cpp,emulated"),
    gib: Annotated[float, typer.Option(help="memory that the pure read covers")] = 1.0,
    scratch: Annotated[Path | None, typer.Option(help="keep what was made for the peers here")] = None,
    save: Annotated[Path | None, typer.Option(help="add the results to this JSON, and write the same as .md")] = None,
    output: Annotated[str, typer.Option("-o", help="md, csv or json")] = "md",
) -> None:
    """Print a row for each system against its roofline, and for sparse dinfer against each peer."""
    if output not in OUTPUTS:
        raise typer.BadParameter(f"{output!r} is not one of {', '.join(OUTPUTS)}", param_hint="-o")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        where = scratch or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        for name in case.split(","):
            for dtype in dtypes.split(","):
                one = _case(name, dtype, layers, steps, where)
                result = _measure(one, systems.split(","), llama_python, threads, repeat, gib, where)
                rows += _rows(result)
                if save is not None:
                    _save(save, result)
    write(rows, output)


def _case(name: str, dtype: str, layers: int, steps: int, where: Path) -> Case:
    if name in PRESETS:
        return _random_case(name, dtype, layers, steps, where)
    from transformers import AutoTokenizer

    from dinfer.families import open_checkpoint
    from dinfer.record.fetch import resolve_model

    directory = resolve_model(name)
    spec = open_checkpoint(directory).spec.with_dtype(dtype)
    if (directory / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        turn = [{"role": "user", "content": PROMPT}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    else:
        prompt = np.random.default_rng(0).integers(0, spec.vocab, 16).tolist()
    silu = spec.sparsity_kind == "magnitude"
    # thresholds of the recorded trace, 60% sparse; of another model of that kind none are known: dense
    traced = Trace.load(SMALL_TRACE) if silu and name == "smollm2" else None
    thresholds = tuple(traced.meta["thresholds"]) if traced else ()
    agrees = spec.activation == "silu"
    return Case(directory.name, directory, spec, dtype, list(prompt), steps, [], None, thresholds, agrees)


def _random_case(name: str, dtype: str, layers: int, steps: int, where: Path) -> Case:
    from shapes import shape, write_random

    from dinfer.record.presets import preset
    from dinfer.record.synth import synth

    spec = shape(name, layers).with_dtype(dtype)
    directory, trace = where / f"{name}-{layers}-{dtype}", where / f"{name}-{layers}-{steps}-trace"
    if not (directory / "config.json").exists():
        write_random(spec, dtype, directory)
    if not trace.exists():
        synth(spec, preset(PRESETS[name]), steps, 1, out=trace, prompt=16, prefill=True)
    tokens = Trace.load(trace).tokens
    ids = {phase: tokens[tokens["phase"] == phase]["id"].tolist() for phase in ("prefill", "decode")}
    return Case(spec.name, directory, spec, dtype, ids["prefill"], steps, ids["decode"], trace, (), False)


def _measure(case, systems, llama_python, threads, repeat, gib, where) -> dict[str, Any]:
    job = {"model": str(case.directory), "dtype": case.dtype, "prompt": case.prompt, "steps": case.steps}
    job |= {"forced": case.forced, "trace": None, "thresholds": [], "share": 0.0}
    job |= {"threads": threads, "repeat": repeat, "gib": gib}
    sparse = {"trace": str(case.trace) if case.trace else None, "thresholds": case.thresholds}
    jobs: dict[str, tuple[str, dict[str, Any], Path | None]] = {}
    missing = {}
    if "transformers" in systems:
        jobs["transformers"] = "transformers", job, None
    if "accelerate" in systems:
        jobs["accelerate cpu_offload"] = "accelerate cpu_offload", job, None
    if "llama.cpp" in systems and llama_python is None:
        missing["llama.cpp"] = f"not installed; in an environment of its own: {INSTALL}; then give --llama-python"
        print(f"llama.cpp is {missing['llama.cpp']}", file=sys.stderr)
    elif "llama.cpp" in systems:
        jobs["llama.cpp"] = "llama.cpp", job | {"gguf": str(_gguf(case, where))}, llama_python
    if case.spec.sparsity_kind == "magnitude":  # a ReLU model is sparse by itself
        jobs["dinfer dense"] = "dinfer", job, None
    jobs["dinfer sparse"] = "dinfer", job | sparse, None
    if "emulated" in systems:
        jobs["dinfer sparse, emulated GPU"] = "dinfer", job | sparse | {"share": 0.5}, None
    rates, found = [], {}
    for order in (list(jobs), list(jobs)[::-1]):
        rates.append(_run(case, "bandwidth", job, where)["bytes_per_second"])
        for name in order:
            system, task, python = jobs[name]
            result = _run(case, system, task, where, python)
            for kept in ("seconds", "first_seconds") if name in found else ():
                result[kept] = found[name][kept] + result[kept]
            found[name] = result
    rates.append(_run(case, "bandwidth", job, where)["bytes_per_second"])
    found = {name: found[name] for name in jobs}
    _check_tokens(case, found)
    return {"case": case, "threads": threads, "read": rates, "systems": found, "missing": missing}


def _run(case: Case, system: str, job: dict[str, Any], where: Path, python: Path | None = None) -> dict[str, Any]:
    print(f"{case.setting}: {system}", file=sys.stderr)
    file = where / "job.json"
    file.write_text(json.dumps({**job, "system": system}))
    script = HERE / ("llama_peer.py" if python else "peers.py")
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python or sys.executable, script, file], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _gguf(case: Case, where: Path) -> Path:
    from shapes import write_gguf

    file = where / f"{case.directory.name}-{case.dtype}.gguf"
    return file if file.exists() else write_gguf(case.directory, case.dtype, file)


def _check_tokens(case: Case, found: dict[str, Any]) -> None:
    """Peers of the same function must begin with the same tokens: that guards the comparison."""
    if case.forced or "transformers" not in found:
        return
    expected = found["transformers"]["ids"]
    exact = "dinfer dense" if case.spec.sparsity_kind == "magnitude" else "dinfer sparse"
    same = ["accelerate cpu_offload", exact, *(["llama.cpp"] if case.gguf_agrees else [])]
    for system in same:
        if system in found:
            equal = np.array(expected) == np.array(found[system]["ids"])
            found[system]["equal_tokens"] = int(len(equal) if equal.all() else np.argmin(equal))
            if case.dtype == "float32" and found[system]["equal_tokens"] < min(8, len(expected)):
                sys.exit(f"{system} writes other tokens than transformers: the weights are not the same")


def _ffn_share(case: Case, system: str, result: dict[str, Any]) -> float:
    """Share of the FFN's bytes that a token reads."""
    if "active_share" not in result or system == "dinfer dense" and case.spec.sparsity_kind == "magnitude":
        return 1.0
    if case.trace is not None:
        return result["active_share"]
    examined = case.spec.examined_share
    return examined + (1 - examined) * result["active_share"]


def _speeds(case: Case, result: dict[str, Any]) -> tuple[float, float, float]:
    return spread(case.steps / np.array(result["seconds"]))


def _roofline(measured: dict[str, Any], system: str) -> tuple[float, float]:
    """Bytes that a token must read, and tokens a second at the read's median."""
    from shapes import bytes_a_token

    case, result = measured["case"], measured["systems"][system]
    needed = bytes_a_token(case.spec, len(case.prompt) + case.steps / 2, _ffn_share(case, system, result))
    return needed, float(np.median(np.concatenate(measured["read"]))) / needed


def _rows(measured: dict[str, Any]) -> list[Row]:
    case, rows = measured["case"], []
    for system, result in measured["systems"].items():
        speeds = _speeds(case, result)
        share = speeds[0] / _roofline(measured, system)[1]
        rows.append(Row(system, case.setting, *speeds, "tokens/s", "roofline of what it reads", share))
    sparse = _speeds(case, measured["systems"]["dinfer sparse"])
    for system, result in measured["systems"].items():
        if not system.startswith("dinfer sparse"):
            ratio = sparse[0] / _speeds(case, result)[0]
            rows.append(Row("dinfer sparse", case.setting, *sparse, "tokens/s", system, ratio))
    return rows


def _save(path: Path, measured: dict[str, Any]) -> None:
    """Put the case into the JSON at ``path``, instead of an earlier one of the same setting, and write the .md."""
    case = measured["case"]
    document = json.loads(path.read_text()) if path.exists() else {}
    sparse = _speeds(case, measured["systems"]["dinfer sparse"])[0]
    entries = {}
    for system, result in measured["systems"].items():
        median, low, high = _speeds(case, result)
        needed, ceiling = _roofline(measured, system)
        entries[system] = {
            "tokens_per_second": median,
            "quartiles": [low, high],
            "first_token_seconds": float(np.median(result["first_seconds"])),
            "bytes_a_token": needed,
            "roofline_tokens_per_second": ceiling,
            "dinfer_sparse_over_it": sparse / median,
            **{key: result[key] for key in ("active_share", "equal_tokens", "version") if key in result},
        }
    document[case.setting] = {
        "machine": machine_line(),
        "threads": measured["threads"],
        "read_bytes_per_second": [float(np.median(rates)) for rates in measured["read"]],
        "prompt_tokens": len(case.prompt),
        "steps": case.steps,
        "runs": len(next(iter(measured["systems"].values()))["seconds"]),
        "systems": entries,
        "missing": measured["missing"],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(_markdown(document))


def _markdown(document: dict[str, Any]) -> str:
    lines = ["# Decoding, against peers on the same cores", ""]
    for setting, kept in document.items():
        rates = ", ".join(f"{rate / 1e9:.1f}" for rate in kept["read_bytes_per_second"])
        lines += [
            f"## {setting}",
            "",
            f"{kept['machine']}. {kept['threads']} threads, prompt of {kept['prompt_tokens']} tokens, {kept['steps']} "
            f"decoded, median and quartiles of {kept['runs']} runs. Pure reads meanwhile: {rates} "
            "GB/s.",
            "",
            "| system | tokens/s | quartiles | dinfer sparse is | first token | MB a token | roofline | of it |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for system, each in kept["systems"].items():
            low, high = each["quartiles"]
            speed, ceiling = each["tokens_per_second"], each["roofline_tokens_per_second"]
            ratio = "" if system.startswith("dinfer sparse") else f"{each['dinfer_sparse_over_it']:.2f} x"
            lines.append(
                f"| {system} | {speed:.1f} | {low:.1f}-{high:.1f} | {ratio} | {each['first_token_seconds']:.3f} s | "
                f"{each['bytes_a_token'] / 1e6:.0f} | {ceiling:.1f} | {speed / ceiling:.0%} |"
            )
        notes = [f"{name}: {why}" for name, why in kept["missing"].items()]
        active = kept["systems"]["dinfer sparse"]["active_share"]
        notes.append(f"{active:.1%} of the neurons active where dinfer is sparse")
        equal = {s: e["equal_tokens"] for s, e in kept["systems"].items() if "equal_tokens" in e}
        notes += [f"{s}: first {n} tokens equal to transformers'" for s, n in equal.items()]
        lines += ["", *(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
