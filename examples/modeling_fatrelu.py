"""Llama whose FFN keeps a gate only where it is above config.hidden_act_param: FATReLU, which transformers lacks.

A healed directory carries this file; AutoModelForCausalLM.from_pretrained reads it with trust_remote_code=True.
"""

from torch.nn import Threshold
from transformers import LlamaConfig, LlamaForCausalLM


class FatReluLlamaForCausalLM(LlamaForCausalLM):
    """The model with ``hidden_act`` "fatrelu"."""

    def __init__(self, config: LlamaConfig) -> None:
        named, config.hidden_act = config.hidden_act, "relu"
        super().__init__(config)
        config.hidden_act = named
        for layer in self.model.layers:
            layer.mlp.act_fn = Threshold(config.hidden_act_param, 0.0)
