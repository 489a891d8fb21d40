"""What a .gguf file says about itself, read in a twentieth of a second.

`gguf.GGUFReader` builds an array for every token of the vocabulary, which takes 2.6 s for 49k tokens; here string
arrays are stepped over and only counted. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from duo_ray.config import QUANT_TYPES
from duo_ray.types import DuoRayError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(DuoRayError):
    """Not a GGUF file, or a damaged one."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    elements: int
    type: int
    """ggml's number of the tensor's type."""

    @property
    def size(self) -> int:
        """Size in the file; 0 for a type newer than the gguf library."""
        return _bytes(self.elements, self.type)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensor list of a .gguf file."""

    path: Path
    metadata: Mapping[str, Any]
    """Scalars and strings as they are; of an array only its length."""
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    @property
    def context_length(self) -> int | None:
        """Tokens the model was trained for; None where the file does not say."""
        length = self.metadata.get(f"{self.architecture}.context_length")
        return length if isinstance(length, int) else None

    @property
    def vocab_size(self) -> int | None:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens if isinstance(tokens, int) else None

    @property
    def quant(self) -> str | None:
        """llama.cpp's name of the quantisation (Q4_1); None where the file does not say."""
        number = self.metadata.get("general.file_type")
        return next((name for name, value in QUANT_TYPES.items() if value == number), None)

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)


def read_gguf(path: Path) -> GgufHeader:
    """Read the header and check that the file is as long as it says.

    Raises:
        GgufError: no such file, not a GGUF, of an unknown version, or cut off.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise GgufError(f"{path} cannot be read as a .gguf file: {error}") from None
    except struct.error:
        raise GgufError(f"{path} is cut off in its header: copy or download it again") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise GgufError(f"{self._path} is not a GGUF file: it starts with {self._data[:4]!r}")
        self._at = 4
        version, tensor_count, entry_count = self._take("IQQ")
        if version not in (2, 3):
            raise GgufError(
                f"{self._path} is GGUF version {version}; 2 and 3 (little-endian) can be read: convert it again"
            )
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._take("I")[0])
        tensors, end = [], 0
        for _ in range(tensor_count):
            name = self._string()
            elements = math.prod(self._take(f"{self._take('I')[0]}Q"))
            kind, offset = self._take("IQ")
            tensors.append(GgufTensor(name, elements, kind))
            end = max(end, offset + _bytes(elements, kind))
        alignment = metadata.get("general.alignment", 32)
        needed = -(-self._at // alignment) * alignment + end
        if needed > len(self._data):
            raise GgufError(
                f"{self._path} is cut off: {len(self._data):,} of {needed:,} bytes; copy or download it again"
            )
        return GgufHeader(self._path, MappingProxyType(metadata), tuple(tensors))

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        if self._at + length > len(self._data):
            raise struct.error
        text = self._data[self._at : self._at + length].decode("utf-8", errors="replace")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise GgufError(f"{self._path} is damaged: metadata of the unknown type {kind}")
        inner, count = self._take("IQ")
        if inner in _SCALARS:
            self._at += count * struct.calcsize(f"<{_SCALARS[inner]}")
        elif inner == _STRING:
            length = struct.Struct("<Q").unpack_from
            for _ in range(count):
                self._at += 8 + length(self._data, self._at)[0]
        else:
            for _ in range(count):
                self._value(inner)
        return count


def _bytes(elements: int, kind: int) -> int:
    """Size of a tensor; 0 for a type newer than the gguf library."""
    from gguf.constants import GGML_QUANT_SIZES  # noqa: PLC0415 (0.2 s)

    block, size = GGML_QUANT_SIZES.get(kind, (1, 0))
    return int(elements // block * size)
