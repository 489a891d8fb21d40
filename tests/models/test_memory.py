"""What is said before loading is what loading takes, and what does not fit is refused with what would."""

from __future__ import annotations

from pathlib import Path

import pytest

from duo_ray.config import ConfigError
from duo_ray.models.gguf_header import read_gguf
from duo_ray.models.llama_cpp_target import LlamaCppTarget
from duo_ray.models.memory import ModelMemory, check_memory, directory_memory, gguf_memory
from duo_ray.models.transformers import TransformersTarget
from tests.models.tiny_gguf import HEAD_SIZE, HEADS, LAYERS, write_tiny_llama
from tests.models.tiny_transformers import tiny_model

GIB = 2**30


def test_a_gguf_files_weights_and_cache_are_counted_from_its_header(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    memory = gguf_memory(read_gguf(path), tokens=128, slots=3)
    # layers x (K and V) x kv heads x head size x float16
    assert memory.per_token == LAYERS * 2 * (HEADS // 2) * HEAD_SIZE * 2
    assert memory.cache == memory.per_token * 128 * 3
    assert memory.weights == 4 * memory.parameters


@pytest.mark.models
def test_what_llama_cpp_takes_is_what_was_said(demo_gguf: Path) -> None:
    said = gguf_memory(read_gguf(demo_gguf), tokens=1024, slots=2).total
    target = LlamaCppTarget.load(demo_gguf, threads=1, max_context=1024, slots=2)
    taken = target.memory_bytes()
    target.close()
    assert said == pytest.approx(taken, rel=0.25)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3-window"])
def test_what_transformers_takes_is_what_was_said(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    target = TransformersTarget(model, slots=3, max_context=120)
    said = directory_memory(tmp_path, "float32", tokens=120, slots=3, packed=True)
    assert said.total == pytest.approx(target.memory_bytes(), rel=0.25)


def test_what_fits_passes() -> None:
    check_memory({"target": ModelMemory(GIB, 1024, 4096, 8, 10**9)}, 2 * GIB, "memory")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            ModelMemory(GIB, 2**18, 4096, 8, 10**9),
            r"9\.00 GiB are needed, but 4\.00 GiB of memory are .*max_seq_len: 1024 or models\.target\.slots: 3 would",
        ),
        (ModelMemory(4 * GIB - 2**24, 2**18, 256, 8, 8 * 10**9), r"the target as a Q3_K_M \.gguf file"),
        (
            ModelMemory(16 * GIB, 2**18, 4096, 8, 6 * 10**9),
            r"the target as a Q4_K_M \.gguf file \(3\.42 GiB\) would fit",
        ),
        (ModelMemory(140 * GIB, 2**18, 4096, 8, 70 * 10**9), "no quantisation of this target would fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(memory: ModelMemory, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_memory({"target": memory}, 4 * GIB, "memory")
