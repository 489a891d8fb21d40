"""llama.cpp as a library: quantising and its log."""

import ctypes
from pathlib import Path

import pytest

from duo_ray.models import llama_library as library
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.llama_library import LlamaCppError, quantize
from tests.models.drafting import PROMPT, make_job


def test_a_quantised_file_loads_and_drafts(tiny_path: Path, tmp_path: Path) -> None:
    quantize(tiny_path, tmp_path / "q8.gguf", "Q8_0", threads=1)
    assert (tmp_path / "q8.gguf").stat().st_size < tiny_path.stat().st_size // 2
    draft = LlamaCppDraft.load(tmp_path / "q8.gguf", threads=1, max_context=64)
    [(block, _)] = draft.draft([make_job(PROMPT, 4)])
    draft.close()
    assert len(block.sequences[0].ids) == 4


def test_an_unknown_weight_type_lists_the_known_ones(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match=r"unknown weight type 'Q9_X': choose one of .*F16.*Q4_K_M"):
        quantize(tiny_path, tmp_path / "q.gguf", "Q9_X", threads=1)


def test_an_existing_target_is_not_overwritten(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "q.gguf").write_bytes(b"mine")
    with pytest.raises(LlamaCppError, match=r"q\.gguf exists"):
        quantize(tiny_path, tmp_path / "q.gguf", "Q8_0", threads=1)
    assert (tmp_path / "q.gguf").read_bytes() == b"mine"


def test_a_failed_quantisation_leaves_no_file(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(tiny_path.read_bytes()[:200_000])
    with pytest.raises(LlamaCppError, match=r"cannot write .*short\.gguf as Q8_0"):
        quantize(tmp_path / "short.gguf", tmp_path / "q.gguf", "Q8_0", threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["short.gguf"]


def test_the_log_callback_survives_text_that_is_not_utf8() -> None:
    library._on_log(4, b"bad \xff byte\n", ctypes.c_void_p(0))
    assert "bad" in library.log.quote()
