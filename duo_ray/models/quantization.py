"""Quantised weights of a target in transformers, made from the model's own while it is loaded.

Why these packages, and why packed GGUF weights are llama.cpp's affair: docs/decisions/008.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from duo_ray.config import ConfigError

LINEAR_BYTES = {"int8": 1.0, "int4": 0.5 + 4 / 64}
"""Bytes of a weight of a linear layer; of four bits every 64 share a float32 scale."""

_ROWS = 32
_PACKAGES = {"int8": "torchao", "int4": "bitsandbytes"}


def check_quantization(kind: str) -> None:
    """Refuse what cannot be done here, before anything is loaded.

    Raises:
        ConfigError: a package is missing.
    """
    package = _PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"models.target.quantization is {kind}, but its package is not installed: pip install {package}"
        )


def quantization_config(kind: str, dtype: Any) -> Any:
    """What `from_pretrained` takes as `quantization_config`; None for `none`. `dtype` (torch's) is computed in."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig  # noqa: PLC0415 - only where it is asked for
        from transformers import TorchAoConfig  # noqa: PLC0415

        ao: Any = TorchAoConfig
        return ao(Int8WeightOnlyConfig())
    if kind == "int4":
        from transformers import BitsAndBytesConfig  # noqa: PLC0415 - settings are checked without torch

        bnb: Any = BitsAndBytesConfig
        return bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return None


def check_layers(model: Any, kind: str) -> None:
    """Refuse layers whose weights bitsandbytes cannot lay out for a CPU.

    Raises:
        ConfigError: their rows are no multiple of 32.
    """
    for name, layer in model.named_modules() if kind == "int4" else ():
        rows = getattr(layer, "out_features", 0)
        if rows % _ROWS and type(layer).__name__ == "Linear4bit":
            raise ConfigError(
                f"models.target.quantization is int4, but {name} has {rows} rows, no multiple of {_ROWS}: use int8"
            )
