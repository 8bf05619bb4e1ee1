"""Weights for the benchmarks: random ones of a published shape, and any checkpoint as GGUF for llama.cpp."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from dinfer.families import open_checkpoint
from dinfer.model import ModelSpec, load_model

GGML = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
}


SPEAKS, LIFT = -1e9, 10.0
"""A gate threshold, and a bias, with which every neuron that is computed is active."""


def shape(name: str, layers: int) -> ModelSpec:
    """The catalogue's model ``name`` with its first ``layers`` layers only, and no gate that says no.

    Random weights know nothing of a trace: half of their gates would silence neurons that it has active. So a gated
    one's threshold lies below every gate; of OPT ``write_random`` lifts every gate by a bias.
    """
    whole = load_model(name)
    fewer = replace(whole, name=f"{name}, {layers} of {whole.layers} layers", layers=layers)
    return replace(fewer, activation="fatrelu", gate_threshold=SPEAKS) if whole.gated else fewer


def write_random(spec: ModelSpec, dtype: str, directory: Path) -> Path:
    """A Hugging Face directory of random weights; every layer holds the same numbers, each in its own memory."""
    directory.mkdir(parents=True, exist_ok=True)
    names = _llama_names if spec.family == "llama" else _opt_names
    generator = torch.Generator().manual_seed(0)
    drawn: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def draw(kind: str, *size: int) -> torch.Tensor:
        if (kind, size) not in drawn:
            made = torch.randn(size, generator=generator) * (0.02 if len(size) > 1 else 0.1)
            drawn[kind, size] = (made + (kind == "norm")).to(getattr(torch, dtype))
        return drawn[kind, size].clone()

    tensors, config = names(spec, draw)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return directory


def _llama_names(spec, draw):
    tensors = {"model.embed_tokens.weight": draw("e", spec.vocab, spec.hidden)}
    tensors["model.norm.weight"] = draw("norm", spec.hidden)
    if not spec.tied:
        tensors["lm_head.weight"] = draw("h", spec.vocab, spec.hidden)
    wide, narrow = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = draw("norm", spec.hidden)
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = draw(name, rows, spec.hidden)
        tensors[f"{at}self_attn.o_proj.weight"] = draw("o", spec.hidden, wide)
        tensors[f"{at}mlp.gate_proj.weight"] = draw("gate", spec.neurons, spec.hidden)
        tensors[f"{at}mlp.up_proj.weight"] = draw("up", spec.neurons, spec.hidden)
        tensors[f"{at}mlp.down_proj.weight"] = draw("down", spec.hidden, spec.neurons)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": spec.hidden}
    config |= {"intermediate_size": spec.neurons, "num_hidden_layers": spec.layers, "vocab_size": spec.vocab}
    config |= {"num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim}
    config |= {"hidden_act": spec.activation, "hidden_act_param": spec.gate_threshold}
    config |= {"max_position_embeddings": spec.max_positions, "rms_norm_eps": 1e-5}
    return tensors, config | {"tie_word_embeddings": spec.tied}


def _opt_names(spec, draw):
    root = "model.decoder."
    tensors = {f"{root}embed_tokens.weight": draw("e", spec.vocab, spec.hidden)}
    tensors[f"{root}embed_positions.weight"] = draw("p", spec.max_positions + 2, spec.hidden)

    def norm(name):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw("norm", spec.hidden), draw("b", spec.hidden)

    norm(f"{root}final_layer_norm")
    for layer in range(spec.layers):
        at = f"{root}layers.{layer}."
        norm(f"{at}self_attn_layer_norm")
        norm(f"{at}final_layer_norm")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors[f"{at}self_attn.{name}.weight"] = draw(name, spec.hidden, spec.hidden)
            tensors[f"{at}self_attn.{name}.bias"] = draw("b", spec.hidden)
        for name, rows, columns in (("fc1", spec.neurons, spec.hidden), ("fc2", spec.hidden, spec.neurons)):
            tensors[f"{at}{name}.weight"] = draw(name, rows, columns)
            tensors[f"{at}{name}.bias"] = draw("b", rows) + (LIFT if name == "fc1" else 0)
    config = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": spec.hidden}
    config |= {"ffn_dim": spec.neurons, "num_hidden_layers": spec.layers, "vocab_size": spec.vocab}
    config |= {"num_attention_heads": spec.heads, "activation_function": "relu", "do_layer_norm_before": True}
    return tensors, config | {"word_embed_proj_dim": spec.hidden, "max_position_embeddings": spec.max_positions}


def write_gguf(directory: Path, dtype: str, file: Path) -> Path:
    """The checkpoint in ``directory`` as a GGUF file with its matrices in ``dtype`` and no tokenizer.

    llama.cpp computes SiLU where a Llama has ReLU, and has no OPT: that goes as GPT-2, which has its layout and
    GELU. Both are the same bytes and the same products; the tokens then mean nothing.
    """
    checkpoint = open_checkpoint(directory)
    spec, tensor = checkpoint.spec, checkpoint.tensor
    kind = "llama" if spec.family == "llama" else "gpt2"
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.neurons)
    writer.add_head_count(spec.heads)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(spec.vocab)

    def add(name: str, value: torch.Tensor) -> None:
        if value.ndim == 1:
            writer.add_tensor(name, value.float().numpy())
            return
        value = value.to(getattr(torch, dtype)).contiguous()
        raw = value.view(torch.uint8).numpy() if dtype == "bfloat16" else value.numpy()
        writer.add_tensor(name, raw, raw_dtype=GGML[dtype])

    (_add_llama if kind == "llama" else _add_gpt2)(writer, checkpoint.config, spec, tensor, add)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_llama(writer, config, spec, tensor, add):
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_rope_dimension_count(spec.head_dim)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    add("token_embd.weight", tensor("model.embed_tokens.weight"))
    add("output_norm.weight", tensor("model.norm.weight"))
    if not spec.tied:
        add("output.weight", tensor("lm_head.weight"))
    names = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    names |= {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm"}
    names |= {"post_attention_layernorm": "ffn_norm"}
    for layer in range(spec.layers):
        for name, heads in (("q", spec.heads), ("k", spec.kv_heads)):
            weight = tensor(f"model.layers.{layer}.self_attn.{name}_proj.weight")
            add(f"blk.{layer}.attn_{name}.weight", interleaved(weight, heads))
        for theirs, ours in names.items():
            add(f"blk.{layer}.{ours}.weight", tensor(f"model.layers.{layer}.{theirs}.weight"))


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection in llama.cpp's order: it turns neighbours, Hugging Face a half against the other."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _add_gpt2(writer, config, spec, tensor, add):
    writer.add_layer_norm_eps(1e-5)
    root = "model.decoder."
    add("token_embd.weight", tensor(f"{root}embed_tokens.weight"))
    add("position_embd.weight", tensor(f"{root}embed_positions.weight")[2:])
    for part in ("weight", "bias"):
        add(f"output_norm.{part}", tensor(f"{root}final_layer_norm.{part}"))
    names = {"self_attn_layer_norm": "attn_norm", "self_attn.out_proj": "attn_output", "final_layer_norm": "ffn_norm"}
    names |= {"fc1": "ffn_up", "fc2": "ffn_down"}
    for layer in range(spec.layers):
        at = f"{root}layers.{layer}."
        for part in ("weight", "bias"):
            add(f"blk.{layer}.attn_qkv.{part}", torch.cat([tensor(f"{at}self_attn.{n}_proj.{part}") for n in "qkv"]))
            for theirs, ours in names.items():
                add(f"blk.{layer}.{ours}.{part}", tensor(f"{at}{theirs}.{part}"))


def bytes_a_token(spec: ModelSpec, context: float, ffn_share: float) -> float:
    """Bytes that decoding a token must read: attention's matrices, head, keys and values, and a share of the FFN."""
    kv = spec.kv_bytes(1) * context
    return float(spec.layers * spec.attention_bytes + spec.head_bytes + kv + np.float64(ffn_share) * spec.ffn_bytes)
