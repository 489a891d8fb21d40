"""What one setting may be: each check returns the value as it is kept, or says in half a sentence what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from pydantic import BeforeValidator

from duo_ray.types import DuoRayError

QUANT_TYPES: Mapping[str, int] = {
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q5_K_S": 16, "Q5_1": 9, "Q5_0": 8,
    "Q4_K_M": 15, "Q4_K_S": 14, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4_MOE": 38, "NVFP4": 39,
    "Q3_K_L": 13, "Q3_K_M": 12, "Q3_K_S": 11, "IQ3_M": 27, "IQ3_S": 26, "IQ3_XS": 22, "IQ3_XXS": 23,
    "Q2_K": 10, "Q2_K_S": 21, "IQ2_M": 29, "IQ2_S": 28, "IQ2_XS": 20, "IQ2_XXS": 19, "TQ2_0": 37, "TQ1_0": 36,
    "IQ1_M": 31, "IQ1_S": 24,
}  # fmt: skip
"""Names of llama.cpp's quantisations with the number a GGUF states as its `general.file_type`."""


class ConfigError(DuoRayError):
    """A setting that cannot work; the text is one line: where it stands, its value, what is allowed."""


def parse_cores(text: object) -> tuple[int, ...]:
    """Core list as in `taskset -c`: "0-3,8" -> (0, 1, 2, 3, 8), sorted, each core once.

    Raises:
        ValueError: not a core list.
    """
    cores: set[int] = set()
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError(f'must be auto or a core list such as "0-3,8", got {text!r}')
        low, high = int(first), int(last or first)
        if high < low or high >= 4096:
            raise ValueError(f"has a range that runs backwards or past core 4095: {part.strip()!r}")
        cores.update(range(low, high + 1))
    return tuple(sorted(cores))


def whole(low: int, high: int, *other: str | None) -> BeforeValidator:
    """A whole number in [low, high], or one of the `other` values."""

    def check(value: object) -> object:
        if value in other:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            words = "".join(f"{choice or 'null'} or " for choice in other)
            raise ValueError(f"must be {words}{low} to {high}, got {shown(value)}")
        return value

    return BeforeValidator(check)


def real(low: float, high: float) -> BeforeValidator:
    def check(value: object) -> object:
        number = math.nan
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                number = float(value)  # YAML reads 1e-3 as text
            except ValueError:
                number = math.nan
        if not low <= number <= high:
            raise ValueError(f"must be {low:g} to {high:g}, got {shown(value)}")
        return number

    return BeforeValidator(check)


def one_of(*choices: str) -> BeforeValidator:
    def check(value: object) -> object:
        if value not in choices:
            raise ValueError(f"must be {' or '.join((', '.join(choices[:-1]), choices[-1]))}, got {shown(value)}")
        return value

    return BeforeValidator(check)


def affinity_text(value: object) -> object:
    if value == "auto":
        return value
    parse_cores(value)
    return str(value)


def device(value: object) -> object:
    name = value if isinstance(value, str) else ""
    if name in ("auto", "cpu", "cuda") or (name.startswith("cuda:") and name[5:].isascii() and name[5:].isdigit()):
        return value
    raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {shown(value)}")


def draft_device(value: object) -> object:
    if value != "cpu":
        raise ValueError(f"must be cpu (the draft runs beside the target, on CPU cores), got {shown(value)}")
    return value


def device_map(value: object) -> object:
    if value is None or value == "auto":
        return value
    if isinstance(value, Mapping) and value and all(isinstance(place, int | str) for place in value.values()):
        return {str(module): place for module, place in value.items()}
    raise ValueError(f"must be null, auto or a mapping of module names to devices, got {shown(value)}")


def quant(value: object) -> object:
    if value is None:
        return None
    name = value.upper() if isinstance(value, str) else ""
    if name == "AUTO":
        return "auto"
    if name not in QUANT_TYPES:
        near = difflib.get_close_matches(name, QUANT_TYPES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: auto, {', '.join(QUANT_TYPES)}"
        raise ValueError(f"must be null, auto or a llama.cpp quantisation, got {shown(value)}; {hint}")
    return name


def draft_model(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


def stop_strings(value: object) -> object:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise ValueError(f"must be a list of texts that are not empty, got {shown(value)}")
    return tuple(strings)


def api_key(value: object) -> object:
    """An error must not repeat a key."""
    if value is None or (isinstance(value, str) and value.isascii() and value.isprintable() and value.strip()):
        return value
    raise ValueError("must be null, env:NAME or a text of printable ASCII characters")


def shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else "null" if value is None else str(value)
