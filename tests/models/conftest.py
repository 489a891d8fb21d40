"""A tiny draft and its plain llama.cpp."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from duo_ray.models.llama_cpp import LlamaCppDraft
from tests.models.drafting import CONTEXT, VOCAB, Reference
from tests.models.tiny_gguf import write_tiny_llama


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", vocab_size=VOCAB, context=CONTEXT, scale=2.0)


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Iterator[Reference]:
    reference = Reference(tiny_path)
    yield reference
    reference.close()


@pytest.fixture
def draft(tiny_path: Path) -> Iterator[LlamaCppDraft]:
    draft = LlamaCppDraft.load(tiny_path, threads=1, max_context=CONTEXT, slots=4, max_sequences=8, keep=VOCAB)
    yield draft
    draft.close()
