"""A target that is trained on in seconds: a few random layers with the tokenizer of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.models.tiny_transformers import CONFIGS


def write_model(folder: Path, config: PretrainedConfig, tokenizer: Path, sharpness: float = 1.0) -> Path:
    """A float32 model with random weights from a fixed seed and the tokenizer of another directory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(sharpness)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        if "token" in file.name or file.suffix == ".jinja" or file.name == "generation_config.json":
            shutil.copyfile(file, folder / file.name)
    return folder


def small_config(family: str, vocab_size: int, **changes: Any) -> PretrainedConfig:
    """One of `CONFIGS` with another vocabulary."""
    config = CONFIGS[family].to_dict()
    return type(CONFIGS[family])(**{**config, "vocab_size": vocab_size, **changes})


def write_prompts(path: Path, count: int) -> Path:
    lines = [json.dumps({"prompt": f"Tell me about the number {number}."}) for number in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
