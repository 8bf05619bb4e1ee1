"""Shapes: exact parameters and bytes, against published figures and transformers' own models."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dinfer.errors import InputError
from dinfer.model import ModelSpec, catalogue_models, load_model, weight_bytes

MODELS = catalogue_models()

TINY: dict[str, Any] = {
    "name": "tiny",
    "family": "llama",
    "layers": 2,
    "hidden": 64,
    "neurons": 96,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 100,
}

LLAMA_31_8B = transformers.LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
QWEN3_06B = transformers.Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
)
GEMMA3_27B = transformers.Gemma3TextConfig(
    hidden_size=5376,
    intermediate_size=21504,
    num_hidden_layers=62,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
    sliding_window=1024,
)


# Bytes of the KV cache (case 1).


def test_kv_bytes_count_window_layers_up_to_their_window() -> None:
    spec = ModelSpec.from_config(GEMMA3_27B.to_dict())
    assert (spec.windows.count(0), spec.windows.count(1024)) == (10, 52)
    assert spec.kv_bytes(131072) == 10.40625 * 2**30


def test_kv_bytes_use_the_config_head_dim() -> None:
    spec = ModelSpec.from_config(QWEN3_06B.to_dict())
    assert spec.head_dim == 128  # hidden / heads would be 64
    assert spec.kv_bytes(spec.max_positions) == 4.375 * 2**30


def test_kv_bytes_of_a_token_of_llama_3_8b() -> None:
    assert MODELS["llama-3-8b"].kv_bytes(1) == 131_072
    assert MODELS["llama-3-8b"].kv_bytes(0) == 0


def test_a_negative_context_is_refused() -> None:
    message = "context -1 is negative; give the number of tokens that the cache holds"
    with pytest.raises(InputError, match=f"^{message}$"):
        MODELS["llama-3-8b"].kv_bytes(-1)


# Bytes of a neuron (case 8) and of all neurons.


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("relullama-7b", 24_576),
        ("relullama-13b", 30_720),
        ("llama-3.1-70b", 49_152),
        ("relullama-70b", 13_824),  # int4: 3 x 8192 weights at 18 bytes for 32
        ("opt-6.7b", 2 * 4096 * 2),
        ("opt-66b", 2 * 9216 * 2),
    ],
)
def test_neuron_bytes_come_from_hidden(model: str, count: int) -> None:
    assert MODELS[model].neuron_bytes == count


@pytest.mark.parametrize(
    ("model", "neurons", "fp16_gb", "q4_gb"),
    [
        ("llama-2-7b", 352_256, 8.66, 2.43),
        ("relullama-7b", 352_256, 8.66, 2.43),
        ("relullama-13b", 552_960, 16.99, 4.78),
        ("relullama-70b", 2_293_760, 112.74, 31.71),
        ("prosparse-7b", 352_256, 8.66, 2.43),
        ("prosparse-13b", 552_960, 16.99, 4.78),
        ("bamboo-7b", 458_752, 11.27, 3.17),
        ("turbosparse-mistral-7b", 458_752, 11.27, 3.17),
        ("opt-6.7b", 524_288, 8.59, 2.42),
        ("opt-13b", 819_200, 16.78, 4.72),
        ("opt-30b", 1_376_256, 39.46, 11.10),
        ("opt-66b", 2_359_296, 86.97, 24.46),
    ],
)
def test_ffn_sizes_equal_the_published_table(
    model: str, neurons: int, fp16_gb: float, q4_gb: float
) -> None:
    spec = MODELS[model]
    assert spec.layers * spec.neurons == neurons
    assert round(spec.with_dtype("float16").ffn_bytes / 1e9, 2) == fp16_gb
    assert round(spec.with_dtype("int4").ffn_bytes / 1e9, 2) == q4_gb


@pytest.mark.parametrize(
    ("dtype", "count"),
    [("float32", 400), ("float16", 200), ("bfloat16", 200), ("int8", 4 * 34), ("int4", 4 * 18)],
)
def test_weight_bytes_round_up_to_whole_groups(dtype: str, count: int) -> None:
    assert weight_bytes(100, dtype) == count


# Parameters (case 14).


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3-8b", 8_030_261_248),  # Llama-3.1-8B has the same shape
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_equal_the_published_count(model: str, parameters: int) -> None:
    assert MODELS[model].parameters == parameters


def test_llama_31_70b_is_141_gb_and_131_gib() -> None:
    spec = MODELS["llama-3.1-70b"]
    total = spec.dense_bytes + spec.ffn_bytes
    assert total == 2 * spec.parameters
    assert (round(total / 1e9, 1), round(total / 2**30, 1)) == (141.1, 131.4)


def test_a_tied_head_counts_once() -> None:
    tied, untied = ModelSpec(**TINY, tied=True), ModelSpec(**TINY, tied=False)
    assert untied.parameters - tied.parameters == 100 * 64
    assert untied.dense_bytes - tied.dense_bytes == untied.head_bytes == 2 * 100 * 64


def test_most_of_smollm2_is_ffn() -> None:
    assert MODELS["smollm2-135m"].ffn_bytes == 2 * 79_626_240


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_dense_part_and_neurons_are_the_whole_model(model: str, dtype: str) -> None:
    spec = MODELS[model].with_dtype(dtype)
    width = 4 if dtype == "float32" else 2
    assert spec.dense_bytes + spec.ffn_bytes == width * spec.parameters


# Against transformers: the model on the meta device has the parameters that the spec counts.


def built(config: Any) -> int:
    """Parameters of transformers' own model of ``config``, without its memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).num_parameters()


@pytest.mark.parametrize(
    "config",
    [
        LLAMA_31_8B,
        transformers.LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3),
        transformers.LlamaConfig(head_dim=96, num_hidden_layers=2, tie_word_embeddings=True),
        transformers.MistralConfig(),
        transformers.OPTConfig(hidden_size=4096, ffn_dim=16384, num_attention_heads=32),
        transformers.OPTConfig(tie_word_embeddings=False, max_position_embeddings=512),
    ],
    ids=["llama-3.1-8b", "llama-gqa", "llama-head-dim", "mistral", "opt-6.7b", "opt-untied"],
)
def test_parameters_equal_transformers(config: Any) -> None:
    assert ModelSpec.from_config(config.to_dict()).parameters == built(config)


@pytest.mark.parametrize("config", [QWEN3_06B, GEMMA3_27B], ids=["qwen3", "gemma3"])
def test_families_for_planning_leave_out_only_small_norms(config: Any) -> None:
    count = ModelSpec.from_config(config.to_dict()).parameters
    assert 0 <= built(config) - count < 1e-4 * count


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama-3-8b", LLAMA_31_8B),
        ("bamboo-7b", transformers.MistralConfig()),
        (
            "opt-66b",
            transformers.OPTConfig(
                hidden_size=9216, ffn_dim=36864, num_hidden_layers=64, num_attention_heads=72
            ),
        ),
    ],
)
def test_catalogue_shapes_equal_transformers(model: str, config: Any) -> None:
    assert MODELS[model].parameters == built(config)


# Reading config.json.


def test_from_config_reads_a_fatrelu_config() -> None:
    config = {**LLAMA_31_8B.to_dict(), "model_type": "sparsellama", "hidden_act": "fatrelu"}
    spec = ModelSpec.from_config({**config, "hidden_act_param": 0.01}, name="p")
    assert (spec.activation, spec.gate_threshold, spec.sparsity_kind) == ("fatrelu", 0.01, "relu")


def test_from_config_reads_opt() -> None:
    spec = ModelSpec.from_config(transformers.OPTConfig().to_dict(), name="opt-125m")
    assert (spec.family, spec.gated, spec.tied, spec.bias) == ("opt", False, True, True)
    assert (spec.neurons, spec.learned_positions, spec.examined_share) == (3072, 2050, 1 / 2)


def test_from_config_fills_in_what_a_published_gemma_leaves_out() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    spec = ModelSpec.from_config(config, name="gemma-3-27b")
    assert (spec.tied, spec.vocab, spec.dtype) == (True, 262_208, "bfloat16")
    assert spec.kv_bytes(131072) == 10.40625 * 2**30


@pytest.mark.parametrize(
    ("change", "windows"),
    [({}, (4096,) * 32), ({"sliding_window": None}, ()), ({"sliding_window": 1024}, (1024,) * 32)],
)
def test_from_config_reads_mistral_windows(
    change: dict[str, Any], windows: tuple[int, ...]
) -> None:
    config = {**transformers.MistralConfig().to_dict(), **change}
    assert ModelSpec.from_config(config).windows == windows


def test_from_config_counts_qwen_windows_only_where_they_are_used() -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "sliding_window": 512,
        "max_window_layers": 3,
    }
    assert ModelSpec.from_config(config).windows == ()
    used = ModelSpec.from_config({**config, "use_sliding_window": True})
    assert used.windows == (0, 0, 0, 512)


@pytest.mark.parametrize(
    ("key", "value", "dtype"),
    [
        ("torch_dtype", "float32", "float32"),
        ("dtype", "torch.bfloat16", "bfloat16"),
        ("dtype", None, "float16"),
    ],
)
def test_from_config_reads_the_dtype_once(key: str, value: str | None, dtype: str) -> None:
    config = {k: v for k, v in LLAMA_31_8B.to_dict().items() if k not in ("dtype", "torch_dtype")}
    spec = ModelSpec.from_config({**config, key: value})
    assert (spec.dtype, spec.compute_dtype) == (dtype, dtype)


def test_an_unknown_family_is_refused() -> None:
    message = (
        "model_type 'mamba' is not one of llama, mistral, qwen2, qwen3, gemma2, gemma3_text, opt"
    )
    with pytest.raises(InputError, match=f"^{message}$"):
        ModelSpec.from_config({"model_type": "mamba"})


def test_a_config_without_its_sizes_is_refused() -> None:
    message = "config of broken lacks 'num_hidden_layers'; give the config.json of its checkpoint"
    with pytest.raises(InputError, match=f"^{message}$"):
        ModelSpec.from_config({"model_type": "llama"}, name="broken")


# The spec itself.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "tiny: layers is 0; it must be at least 1"),
        ({"vocab": -5}, "tiny: vocab is -5; it must be at least 1"),
        ({"kv_heads": 3}, "tiny: heads 4 is no multiple of kv_heads 3"),
        (
            {"dtype": "fp4"},
            "tiny: dtype 'fp4' is not one of float32, bfloat16, float16, int8, int4",
        ),
        (
            {"compute_dtype": "fp4"},
            "tiny: compute_dtype 'fp4' is not one of float32, bfloat16, float16, int8, int4",
        ),
        (
            {"activation": "tanh"},
            "tiny: activation 'tanh' is not one of relu, fatrelu, drelu, silu, gelu",
        ),
        ({"windows": (0,)}, "tiny: windows has 1 entries for 2 layers"),
    ],
)
def test_an_invalid_spec_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        ModelSpec(**{**TINY, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "model description: got an unexpected keyword argument 'colour'"),
        ({}, "model description: missing 1 required positional argument: 'vocab'"),
    ],
)
def test_a_description_with_wrong_keys_is_refused(change: dict[str, Any], message: str) -> None:
    values = {**TINY, **change}
    if not change:
        del values["vocab"]
    with pytest.raises(InputError, match=f"^{message}$"):
        ModelSpec.from_dict(values)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_spec_survives_its_dict(model: str) -> None:
    assert ModelSpec.from_dict(MODELS[model].to_dict()) == MODELS[model]


def test_the_fingerprint_is_of_the_shape_alone() -> None:
    spec = ModelSpec(**TINY)
    assert spec.with_dtype("int4").fingerprint() == spec.fingerprint()
    assert ModelSpec(**{**TINY, "name": "other"}).fingerprint() == spec.fingerprint()
    for name in ("layers", "hidden", "neurons", "heads", "head_dim", "vocab"):
        assert ModelSpec(**{**TINY, name: TINY[name] * 2}).fingerprint() != spec.fingerprint()


@pytest.mark.parametrize(
    ("activation", "gated", "kind", "share"),
    [
        ("relu", True, "relu", 1 / 3),
        ("fatrelu", True, "relu", 1 / 3),
        ("relu", False, "relu", 1 / 2),
        ("silu", True, "magnitude", 2 / 3),
        ("gelu", False, "magnitude", 1 / 2),
    ],
)
def test_the_examined_share_depends_on_the_activation(
    activation: str, gated: bool, kind: str, share: float
) -> None:
    spec = ModelSpec(**TINY, activation=activation, gated=gated)
    assert (spec.sparsity_kind, spec.examined_share) == (kind, share)


@pytest.mark.parametrize(("neurons", "words"), [(1, 1), (64, 1), (65, 2), (11008, 172)])
def test_words_hold_one_bit_a_neuron(neurons: int, words: int) -> None:
    assert ModelSpec(**{**TINY, "neurons": neurons}).words == words


@pytest.mark.parametrize(
    ("dtype", "compute"), [("int4", "float16"), ("int8", "float16"), ("float32", "float32")]
)
def test_with_dtype_keeps_the_compute_dtype_of_quantised_weights(dtype: str, compute: str) -> None:
    spec = ModelSpec(**TINY).with_dtype(dtype)
    assert (spec.dtype, spec.compute_dtype) == (dtype, compute)


def test_the_catalogue_knows_the_activations() -> None:
    kinds = {name: (spec.activation, spec.gate_threshold) for name, spec in MODELS.items()}
    assert kinds["prosparse-7b"] == kinds["prosparse-13b"] == ("fatrelu", 0.01)
    assert kinds["bamboo-7b"] == kinds["turbosparse-mistral-7b"] == ("drelu", 0.0)
    assert kinds["relullama-70b"] == kinds["opt-13b"] == ("relu", 0.0)
    assert kinds["llama-2-7b"] == kinds["smollm2-135m"] == ("silu", 0.0)
    assert MODELS["relullama-70b"].dtype == "int4"


def test_an_unknown_model_is_refused_with_the_names_that_are_known() -> None:
    message = (
        "model 'gpt-9' is neither a directory with a config.json nor in the catalogue "
        f"({', '.join(MODELS)})"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        load_model("gpt-9")


def test_load_model_reads_a_directory_before_the_catalogue(tmp_path: Any) -> None:
    transformers.OPTConfig().save_pretrained(tmp_path / "mine")
    assert load_model(str(tmp_path / "mine")).name == "mine"
    assert load_model("opt-13b") == MODELS["opt-13b"]


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json is not JSON \(Expecting property name"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("dtype", "attention"), [("int4", "float16"), ("float32", "")])
def test_a_run_keeps_attention_in_the_compute_dtype(dtype: str, attention: str) -> None:
    tiny = ModelSpec(**TINY)
    spec = tiny.as_run(dtype)
    assert (spec.dtype, spec.attention_dtype) == (dtype, attention)
    assert spec.attention_bytes == tiny.attention_parameters * (2 if dtype == "int4" else 4)
    assert spec.neuron_bytes == tiny.with_dtype(dtype).neuron_bytes
    assert spec.fingerprint() == tiny.fingerprint()
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    assert ("attention_dtype" in spec.to_dict()) == (dtype == "int4")
    assert spec.with_dtype("int4").attention_dtype == ""
