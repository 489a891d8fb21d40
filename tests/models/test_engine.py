"""Both engines are really timed on the file, without converting it."""

from pathlib import Path

import pytest

from duo_ray.models.catalog import cache_directory
from duo_ray.models.engine import engine_seconds
from duo_ray.types import DuoRayError
from tests.models.tiny_gguf import write_tiny_llama, write_tiny_mamba


def test_both_engines_are_timed_and_nothing_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_tiny_llama(tmp_path / "tiny.gguf", any_text=True, vocab_size=400)
    seconds = engine_seconds(path, (), 1, ("float32",))
    assert set(seconds) == {"llama_cpp", "transformers"}
    assert min(seconds.values()) > 0
    assert not (cache_directory() / "targets").exists()


def test_a_model_for_neither_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DuoRayError, match=r"mamba\.gguf runs neither in llama\.cpp nor"):
        engine_seconds(write_tiny_mamba(tmp_path / "mamba.gguf"), (), 1, ("float32",))
