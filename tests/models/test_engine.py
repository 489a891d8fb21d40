"""Both engines are really timed on the file, without converting it."""

from pathlib import Path

import pytest

from duo_ray.models import engine
from duo_ray.models.catalog import cache_directory
from duo_ray.models.engine import layout_seconds, transformers_seconds
from tests.models.tiny_gguf import write_tiny_llama, write_tiny_mamba


def test_both_engines_are_timed_and_nothing_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_tiny_llama(tmp_path / "tiny.gguf", any_text=True, vocab_size=400)
    seconds = transformers_seconds(path, (), 1, ("float32",))
    assert seconds is not None
    assert seconds > 0
    assert layout_seconds(path, (), 1)["plain"] > 0
    assert not (cache_directory() / "targets").exists()


def test_a_model_for_neither_engine_has_no_times(tmp_path: Path) -> None:
    path = write_tiny_mamba(tmp_path / "mamba.gguf")
    assert transformers_seconds(path, (), 1, ("float32",)) is None
    assert layout_seconds(path, (), 1) == {}


@pytest.mark.models
def test_weights_are_timed_in_both_layouts(demo_q4_0: Path) -> None:
    seconds = layout_seconds(demo_q4_0, (), 1)
    assert seconds.keys() == {"plain", "repacked"}
    assert min(seconds.values()) > 0


@pytest.mark.models
def test_a_layout_whose_kernels_crash_is_left_out(demo_q4_0: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_module: str, arguments: tuple[str, ...], _cores: object) -> float:
        if "repacked" in arguments:
            run_pinned("tests.models.crash", (), ())
        return 1.0

    run_pinned = engine.run_pinned
    monkeypatch.setattr(engine, "run_pinned", crash)
    assert layout_seconds(demo_q4_0, (), 1) == {"plain": 1.0}
