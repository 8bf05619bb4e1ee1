"""What a model is made of, in exact parameters and bytes; nothing about its weights' values."""

import hashlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dinfer.errors import InputError

BITS_PER_WEIGHT = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "int8": 8.5,  # 32 weights and one fp16 scale, as GGUF Q8_0
    "int4": 4.5,  # 32 weights and one fp16 scale, as GGUF Q4_0
}
"""Storage bits of one weight, the scales of quantised groups of 32 included."""

DTYPES = ("dtype", "compute_dtype", "attention_dtype")
"""What of a ModelSpec says how it is stored, not what it is."""

ACTIVATIONS = {"relu": "relu", "fatrelu": "relu", "drelu": "relu", "silu": "magnitude", "gelu": "magnitude"}
"""Activation -> how a neuron is told inactive: its gate is below a threshold, or its value is small."""


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only transformer, as far as memory and time depend on it.

    ``neurons`` is per layer; a gated neuron has three weight rows (gate, up, down), another has two (up, down).
    ``windows`` holds per layer the attention window in tokens, 0 for global; empty means global everywhere.
    ``dtype`` stores the layers' matrices, ``compute_dtype`` embeddings, head, norms and the KV cache;
    ``attention_dtype``, where it is not empty, those of the matrices that are no neurons'.
    ``gate_threshold`` is FATReLU's t (0 for plain ReLU).
    """

    name: str
    family: str
    layers: int
    hidden: int
    neurons: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tied: bool = False
    activation: str = "silu"
    gate_threshold: float = 0.0
    dtype: str = "float16"
    compute_dtype: str = "float16"
    max_positions: int = 2048
    bias: bool = False
    learned_positions: int = 0
    windows: tuple[int, ...] = field(default=())
    attention_dtype: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "neurons", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise InputError(f"{self.name}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.name}: heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.dtype not in BITS_PER_WEIGHT:
            raise InputError(f"{self.name}: dtype {self.dtype!r} is not one of {', '.join(BITS_PER_WEIGHT)}")
        if self.compute_dtype not in BITS_PER_WEIGHT:
            raise InputError(
                f"{self.name}: compute_dtype {self.compute_dtype!r} is not one of {', '.join(BITS_PER_WEIGHT)}"
            )
        if self.attention_dtype not in ("", *BITS_PER_WEIGHT):
            raise InputError(
                f"{self.name}: attention_dtype {self.attention_dtype!r} is not one of {', '.join(BITS_PER_WEIGHT)}"
            )
        if self.activation not in ACTIVATIONS:
            raise InputError(f"{self.name}: activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.windows and len(self.windows) != self.layers:
            raise InputError(f"{self.name}: windows has {len(self.windows)} entries for {self.layers} layers")

    @property
    def matrices(self) -> int:
        """Weight rows of one neuron: 3 when gated (gate, up, down), else 2 (up, down)."""
        return 3 if self.gated else 2

    @property
    def words(self) -> int:
        """64-bit words that hold one bit for each neuron of a layer."""
        return -(-self.neurons // 64)

    @property
    def sparsity_kind(self) -> str:
        """``relu``: inactive iff the gate is at most t. ``magnitude``: inactive iff |act(gate) * up| is at most t.

        A ReLU kind has a t of its own, ``gate_threshold``, which a plan may raise; a magnitude kind has the plan's.
        """
        return ACTIVATIONS[self.activation]

    def raised(self, thresholds: Iterable[float]) -> bool:
        """Whether ``thresholds`` [layer] are those of a ReLU kind and above the model's own ``gate_threshold``."""
        own = self.gate_threshold * (1 + 1e-6)  # as float32 or not
        return self.sparsity_kind == "relu" and any(value > own for value in thresholds)

    @property
    def examined_share(self) -> float:
        """Share of a neuron's bytes read to learn exactly whether it is active.

        ReLU kinds need the first matrix only; magnitude kinds need all but the down row.
        """
        return 1 / self.matrices if self.sparsity_kind == "relu" else (self.matrices - 1) / self.matrices

    @property
    def neuron_bytes(self) -> int:
        """Bytes of one neuron: matrices x hidden x weight bits / 8 (24,576 for Llama-2-7B in fp16)."""
        return weight_bytes(self.matrices * self.hidden, self.dtype)

    @property
    def ffn_bytes(self) -> int:
        """Bytes of all neurons of all layers."""
        return self.layers * self.neurons * self.neuron_bytes

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's matrices that are no neurons': q, k, v and o."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def attention_bytes(self) -> int:
        """Bytes of one layer's q, k, v and o matrices."""
        return weight_bytes(self.attention_parameters, self.attention_dtype or self.dtype)

    @property
    def small_parameters(self) -> int:
        """Norms, biases and learned positions of the whole model, kept in ``compute_dtype``."""
        norm = self.hidden * (2 if self.bias else 1)
        biases = self.head_dim * (self.heads + 2 * self.kv_heads) + 2 * self.hidden + self.neurons if self.bias else 0
        return self.layers * (2 * norm + biases) + norm + self.learned_positions * self.hidden

    @property
    def head_bytes(self) -> int:
        """Bytes of the output projection, read once a token."""
        return weight_bytes(self.vocab * self.hidden, self.compute_dtype)

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding and the output projection; a tied head counts once."""
        return self.head_bytes * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        ffn = self.layers * self.neurons * self.matrices * self.hidden
        return embeddings + ffn + self.layers * self.attention_parameters + self.small_parameters

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything but the neurons: attention, embeddings, head, norms, biases, positions."""
        small = weight_bytes(self.small_parameters, self.compute_dtype)
        return self.layers * self.attention_bytes + self.embedding_bytes + small

    def kv_bytes(self, context: int) -> int:
        """Bytes of the KV cache at ``context`` tokens: 2 x sum of kv_heads x head_dim x min(context, window).

        Raises InputError for a negative context.
        """
        if context < 0:
            raise InputError(f"context {context} is negative; give the number of tokens that the cache holds")
        windows = self.windows or (0,) * self.layers
        tokens = sum(min(context, window) if window else context for window in windows)
        return weight_bytes(2 * self.kv_heads * self.head_dim * tokens, self.compute_dtype)

    def with_dtype(self, dtype: str) -> "ModelSpec":
        """The same model with its matrices in ``dtype``; float dtypes also set ``compute_dtype``."""
        compute = dtype if dtype in ("float32", "float16", "bfloat16") else self.compute_dtype
        return replace(self, dtype=dtype, compute_dtype=compute, attention_dtype="")

    def as_run(self, dtype: str) -> "ModelSpec":
        """``with_dtype`` as the executor stores it: int8 and int4 leave attention in ``compute_dtype``."""
        spec = self.with_dtype(dtype)
        return replace(spec, attention_dtype="" if spec.dtype == spec.compute_dtype else spec.compute_dtype)

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the shape; the dtypes do not count, nor does the name."""
        shape = {k: v for k, v in self.to_dict().items() if k not in DTYPES and k != "name"}
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and TOML; an empty ``attention_dtype`` is left out."""
        values = {**asdict(self), "windows": list(self.windows)}
        return {name: value for name, value in values.items() if name != "attention_dtype" or value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelSpec":
        """The spec that ``to_dict`` wrote; raises InputError for unknown or missing keys."""
        try:
            return cls(**{**values, "windows": tuple(values.get("windows", ()))})
        except TypeError as error:
            raise InputError(f"model description: {str(error).split('() ')[-1]}") from None

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str = "") -> "ModelSpec":
        """The spec of a Hugging Face ``config.json`` of the Llama or OPT family (or Qwen, Gemma for planning).

        head_dim is read when present, never guessed as hidden/heads; sliding windows count where layers use them.
        Raises InputError for a family that dinfer does not know.
        """
        dtype = config.get("dtype") or config.get("torch_dtype")
        text = config.get("text_config", {})
        dtype = text.get("dtype") or text.get("torch_dtype") or dtype
        config = {**config, **text, "dtype": dtype}
        kind = config.get("model_type", "")
        name = name or config.get("_name_or_path") or kind
        config = {**_CONFIG_DEFAULTS.get(kind, {}), **config}
        try:
            if kind == "opt":
                return _opt_spec(config, name)
            if kind in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma2", "sparsellama"):
                return _llama_spec(config, name)
        except KeyError as error:
            raise InputError(f"config of {name} lacks {error}; give the config.json of its checkpoint") from None
        raise InputError(f"model_type {kind!r} is not one of llama, mistral, qwen2, qwen3, gemma2, gemma3_text, opt")


def weight_bytes(count: int, dtype: str) -> int:
    """Bytes of ``count`` weights stored in ``dtype``, whole quantisation groups of 32 for int8 and int4."""
    if dtype in ("int8", "int4"):
        return -(-count // 32) * (34 if dtype == "int8" else 18)
    return count * int(BITS_PER_WEIGHT[dtype]) // 8


_CONFIG_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128},
    "gemma2": {
        "vocab_size": 256_000,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}
"""Values that a published config.json may leave out, as the config classes of transformers fill them in."""


def _dtype(config: dict[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16").removeprefix("torch.")
    return dtype if dtype in ("float32", "float16", "bfloat16") else "float16"


def _llama_spec(config: dict[str, Any], name: str) -> ModelSpec:
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    return ModelSpec(
        name=name,
        family="llama",
        layers=layers,
        hidden=config["hidden_size"],
        neurons=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        activation="gelu" if activation.startswith("gelu") else activation,
        gate_threshold=float(config.get("hidden_act_param") or 0.0) if activation == "fatrelu" else 0.0,
        dtype=_dtype(config),
        compute_dtype=_dtype(config),
        max_positions=config.get("max_position_embeddings", 2048),
        windows=_windows(config, layers),
    )


def _windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds) if window else ()
    if pattern := config.get("sliding_window_pattern"):  # every pattern-th layer is global
        return tuple(0 if (i + 1) % pattern == 0 else window for i in range(layers))
    if not window or not config.get("use_sliding_window", True):
        return ()
    first = config.get("max_window_layers", 0)  # Qwen: the layers before it are global
    return tuple(window if i >= first else 0 for i in range(layers))


def _opt_spec(config: dict[str, Any], name: str) -> ModelSpec:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelSpec(
        name=name,
        family="opt",
        layers=config["num_hidden_layers"],
        hidden=hidden,
        neurons=config["ffn_dim"],
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config["vocab_size"],
        gated=False,
        tied=config.get("tie_word_embeddings", True),
        activation=config.get("activation_function", "relu"),
        dtype=_dtype(config),
        compute_dtype=_dtype(config),
        max_positions=config.get("max_position_embeddings", 2048),
        bias=True,
        learned_positions=config.get("max_position_embeddings", 2048) + 2,
    )


def catalogue_models() -> dict[str, ModelSpec]:
    """The catalogue's models by name: published shapes, one TOML file each, every figure with its source."""
    files = sorted((resources.files("dinfer") / "catalog" / "models").iterdir(), key=lambda file: file.name)
    return {f.name[:-5]: _from_toml(f.read_text(), f.name[:-5]) for f in files if f.name.endswith(".toml")}


def load_model(name: str) -> ModelSpec:
    """The spec of a local Hugging Face directory, or of the catalogue's model ``name``.

    Raises InputError for a name that is neither.
    """
    config = Path(name) / "config.json"
    if config.is_file():
        try:
            values = json.loads(config.read_text())
        except ValueError as error:
            raise InputError(f"{config} is not JSON ({error})") from None
        return ModelSpec.from_config(values, name=Path(name).resolve().name)
    models = catalogue_models()
    if name not in models:
        raise InputError(
            f"model {name!r} is neither a directory with a config.json nor in the catalogue ({', '.join(models)})"
        )
    return models[name]


def _from_toml(text: str, name: str) -> ModelSpec:
    values = tomllib.loads(text)
    return ModelSpec.from_dict({"name": name, **values})
