"""Heal a ReLU model out of SmolLM2: FATReLU takes the place of its SiLU, and the SiLU teacher says what was lost.

The gates that the loss feels least fall silent at once, the others follow SiLU as well as a straight line can, and some
neurons become a linear map that stands in for what fell silent. Layer by layer, what is read of the residual and what
is written to it are fitted so that it comes back to the teacher's, and then all weights of attention and FFN learn the
teacher's next-token distribution (KL divergence). Stopped at any time, the same command goes on from the last
checkpoint; after each checkpoint the model so far is a directory that dinfer and transformers load. docs/healed.md has
the recipe and what came out.
"""

import ctypes
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from healing import Healing, autocast, dtype_of_products, losses
from healing_texts import gather

from dinfer.compiled import cache_directory
from dinfer.errors import InputError
from dinfer.exec.quality import resampled, with_interval
from dinfer.families import open_checkpoint
from dinfer.record.fetch import resolve_model

MODELING = Path(__file__).with_name("modeling_fatrelu.py")

JUDGED = 4
"""Until the end one held-out row in so many is judged: all of them take minutes."""
SPARSITY_ROWS = 16
"""Rows of a kind, about, that tell the sparsity of each layer."""

README = """# {name}

{title} whose FFN activation is FATReLU (a gate counts where it is above {threshold:.4f}) instead of SiLU, healed by
distillation from it with dinfer's examples/heal_relu.py: {steps} steps. Licence {licence}, as the teacher.

Held-out perplexity: text {healed[text]:.1f}, {ratio[text][0]:.3f} ({ratio[text][1]:.3f} to {ratio[text][2]:.3f}) of the
teacher's, chat {healed[chat]:.2f}, {ratio[chat][0]:.3f} ({ratio[chat][1]:.3f} to {ratio[chat][2]:.3f}), with 95%
intervals; {sparsity:.1%} of its gates are below the threshold there.

dinfer takes the directory as it is. transformers has no FATReLU: AutoModelForCausalLM.from_pretrained needs
trust_remote_code=True, which runs modeling_fatrelu.py.
"""


def heal(
    healing: Healing, steps: int, minutes: float, save: Callable[[int], None], save_every: float, status: Path
) -> None:
    """Step until ``steps`` steps or their ``minutes`` are over; ``save`` now and then, judged on one held-out row in
    JUDGED, and at the end, judged on all."""
    saved = time.monotonic()
    while (share := max(healing.run.step / steps, healing.run.seconds / 60 / minutes)) < 1:
        told = healing.step(share)
        line = f"step {healing.run.step}, {share:.1%} of the training, {healing.run.seconds / 60:.1f} minutes: "
        line += ", ".join(f"{name} {value:.4g}" for name, value in told.items())
        status.write_text(line + "\n")
        if healing.run.step % 10 == 0:
            say(line)
        if time.monotonic() - saved > 60 * save_every:
            save(JUDGED)
            saved = time.monotonic()
    save(1)


def judge(healing: Healing, every: int) -> dict[str, Any]:
    """Perplexity of teacher and student on one held-out row in ``every``, their ratio with its 95% interval (bootstrap
    over rows, paired), and the student's sparsity by layer on some of them."""
    texts, student = healing.texts, healing.student
    kinds = {"text": texts.held_out_english, "chat": texts.held_out_chats, "free": texts.held_out_free}
    rows = {kind: torch.from_numpy(ids[::every]).long() for kind, ids in kinds.items()}
    models = healing.teacher, student.model
    their, our = ({kind: losses(model, ids) for kind, ids in rows.items()} for model in models)
    with torch.inference_mode(), autocast(healing.teacher):
        some = [rows[kind][:: max(1, len(rows[kind]) // SPARSITY_ROWS)] for kind in ("text", "chat")]
        student.model.model(torch.cat(some).to(healing.teacher.device))
    by_layer = student.sparsity()
    return {
        "steps": healing.run.step,
        "teacher": {kind: float(np.exp(loss.mean())) for kind, loss in their.items()},
        "healed": {kind: float(np.exp(loss.mean())) for kind, loss in our.items()},
        "ratio": {kind: ratio(our[kind], their[kind]) for kind in kinds},
        "tokens": {kind: loss.size for kind, loss in our.items()},
        "threshold": student.threshold,
        "sparsity": float(by_layer.mean()),
        "sparsity_of_layers": [round(float(x), 4) for x in by_layer],
    }


def ratio(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """The perplexity ratio of losses [rows, tokens], and the ends of its 95% interval."""
    return np.exp(with_interval(ours - theirs, resampled(len(ours)))).tolist()


def export(healing: Healing, source: Path, tokenizer: Any, directory: Path, figures: dict[str, Any]) -> None:
    """Write the student as a Hugging Face directory: one threshold, ``reach`` folded into gate and up rows.

    It is made beside ``directory`` and takes its place at the end.
    """
    from safetensors.torch import save_file

    student = healing.student
    config = student.model.config.to_dict()
    config = {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}
    config |= {"hidden_act": "fatrelu", "hidden_act_param": student.threshold, "dtype": "float32"}
    config["auto_map"] = {"AutoModelForCausalLM": f"{MODELING.stem}.FatReluLlamaForCausalLM"}
    facts = healing.run.teacher | figures
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".heal-", dir=directory.parent) as scratch:
        made = Path(scratch) / directory.name
        made.mkdir()
        save_file(tensors(healing, source), made / "model.safetensors", metadata={"format": "pt"})
        (made / "model.safetensors").chmod(0o644)  # written 0600; a cache may be shared
        (made / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        student.model.generation_config.save_pretrained(made)
        tokenizer.save_pretrained(made)
        shutil.copy(MODELING, made)
        (made / "source.json").write_text(json.dumps(facts, indent=1) + "\n")
        (made / "README.md").write_text(README.format(name=directory.name, **facts))
        if directory.exists():
            directory.rename(Path(scratch) / "before")
        made.rename(directory)


def tensors(healing: Healing, source: Path) -> dict[str, torch.Tensor]:
    """The student's tensors in float32; what did not train comes unrounded from the teacher's directory ``source``."""
    from transformers import AutoModelForCausalLM

    exact: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    named = {name: value.detach() for name, value in exact.named_parameters()}
    named |= {f"{name}.weight": part.weight.detach().cpu() for name, part in healing.student.linears.items()}
    for layer, reach in enumerate(healing.student.reach.cpu()[:, :, None]):
        gate, up = (f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up"))
        named[gate], named[up] = named[gate] * reach, named[up] / reach
    return named


def checked_teacher(name: str, device: str) -> Path:
    """The directory of a teacher that can be healed; raises InputError for another family or a missing device."""
    source = resolve_model(name)
    spec = open_checkpoint(source).spec
    if spec.family != "llama":
        raise InputError(f"teacher {name} is of family {spec.family}; only gated Llama models are healed")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {device!r} is not available here; heal with --device cpu")
    return source


def checked_out(directory: Path) -> Path:
    """``directory``, if it is new or a healed model; raises InputError where something else would be replaced."""
    healed = (directory / "source.json").is_file() and (directory / MODELING.name).is_file()
    if directory.exists() and not healed:
        raise InputError(f"{directory} exists and is no healed model; choose another place with --out")
    return directory


def made_work(directory: Path) -> Path:
    """``directory``, made where missing; raises InputError where it cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{directory} cannot hold texts and checkpoint ({error.strerror}); choose another place with --work"
        ) from None
    return directory


def keep_freed_memory() -> None:
    """Let glibc keep large blocks that were freed: having fresh ones mapped in takes a tenth of a step on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        trim_threshold, mmap_threshold = -1, -3  # as malloc.h numbers them
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)


def provenance(source: Path) -> dict[str, Any]:
    """What the teacher's source.json says, its title and licence at least."""
    file = source / "source.json"
    unknown = {"title": source.name, "licence": "unknown"}
    return unknown | (json.loads(file.read_text()) if file.is_file() else {})


def say(text: str) -> None:
    """To stderr, with the time."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def main(
    teacher: Annotated[str, typer.Option(help="the SiLU model: a local directory or smollm2")] = "smollm2",
    out: Annotated[Path | None, typer.Option(help="the healed model; default: TEACHER-relu in the cache")] = None,
    work: Annotated[Path | None, typer.Option(help="texts and checkpoint; default: in the cache")] = None,
    sparsity: Annotated[float, typer.Option(min=0.5, max=0.98, help="share of gates below the threshold")] = 0.8,
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 1400,
    minutes: Annotated[float, typer.Option(min=0.1, help="the most minutes that the steps may take")] = 160,
    rows: Annotated[int, typer.Option(min=2, help="sequences a step, half of them chats")] = 8,
    length: Annotated[int, typer.Option(min=64, help="tokens a sequence")] = 256,
    chats: Annotated[int, typer.Option(min=1, help="batches of 96 chats that the teacher writes")] = 20,
    free: Annotated[int, typer.Option(min=1, help="batches of 96 other texts that it writes")] = 8,
    save_every: Annotated[float, typer.Option(min=0.1, help="minutes between checkpoints")] = 15,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: as torch chooses")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seed: int = 0,
) -> None:
    """Heal a FATReLU model out of a SiLU one, or go on with it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = checked_teacher(teacher, device)
    out = checked_out(out or cache_directory() / "models" / f"{source.name}-relu")
    work = made_work(work or cache_directory() / "healing" / source.name)
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(source)
    eager = {"attn_implementation": "eager"}  # faster on a CPU: writing one token at a time twice, a step by a tenth
    dtype = dtype_of_products(torch.device(device))
    silu: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **eager)
    silu.to(device).eval().requires_grad_(False)
    healing = Healing(silu, gather(work, silu, tokenizer, length, chats, free), sparsity, rows, seed)
    checkpoint = work / "checkpoint.pt"
    if checkpoint.is_file():
        healing.resume(checkpoint)
        say(f"going on from step {healing.run.step}, {healing.run.fitted} layers fitted")
    else:
        healing.run.teacher = provenance(source)

    healing.begin(lambda: healing.save(checkpoint))

    def save(every: int) -> None:
        healing.save(checkpoint)
        figures = judge(healing, every)
        export(healing, source, tokenizer, out, figures)
        say(f"saved {out}: {figures}")

    heal(healing, steps, minutes, save, save_every, work / "status.txt")


if __name__ == "__main__":
    try:
        typer.run(main)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
