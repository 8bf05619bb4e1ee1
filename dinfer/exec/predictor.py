"""A trained predictor at work: the sets of a layer from the residual that decoding has at hand."""

import numpy as np
import torch

from dinfer import bits
from dinfer.predictors import Predictors


class LivePredictor:
    """``predictors`` as tensors on ``device``: 16-bit on a GPU, float32 on a CPU, which multiplies 16-bit slowly."""

    def __init__(self, predictors: Predictors, device: torch.device) -> None:
        self.dtype = torch.float16 if device.type == "cuda" else torch.float32
        self.layers = [
            tuple(torch.from_numpy(np.asarray(part)).to(device, self.dtype) for part in parts)
            for parts in zip(predictors.first, predictors.second, predictors.bias, strict=True)
        ]
        self.cuts = predictors.cuts.tolist()

    def predicted(self, layer: int, hidden: torch.Tensor) -> np.ndarray:
        """Words uint64 of the set predicted for ``layer`` from ``hidden`` [sequence, hidden]; of a batch the union."""
        first, second, bias = self.layers[layer]
        rows = hidden.float()
        rows = (rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + 1e-6)).to(self.dtype)
        chosen = torch.addmm(bias, rows @ first, second) >= self.cuts[layer]
        return bits.pack(chosen.any(dim=0).cpu().numpy())
