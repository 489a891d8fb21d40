"""Linear layers for the CPU whose weights oneDNN has laid out in advance.

A plain `nn.Linear` has its weights reordered in every call, which at a handful of tokens costs more than the product.
Results are those of the plain layers; nothing is compiled, any batch and length will do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_ROWS = 4  # oneDNN lays the weights out for about this many tokens per call


class PackedLinear(nn.Module):
    """y = x W^T + b with W `[out, in]` prepacked; x `[..., in]` -> y `[..., out]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies matrices of `dtype`."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    supported: dict[torch.dtype, bool] = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return supported.get(dtype, False)


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of `model`, in place; an output layer tied to the embedding gets its own copy."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter:  # torchao keeps its own kind
                setattr(parent, name, PackedLinear(layer.weight, layer.bias))
            elif type(layer) is Conv1D:  # GPT-2's linear layer, weights transposed
                setattr(parent, name, PackedLinear(layer.weight.t(), layer.bias))
