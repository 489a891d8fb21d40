"""The model to be trained: some of the target's own layers, or a smaller model, with the target's tokens or its own."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duo_ray.distillation.gguf_file import check_exportable, check_tokenizer, gemma_layer_types
from duo_ray.distillation.workspace import DistillationError, make_folder
from duo_ray.models.catalog import TargetFiles, gguf_target, resolve_target
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import TokenizerVocabulary, compare

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")
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


@dataclass(frozen=True, slots=True)
class Source:
    """Where a student comes from."""

    weights: Path
    tokenizer: Path
    tokenizer_gguf: Path | None
    """The .gguf file, where there is one, that has the tokenizer in llama.cpp's form."""
    context_length: int
    """Tokens it reads at most."""
    own_vocabulary: bool
    """Whether its tokens are not the target's."""


def check_student(name: str, target: TargetFiles, *, layers: int, student: str | None) -> Source:
    """Where the student comes from: the target itself, or another model.

    Args:
        name: the target's.
        layers: how many of the target's layers to keep.
        student: a directory or hub id to start from instead of the target's layers.

    Raises:
        DistillationError: too many layers, no token in common, or a family or tokenizer that llama.cpp's format is not
            written for.
    """
    if student is not None:
        source = _other_model(student, name, target)
        check_exportable(source.weights)
    else:
        check_exportable(target.path)
        kept_layers(layers, json.loads((target.path / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
        source = Source(target.path, target.tokenizer_path, gguf_target(name), target.context_length, False)
    check_tokenizer(source.weights, source.tokenizer, source.tokenizer_gguf)
    return source


def make_student(folder: Path, source: Source, *, layers: int | None) -> None:
    """Write the untrained student in float32 to `folder`, with its tokenizer, unless it is there.

    Args:
        layers: how many of its layers to keep; None: all.
    """

    def fill(part: Path) -> None:
        model = load_model(source.weights) if layers is None else _cut(source.weights, layers)
        model.save_pretrained(part)
        copy_tokenizer(source.tokenizer, part)

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


def _other_model(student: str, name: str, target: TargetFiles) -> Source:
    files = resolve_target(student)
    vocabulary, theirs = (
        TokenizerVocabulary(Tokenizer.load(each.tokenizer_path, rows=each.vocab_size)) for each in (target, files)
    )
    report, _ = compare(vocabulary, theirs)
    if report.same and files.vocab_size >= vocabulary.size:
        return Source(files.path, target.tokenizer_path, gguf_target(name), files.context_length, False)
    if not report.shared:
        raise DistillationError(
            f"--student {student} has no token in common with the target ({report.first_difference}): choose another "
            "model, or leave --student out to keep some of the target's own layers"
        )
    return Source(files.path, files.tokenizer_path, gguf_target(student), files.context_length, True)


def _cut(folder: Path, count: int) -> Any:
    """A model of some layers of the one in `folder`, of which nothing else is read."""
    import torch  # noqa: PLC0415 - as above
    from safetensors import safe_open  # noqa: PLC0415 - as above
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - as above

    config: Any = AutoConfig.from_pretrained(folder)
    kept = kept_layers(count, config.num_hidden_layers)
    config.num_hidden_layers = count
    if config.model_type == "gemma3_text":
        config.layer_types = gemma_layer_types(count)
    elif getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    new = {old: place for place, old in enumerate(kept)}
    weights = {}
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    for file in sorted(folder / name for name in names):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                layer = _LAYER.match(name)
                if layer is None or int(layer[2]) in new:
                    place = name if layer is None else f"{layer[1]}{new[int(layer[2])]}{layer[3]}"
                    weights[place] = tensors.get_tensor(name).to(torch.float32)
    families: Any = AutoModelForCausalLM
    model = families.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    missing = set(model.state_dict()) - set(weights) - tied
    if missing:
        raise DistillationError(f"{folder} has no weights {min(missing)}: name a --student, or another target")
    return model
