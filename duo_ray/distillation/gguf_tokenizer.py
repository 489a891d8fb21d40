"""A tokenizer in a .gguf file: taken over from another file, or translated from tokenizer.json.

llama.cpp knows how text is split before byte-level merging only by name, so the splitting rule has to be recognised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFReader, SpecialVocab, TokenType

from duo_ray.distillation.workspace import DistillationError

_PER_TOKEN: dict[str, Callable[[int], Any]] = {
    "tokenizer.ggml.tokens": lambda i: f"[PAD{i}]",
    "tokenizer.ggml.scores": lambda _: -1000.0,
    "tokenizer.ggml.token_type": lambda _: int(TokenType.UNUSED),
}
"""Arrays with an entry for each id, and what stands for an id that is only padding of the embedding."""


_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 and Qwen 2 split a text, but for the digits that stay together."""
_DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}


def write_tokenizer(writer: Any, folder: Path, source: Path | None, size: int) -> None:
    """Add the tokenizer and the chat template to a `GGUFWriter`.

    Args:
        folder: with tokenizer.json and what stands beside it.
        source: a .gguf file to copy them from instead.
        size: rows of the model's embedding; ids that no token has become padding.

    Raises:
        DistillationError: a kind of tokenizer that is not known here, or more tokens than rows.
    """
    if source is not None:
        _copy(writer, source, size)
    else:
        _translate(writer, folder, size)


def _copy(writer: Any, source: Path, size: int) -> None:
    for key, field in GGUFReader(source).fields.items():
        if key.startswith("tokenizer."):
            content, kinds = field.contents(), field.types
            if key in _PER_TOKEN:
                content = _padded(key, content, size)
            writer.add_key_value(key, content, kinds[0], kinds[-1] if len(kinds) > 1 else None)


def _padded(key: str, content: Sequence[Any], size: int) -> list[Any]:
    if len(content) > size:
        raise DistillationError(f"the tokenizer has {len(content)} tokens, the student's embedding only {size} rows")
    return [*content, *(_PER_TOKEN[key](i) for i in range(len(content), size))]


def _translate(writer: Any, folder: Path, size: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = content["model"]
    if model.get("type") != "BPE":
        raise DistillationError(f"{folder}: llama.cpp's form of a {model.get('type')} tokenizer is not written here")
    sentencepiece = bool(model.get("byte_fallback"))
    entries: dict[int, tuple[str, TokenType]] = {
        i: (text, _kind(text, model) if sentencepiece else TokenType.NORMAL) for text, i in model["vocab"].items()
    }
    for added in content.get("added_tokens", ()):
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        if added["content"] == model.get("unk_token") and sentencepiece:
            kind = TokenType.UNKNOWN
        if added["id"] < size:  # Gemma 3 has one behind its embedding, for images
            entries[added["id"]] = (added["content"], kind)
    count = max(entries) + 1
    if count > size:
        raise DistillationError(f"{folder}: the tokenizer has {count} tokens, the embedding only {size} rows")
    unused = [(f"[PAD{i}]", TokenType.UNUSED) for i in range(size)]
    tokens = [entries.get(i, unused[i]) for i in range(size)]
    special = SpecialVocab(folder, load_merges=not sentencepiece, n_vocab=size)
    if sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model, [text for text, _ in tokens]))
        writer.add_add_space_prefix(_starts_with_space(content))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_splitting_rule(folder, content))
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([int(kind) for _, kind in tokens])
    special.add_to_gguf(writer, quiet=True)
    _write_end_of_turn(writer, folder, special.special_token_ids.get("eos"))


def _kind(text: str, model: Mapping[str, Any]) -> TokenType:
    if text == model.get("unk_token"):
        return TokenType.UNKNOWN
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _scores(model: Mapping[str, Any], tokens: Sequence[str]) -> list[float]:
    """llama.cpp merges the pair whose token has the best score: the later a merge stands in the list, the lower."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault("".join(pair.split(" ", 1) if isinstance(pair, str) else pair), rank)
    return [-float(ranks[text]) if text in ranks else -1e6 for text in tokens]


def _starts_with_space(content: Mapping[str, Any]) -> bool:
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return '"Prepend"' in steps or '"prepend_scheme": "first"' in steps or '"prepend_scheme": "always"' in steps


def _splitting_rule(folder: Path, content: Mapping[str, Any]) -> str:
    """llama.cpp's name of the rule that splits text before merging (`llm_load_vocab` in src/llama-vocab.cpp)."""
    rule = content.get("pre_tokenizer") or {}
    steps = rule.get("pretokenizers", [rule])
    kinds = [step.get("type") for step in steps]
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if len(patterns) == 1 and (
        name := next((n for n, digits in _DIGITS.items() if patterns[0] == _SPLIT % digits), None)
    ):
        return name
    raise DistillationError(f"{folder}: llama.cpp's name of this splitting rule is not known here: {json.dumps(rule)}")


def _write_end_of_turn(writer: Any, folder: Path, usual: int | None) -> None:
    """Chat models end a turn with another token than a text; generation_config.json lists both."""
    path = folder / "generation_config.json"
    ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    others = [token for token in (ends if isinstance(ends, list) else [ends]) if token not in (None, usual)]
    if others:
        writer.add_eot_token_id(others[0])
