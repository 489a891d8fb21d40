"""A model that transformers saved as a .gguf file of float32 weights, which llama.cpp quantises.

Names come from the gguf package's tables; what differs beside them is what llama.cpp's convert_hf_to_gguf.py does:
llama's rotary halves become pairs, Gemma's norms hold 1 + weight, scaled frequencies of Llama 3 are a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duo_ray.distillation.gguf_tokenizer import write_tokenizer
from duo_ray.distillation.workspace import DistillationError
from duo_ray.models.llama_vocabulary import LlamaVocabulary
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.vocabulary import SAMPLE, TokenizerVocabulary, compare

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "gemma3_text": "gemma3"}
"""transformers' model types that can be written, and llama.cpp's names of them."""

_GEMMA_PERIOD = 6
_ALL_F32 = 0  # gguf.LlamaFileType


def check_exportable(folder: Path) -> None:
    """Refuse a model that cannot become a .gguf file, before it is trained.

    Raises:
        DistillationError: another family, or a feature that llama.cpp lacks in this one.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise DistillationError(
            f"{folder} is a {family} model; drafts are made of {', '.join(ARCHITECTURES)}: name a --student of these "
            "with the target's vocabulary"
        )
    kinds, scaled = config.get("layer_types"), [kind for kind in _rope_types(config) if kind != "default"]
    lacking = (
        (scaled and (family, scaled) != ("llama", ["llama3"]), f"rotary positions scaled by {scaled}"),
        (config.get("quantization_config"), "quantised weights"),
        (family != "gemma3_text" and "sliding_attention" in (kinds or ()), "a sliding window"),
        (family == "gemma3_text" and kinds != gemma_layer_types(len(kinds)), "windows in other layers than Gemma 3"),
        (config.get("query_pre_attn_scalar") not in (None, config.get("head_dim")), "another attention scale"),
        (config.get("attn_logit_softcapping") or config.get("final_logit_softcapping"), "capped logits"),
    )
    for lacks, what in lacking:
        if lacks:
            raise DistillationError(
                f"{folder} has {what}, which llama.cpp's {ARCHITECTURES[family]} lacks: use another"
            )


def check_tokenizer(folder: Path, tokenizer: Path, tokenizer_gguf: Path | None) -> None:
    """Refuse a tokenizer that llama.cpp does not have, before a model with it is trained.

    Args:
        folder: the model's.
        tokenizer: folder of the tokenizer.
        tokenizer_gguf: see `write_gguf`.

    Raises:
        DistillationError: see `write_gguf`.
    """
    from gguf import GGUFWriter  # noqa: PLC0415 - 0.2 s

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with TemporaryDirectory(prefix="duo_ray-") as scratch:
        path = Path(scratch) / "vocabulary.gguf"
        writer = GGUFWriter(path, ARCHITECTURES[config["model_type"]])
        write_tokenizer(writer, tokenizer, tokenizer_gguf, config["vocab_size"])
        _finish(writer)
        _check_vocabulary(path, Tokenizer.load(tokenizer, rows=config["vocab_size"]), tokenizer)


def gemma_layer_types(count: int) -> list[str]:
    """Which layers of a Gemma 3 slide a window over the text: llama.cpp knows no other order."""
    return ["sliding_attention" if (place + 1) % _GEMMA_PERIOD else "full_attention" for place in range(count)]


def write_gguf(folder: Path, tokenizer_gguf: Path | None, path: Path, name: str) -> None:
    """Write the float32 model in `folder` to `path`, which may exist.

    Args:
        tokenizer_gguf: a file to take the tokenizer from as it is; None: the one in `folder` is translated.

    Raises:
        DistillationError: a tokenizer that llama.cpp does not have, or one that came out different.
    """
    from gguf import GGUFWriter  # noqa: PLC0415 - 0.2 s
    from transformers import AutoConfig  # noqa: PLC0415 - 2 s

    check_exportable(folder)
    config: Any = AutoConfig.from_pretrained(folder)
    part = path.with_name(f".{path.name}")
    writer = GGUFWriter(part, ARCHITECTURES[config.model_type])
    writer.add_name(name)
    writer.add_file_type(_ALL_F32)
    _write_shape(writer, config)
    write_tokenizer(writer, folder, tokenizer_gguf, config.vocab_size)
    for tensor, weights in _tensors(folder, config):
        writer.add_tensor(tensor, np.ascontiguousarray(weights, dtype=np.float32))
    _finish(writer)
    part.replace(path)
    _check_vocabulary(path, Tokenizer.load(folder, rows=config.vocab_size), folder)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_types(config: dict[str, Any]) -> list[str]:
    """Kinds of rotary positions; a Gemma 3 has two."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [each for each in found.values() if isinstance(each, dict)]
    return [each.get("rope_type", "default") for each in nested or [found]]


def _write_shape(writer: Any, config: Any) -> None:
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_freq_base(ropes["rope_theta"])


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """llama.cpp's name of every tensor, and its values as llama.cpp wants them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: PLC0415 - as above
    from safetensors import safe_open  # noqa: PLC0415 - as above

    family = config.model_type
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[family])
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                weights = tensors.get_tensor(name)
                if family == "llama" and ".self_attn.q_proj." in name:
                    weights = _halves_to_pairs(weights, config.num_attention_heads)
                if family == "llama" and ".self_attn.k_proj." in name:
                    weights = _halves_to_pairs(weights, config.num_key_value_heads)
                if family == "gemma3_text" and name.endswith("norm.weight"):
                    weights = weights + 1.0
                found = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if found is None:
                    raise DistillationError(f"llama.cpp's {ARCHITECTURES[family]} has no tensor {name}")
                yield found, weights
    if family == "llama" and config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", _frequency_factors(config)


def _halves_to_pairs(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head: transformers rotates row i with row i + size / 2, llama.cpp's llama with the next one."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def _frequency_factors(config: Any) -> NDArray[np.float32]:
    """What llama.cpp divides the plain rotary frequencies by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 - as above

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = 2 * len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, size, 2) / size)
    factors: NDArray[np.float32] = (plain / scaled.numpy()).astype(np.float32)
    return factors


def _check_vocabulary(path: Path, tokenizer: Tokenizer, folder: Path) -> None:
    ours = TokenizerVocabulary(tokenizer)
    with LlamaVocabulary.open(path) as theirs:
        report, _ = compare(ours, theirs)
        if not report.same:
            raise DistillationError(
                f"llama.cpp reads another vocabulary than that of {folder}: {report.first_difference}"
            )
        if ours.opening(SAMPLE) != theirs.opening(SAMPLE):
            raise DistillationError(f"llama.cpp splits text into other tokens than the tokenizer of {folder} does")
