"""Which engine a target gets, and what a user reads who asks for what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duo_ray.actors import choose
from duo_ray.actors.choose import choose_engine, choose_layout, gpu_layers
from duo_ray.config import ConfigError, load_config
from duo_ray.hardware.machine import Machine, detect_machine
from duo_ray.hardware.placement import Plan, Share
from duo_ray.types import DuoRayError
from tests.models.tiny_gguf import write_tiny_llama

CPU = Plan("cpu", 0, Share(1, 1, (0,)), ())
GPU = Plan("cuda:0", 1, Share(1, None, (0,)), ())
MACHINE = detect_machine()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(write_tiny_llama(tmp_path / "tiny.gguf"))


def choice(model: str, plan: Plan = CPU, machine: Machine = MACHINE, **target: Any) -> tuple[str, list[str]]:
    notes: list[str] = []
    settings = {"models.target.model": model, **{f"models.target.{name}": value for name, value in target.items()}}
    return choose_engine(load_config(None, settings), plan, machine, notes, lambda _text, _share: None), notes


@pytest.mark.parametrize(("seconds", "engine"), [((0.1, 0.2), "llama_cpp"), ((0.2, 0.1), "transformers")])
def test_the_faster_engine_is_chosen_measured_once_and_said(
    model: str, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], engine: str
) -> None:
    calls: list[Path] = []

    def measure(path: Path, *_: object) -> float:
        calls.append(path)
        return seconds[1]

    monkeypatch.setattr(choose, "transformers_seconds", measure)
    monkeypatch.setattr(choose, "layout_seconds", lambda *_, **__: {"plain": 9.0, "repacked": seconds[0]})
    for _ in range(2):
        chosen, [note] = choice(model)
        assert chosen == engine
        assert f"engine: {engine}, the faster one here" in note
        assert "llama_cpp" in note
        assert "transformers" in note
    assert calls == [Path(model)]


def test_a_model_that_one_engine_cannot_run_gets_the_other(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "transformers_seconds", lambda *_: None)
    monkeypatch.setattr(choose, "layout_seconds", lambda *_, **__: {"plain": 9.0})
    chosen, [note] = choice(model)
    assert chosen == "llama_cpp"
    assert "the one that runs this model" in note


def test_a_model_for_neither_engine_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "transformers_seconds", lambda *_: None)
    monkeypatch.setattr(choose, "layout_seconds", lambda *_, **__: {})
    with pytest.raises(DuoRayError, match=r"tiny\.gguf runs neither in llama\.cpp nor"):
        choice(model)


@pytest.mark.parametrize(("seconds", "repacked"), [((0.1, 0.2), False), ((0.2, 0.1), True)])
def test_the_faster_layout_is_chosen_measured_once_and_said(
    model: str, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], repacked: bool
) -> None:
    calls: list[Path] = []

    def measure(path: Path, *_: object, **__: object) -> dict[str, float]:
        calls.append(path)
        return dict(zip(("plain", "repacked"), seconds, strict=True))

    monkeypatch.setattr(choose, "layout_seconds", measure)
    for _ in range(2):
        notes: list[str] = []
        assert choose_layout(Path(model), CPU, MACHINE, notes, lambda _text, _share: None) is repacked
        assert ("repacked, the faster" in notes[0]) is repacked
    assert calls == [Path(model)]
    assert not choose_layout(Path(model), GPU, MACHINE, [], lambda _text, _share: None)


def test_weights_with_one_layout_are_left_as_they_are(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "layout_seconds", lambda *_, **__: {"plain": 9.0})
    notes: list[str] = []
    assert not choose_layout(Path(model), CPU, MACHINE, notes, lambda _text, _share: None)
    assert notes == []


def test_nothing_is_measured_where_there_is_no_choice(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object, **__: object) -> dict[str, float]:
        raise DuoRayError("measured")

    monkeypatch.setattr(choose, "transformers_seconds", measure)
    monkeypatch.setattr(choose, "layout_seconds", measure)
    assert choice(model, engine="llama_cpp") == ("llama_cpp", [])
    assert choice(model, engine="transformers") == ("transformers", [])
    assert choice("demo") == ("transformers", [])
    assert choice(model, GPU) == ("transformers", [])
    assert choice(model, precision="bf16") == ("transformers", [])
    assert choice("org/name") == ("transformers", [])
    assert choice(model, Plan("cpu", 0, Share(1, 1), ())) == ("transformers", [])


@pytest.mark.parametrize(
    ("plan", "target", "message"),
    [
        (CPU, {"engine": "llama_cpp", "precision": "bf16"}, r"target\.precision is bf16, but .*engine is llama_cpp"),
        (CPU, {"n_gpu_layers": 8}, "n_gpu_layers is 8, but the target runs on the CPU"),
        (CPU, {"engine": "transformers", "quantization": "gguf"}, "gguf, but .* unpacks .*: remove one of them"),
        (CPU, {"precision": "bf16", "quantization": "gguf"}, r"target\.precision is bf16, but .*engine is llama_cpp"),
        (
            GPU,
            {"quantization": "gguf"},
            "llama_cpp on cuda:0, but llama-cpp-python was built without a GPU: CMAKE_ARGS",
        ),
        (GPU, {"engine": "llama_cpp"}, "llama_cpp on cuda:0, but llama-cpp-python was built without a GPU: CMAKE_ARGS"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    model: str, plan: Plan, target: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_supports_gpu_offload", lambda: False)
    with pytest.raises(ConfigError, match=message):
        choice(model, plan, **target)


def test_packed_weights_are_computed_with_by_llama_cpp(model: str) -> None:
    for engine in ("auto", "llama_cpp"):
        assert choice(model, engine=engine, quantization="gguf") == ("llama_cpp", [])
    assert choice("demo", quantization="gguf") == ("llama_cpp", [])
    with pytest.raises(ConfigError, match=r"gguf, but models\.target\.model org/name is no \.gguf file"):
        choice("org/name", quantization="gguf")


def test_what_would_not_fit_unpacked_stays_packed(model: str) -> None:
    chosen, [note] = choice(model, machine=replace(MACHINE, memory_available=1000))
    assert chosen == "llama_cpp"
    assert "unpacking the weights for transformers would take" in note


def test_layers_go_to_the_gpu_the_target_runs_on(model: str) -> None:
    def layers(plan: Plan, asked: object) -> int:
        return gpu_layers(load_config(None, {"models.target.n_gpu_layers": asked}), plan)

    assert (layers(CPU, "auto"), layers(GPU, 20), layers(GPU, 0)) == (0, 20, 0)
    assert layers(GPU, "auto") > 1000
