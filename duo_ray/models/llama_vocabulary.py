"""The vocabulary of a GGUF file, as llama.cpp reads it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as ll

from duo_ray.models.llama_library import LlamaCppError, check_file, log, start_library
from duo_ray.models.tokenizer import render_chat
from duo_ray.models.vocabulary import Continuation, chat_or_none

_NO_TOKEN = -1


class LlamaVocabulary:
    """A `Vocabulary` of a loaded llama.cpp model, which must outlive it."""

    def __init__(self, model: Any) -> None:
        self._vocab = vocab = ll.llama_model_get_vocab(model)
        self._buffer = ctypes.create_string_buffer(64)
        self.size: int = ll.llama_vocab_n_tokens(vocab)
        bos: int = ll.llama_vocab_bos(vocab)
        self.bos = bos if ll.llama_vocab_get_add_bos(vocab) and bos != _NO_TOKEN else None
        usual: int = ll.llama_vocab_eos(vocab)
        ends = [token for token in range(self.size) if ll.llama_vocab_is_eog(vocab, token)]
        self.ends = tuple(sorted(ends, key=lambda token: (token != usual, token)))
        template = ll.llama_model_chat_template(model, None)
        self._template: str | None = template.decode() if template else None
        self._special_texts = {
            name: self.piece(token).decode(errors="replace")
            for name, token in (("bos_token", bos), ("eos_token", usual))
            if token != _NO_TOKEN
        }

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[LlamaVocabulary]:
        """The vocabulary of a file whose weights are not loaded.

        Raises:
            LlamaCppError: no such file, or no GGUF that llama.cpp reads.
        """
        check_file(path)
        start_library()
        log.clear()
        params = ll.llama_model_default_params()
        params.vocab_only = True
        model = ll.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise LlamaCppError(f"cannot read the vocabulary of {path}: {log.quote()}")
        try:
            yield cls(model)
        finally:
            ll.llama_model_free(model)

    def piece(self, token: int) -> bytes:
        """See `Vocabulary.piece`."""
        if not 0 <= token < self.size or ll.llama_vocab_get_attr(self._vocab, token) & ll.LLAMA_TOKEN_ATTR_UNUSED:
            return b""
        buffer = self._buffer
        length: int = ll.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if length < 0:
            self._buffer = buffer = ctypes.create_string_buffer(-length)
            length = ll.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return bytes(buffer.raw[:length])

    def is_special(self, token: int) -> bool:
        """See `Vocabulary.is_special`."""
        kinds = ll.LLAMA_TOKEN_ATTR_CONTROL | ll.LLAMA_TOKEN_ATTR_UNKNOWN
        return bool(ll.llama_vocab_get_attr(self._vocab, token) & kinds)

    def opening(self, text: str) -> list[int]:
        """See `Vocabulary.opening`."""
        return self._encode(text, parse_special=False)

    @cached_property
    def drops_first_space(self) -> bool:
        """See `Vocabulary.drops_first_space`."""
        return b"".join(self.piece(token) for token in self.opening("a")) == b" a"

    @cached_property
    def continuation(self) -> Continuation:
        """See `Vocabulary.continuation`."""
        return Continuation(self.opening, self.piece)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """See `Vocabulary.chat`."""
        return None if self._template is None else chat_or_none(self._render, messages)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids = self._encode(render_chat(self._template or "", messages, self._special_texts), parse_special=True)
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]

    @cached_property
    def _lacks_bytes(self) -> bool:
        """Whether there is text that this vocabulary cannot spell and llama.cpp ends the process over."""
        kinds = (ll.llama_vocab_get_attr(self._vocab, token) for token in range(self.size))
        is_spm: bool = ll.llama_vocab_type(self._vocab) == ll.LLAMA_VOCAB_TYPE_SPM
        return is_spm and sum(bool(kind & ll.LLAMA_TOKEN_ATTR_BYTE) for kind in kinds) < 256

    def _encode(self, text: str, *, parse_special: bool) -> list[int]:
        if self._lacks_bytes:
            raise LlamaCppError(
                "the draft's sentencepiece vocabulary lacks byte tokens, so not every text can be encoded for it: "
                "choose another draft, or one with the target's vocabulary"
            )
        raw = text.encode()
        tokens = (ll.llama_token * (len(raw) + 2))()
        count: int = ll.llama_tokenize(self._vocab, raw, len(raw), tokens, len(tokens), False, parse_special)
        if count < 0:
            raise LlamaCppError(f"llama.cpp makes {-count} tokens of {len(raw)} bytes: {text[:40]!r}")
        return list(tokens[:count])
