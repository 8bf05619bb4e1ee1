"""The dense functions of each family against transformers, the layout of neurons, and what is refused."""

import json

import pytest
import torch
from conftest import LLAMA, TINY, save_tiny
from transformers import AutoModelForCausalLM, MistralConfig, OPTConfig

from dinfer.errors import InputError
from dinfer.families import FAMILIES, ffn_sites, open_checkpoint

IDS = [int(i) for i in torch.randint(3, 256, (40,), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory):
    """The shared tiny models, and a Mistral whose window is shorter than the text."""
    config = MistralConfig(**LLAMA, sliding_window=8)
    mistral = save_tiny(config, tmp_path_factory.mktemp("mistral") / "mistral-window")
    return {**tiny_models, "mistral-window": mistral}


def ffn(model, layer, neurons, hidden, family, spec):
    """The FFN's part of the residual from a layer's rows, in the dtype of ``hidden``."""
    x = family.ffn_input(model, layer, hidden)
    *ups, down = neurons.rows.to(hidden.dtype).unbind(1)
    act = {"silu": torch.nn.functional.silu, "relu": torch.relu}[spec.activation]
    if spec.gated:
        gate, up = ups
        return (act(x @ gate.T) * (x @ up.T)) @ down
    return act(x @ ups[0].T + neurons.up_bias.to(x)) @ down + neurons.down_bias.to(x)


def logits_of(directory, dtype, pieces, context=64):
    """Logits [tokens, vocab] of IDS, fed in ``pieces`` of so many tokens; the caches hold ``context`` tokens."""
    checkpoint = open_checkpoint(directory)
    spec, family = checkpoint.spec, FAMILIES[checkpoint.spec.family]
    model = family.dense(checkpoint, 64, torch.device("cpu"), dtype)
    cache = torch.zeros(spec.layers, 2, spec.kv_heads, context, spec.head_dim, dtype=dtype)
    out, start = [], 0
    for length in pieces:
        hidden = family.embed(model, torch.tensor(IDS[start : start + length]), [start])
        for layer in range(spec.layers):
            hidden = family.attention(model, layer, hidden, [cache[layer]], [start])
            neurons = checkpoint.neurons(layer)
            hidden = hidden + ffn(model, layer, neurons, hidden, family, spec)
        out.append(family.head(model, hidden))
        start += length
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pieces", [(40,), (17, *[1] * 23), (9, 20, 1, 10)])
@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt", "mistral-window"])
def test_logits_equal_transformers(models, name, pieces, dtype):
    """However a text is cut into a prefill and single tokens,
    the plain functions give what the dense model gives."""
    model = AutoModelForCausalLM.from_pretrained(models[name]).to(dtype).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
        given = logits_of(models[name], dtype, pieces)
    assert (given - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("pieces", [(40,), (17, *[1] * 23), (9, 20, 1, 10), (3, 3, 1, 33)])
def test_a_ring_of_the_windows_length_is_enough(models, pieces):
    """A layer that sees a window keeps no more of it:
    the same logits as a cache of the whole context."""
    window = open_checkpoint(models["mistral-window"]).spec.windows[0]
    assert window < len(IDS)
    with torch.inference_mode():
        whole = logits_of(models["mistral-window"], torch.float64, pieces)
        ring = logits_of(models["mistral-window"], torch.float64, pieces, context=window)
    assert (ring - whole).norm() / whole.norm() < 1e-12


@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt"])
def test_a_neuron_is_its_row_of_gate_and_up_and_its_column_of_down(tiny_models, name):
    """The executor moves whole neurons,
    so row i must hold exactly what neuron i reads and writes."""
    checkpoint = open_checkpoint(tiny_models[name])
    neurons = checkpoint.neurons(2)
    prefix = "model.decoder.layers.2." if name == "opt" else "model.layers.2.mlp."
    parts = ("fc1", "fc2") if name == "opt" else ("gate_proj", "up_proj", "down_proj")
    weights = [checkpoint.tensor(f"{prefix}{part}.weight") for part in parts]
    assert neurons.rows.shape == (160, checkpoint.spec.matrices, 64)
    for matrix, weight in enumerate(weights):
        expected = weight.T if matrix == len(weights) - 1 else weight
        assert torch.equal(neurons.rows[:, matrix], expected)
    assert (neurons.up_bias is None) == (name != "opt")


@pytest.mark.parametrize("name", ["llama-silu", "llama-relu", "opt"])
def test_the_spec_counts_every_parameter(tiny_models, name):
    """The planner believes the spec,
    so its parameters are those of the real model to the last one."""
    model = AutoModelForCausalLM.from_pretrained(tiny_models[name])
    spec = open_checkpoint(tiny_models[name]).spec
    assert spec.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama-silu", "opt"])
def test_sites_are_found_layer_by_layer(tiny_models, name):
    """A recorder hooks what ffn_sites gives:
    down's input has one value a neuron in every layer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_models[name])
    sites = list(ffn_sites(model, open_checkpoint(tiny_models[name]).spec))
    assert [site.down.weight.shape for site in sites] == [(64, 160)] * 4


def test_fingerprint_tells_weights_apart(tiny_models):
    """A plan made for other weights is refused by this fingerprint,
    which is the same each time it is taken."""
    prints = [open_checkpoint(d).fingerprint for d in tiny_models.values()]
    assert prints == [open_checkpoint(d).fingerprint for d in tiny_models.values()]
    assert len(set(prints)) == 3


def test_a_hub_snapshot_has_the_models_name(tmp_path):
    """The cache of a hub names its directories by revision,
    and a report that said 3f2a1c for a model would help nobody."""
    snapshot = tmp_path / "models--someone--tiny-relu" / "snapshots" / "3f2a1c"
    snapshot.parent.mkdir(parents=True)
    write_config(snapshot, **LLAMA, model_type="llama")
    assert open_checkpoint(snapshot).spec.name == "someone/tiny-relu"


def write_config(directory, **changes):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(changes))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def refusal(directory):
    with pytest.raises(InputError) as caught:
        open_checkpoint(directory)
    return str(caught.value).replace(str(directory), "DIR")


def test_unknown_family_is_refused(tmp_path):
    """Nothing is guessed about a family whose FFN is not known."""
    assert refusal(write_config(tmp_path / "m", model_type="mamba")) == (
        "model_type 'mamba' of DIR/config.json cannot be run; runnable are llama, mistral, sparsellama, opt"
    )


def test_missing_parts_are_named(tmp_path):
    """A directory that is no model says which part it lacks and where a model comes from."""
    assert refusal(tmp_path) == (
        "model DIR has no config.json; give a Hugging Face directory or `dinfer fetch smollm2`"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert refusal(tmp_path) == "model DIR has no *.safetensors; save it with save_pretrained"
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path).startswith("DIR/config.json is not JSON (Expecting property name")


def test_variants_with_other_arithmetic_are_refused(tmp_path):
    """Biases in Llama and OPT-350m's layout are not computed here,
    and silence would give wrong text."""
    llama = {**LLAMA, "model_type": "llama", "attention_bias": True}
    assert refusal(write_config(tmp_path / "bias", **llama)) == (
        "config.json has attention_bias or mlp_bias; Llama variants with biases are not supported"
    )
    opt = {**OPTConfig(**TINY, ffn_dim=160, word_embed_proj_dim=32).to_dict()}
    assert refusal(write_config(tmp_path / "opt", **opt)) == (
        "config.json has do_layer_norm_before false or projected embeddings; OPT-350m is not supported"
    )


def test_missing_tensor_is_named(tiny_models):
    """A checkpoint that does not fit its config is told by the first tensor that is not there."""
    checkpoint = open_checkpoint(tiny_models["llama-silu"])
    with pytest.raises(InputError, match="lacks the tensor model.layers.4.mlp.gate_proj.weight"):
        checkpoint.neurons(4)


def test_context_past_learned_positions_is_refused(tiny_models):
    """OPT has rows for 256 positions only, so a longer context is an error before any token."""
    checkpoint = open_checkpoint(tiny_models["opt"])
    with pytest.raises(InputError) as caught:
        FAMILIES["opt"].dense(checkpoint, 257, torch.device("cpu"), torch.float32)
    assert str(caught.value) == "context 257 exceeds the 256 learned positions; lower --context"
