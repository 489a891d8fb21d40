"""The model to be trained: some of the target's own layers, or a smaller model with the target's vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from duo_ray.distillation.gguf_file import check_exportable, gemma_layer_types
from duo_ray.distillation.workspace import DistillationError, make_folder
from duo_ray.models.catalog import TargetFiles, resolve_target
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import TokenizerVocabulary, compare

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


def kept_layers(count: int, of: int) -> tuple[int, ...]:
    """Indices of `count` layers, evenly spread, the first and the last among them.

    Raises:
        DistillationError: fewer than two, or as many as the target has.
    """
    if not 2 <= count < of:
        raise DistillationError(f"--layers {count}: the target has {of} layers; keep 2 to {of - 1} of them")
    return tuple(round(i * (of - 1) / (count - 1)) for i in range(count))


def check_student(target: TargetFiles, *, layers: int, student: str | None) -> Path:
    """Where the student's weights come from: the target's directory, or that of a sibling.

    Args:
        layers: how many of the target's layers to keep.
        student: a directory or hub id to start from instead of the target's layers.

    Raises:
        DistillationError: too many layers, another vocabulary, or a family that llama.cpp's format is not written for.
    """
    source = target.path if student is None else _sibling(student, target)
    check_exportable(source)
    if student is None:
        kept_layers(layers, json.loads((source / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
    return source


def make_student(folder: Path, target: TargetFiles, source: Path, *, layers: int | None) -> None:
    """Write the untrained student in float32 to `folder`, with the target's tokenizer, unless it is there.

    Args:
        source: see `check_student`.
        layers: how many of its layers to keep; None: all.
    """

    def fill(part: Path) -> None:
        model = load_model(source)
        if layers is not None:
            _cut(model, layers)
        model.save_pretrained(part)
        copy_tokenizer(target.tokenizer_path, part)

    make_folder(folder, fill)


def load_model(folder: Path) -> Any:
    """A causal language model in float32."""
    import torch  # noqa: PLC0415 - 2 s that refusals do without
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _sibling(student: str, target: TargetFiles) -> Path:
    files = resolve_target(student)
    ours, theirs = (Tokenizer.load(each.tokenizer_path) for each in (target, files))
    report, _ = compare(TokenizerVocabulary(ours), TokenizerVocabulary(theirs))
    if not report.same or files.vocab_size < ours.vocab_size:
        raise DistillationError(
            f"--student {student} has another vocabulary than the target ({report.first_difference or 'fewer ids'}): "
            "choose a model of the target's family, or leave --student out to keep some of the target's own layers"
        )
    return files.path


def _cut(model: Any, count: int) -> None:
    from torch import nn  # noqa: PLC0415 - as above

    config = model.config
    kept = kept_layers(count, config.num_hidden_layers)
    model.model.layers = nn.ModuleList([model.model.layers[i] for i in kept])
    config.num_hidden_layers = count
    if config.model_type == "gemma3_text":
        config.layer_types = gemma_layer_types(count)
    elif getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
