"""Turn a .gguf file into a directory that transformers loads: `python -m duo_ray.models.convert SOURCE DIRECTORY`.

With `--tokenizer-only` behind it, the weights stay where they are.

It runs as a process of its own: torch and several copies of the weights leave memory with it, and what the libraries
print stays out of the caller's terminal. Standard output is one JSON object a line: {"stage": ..., "fraction": ...} or
{"error": ...}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_gguf_pytorch_utils as reader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from duo_ray.models.gguf_header import GgufHeader, read_gguf

_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""llama.cpp's pre-tokenizers (src/llama-vocab.cpp) that take digits one by one before GPT-2's rule; transformers' GGUF
reader applies only that rule."""


def convert(source: Path, directory: Path) -> None:
    """Write weights (float32, or bfloat16 where that loses nothing), configuration and tokenizer of `source`."""
    _report("reading", 0.0)
    _report_tensors()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    if all(torch.equal(weight, weight.bfloat16().float()) for weight in model.parameters()):
        model.bfloat16()
    header = read_gguf(source)
    model.generation_config.eos_token_id = _ends(header)
    _report("writing weights", 0.8)
    model.save_pretrained(directory)
    _write_tokenizer(header, directory)
    _report("done", 1.0)


def convert_tokenizer(source: Path, directory: Path) -> None:
    """Write only the tokenizer of `source`, and which of its tokens end an answer."""
    _report("reading", 0.0)
    header = read_gguf(source)
    generation: Any = GenerationConfig
    generation(eos_token_id=_ends(header)).save_pretrained(directory)
    _write_tokenizer(header, directory)
    _report("done", 1.0)


def _ends(header: GgufHeader) -> list[int] | None:
    ends = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in ends if token is not None)) or None


def _write_tokenizer(header: GgufHeader, directory: Path) -> None:
    _report("writing tokenizer", 0.85)
    source = header.path
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if header.metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(directory)


def _report(stage: str, fraction: float) -> None:
    print(json.dumps({"stage": stage, "fraction": round(fraction, 3)}), flush=True)


def _report_tensors() -> None:
    """Send transformers' progress bar over the tensors of the file to `_report`; it offers no callback."""

    def bar(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        listed = list(tensors)
        for i, tensor in enumerate(listed):
            _report("dequantising", 0.5 + 0.3 * i / len(listed))
            yield tensor

    vars(reader)["tqdm"] = bar


def main() -> int:
    try:
        write = convert_tokenizer if "--tokenizer-only" in sys.argv[3:] else convert
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # whatever the libraries raise: the caller shows it in one line
        print(json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
