"""The promise, checked: greedy output with the draft equals the target's own, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duo_ray.actors.launch import new_request_id
from duo_ray.session import Answer, Duo, Prompt
from duo_ray.types import DuoRayError, Ids, Request, Token

RESOLUTION = {
    "float32": 0.0,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "F32": 2.0**-11,
    "F16": 2.0**-11,
    "BF16": 2.0**-8,
}
"""Relative spacing of the numbers a precision can tell apart (half a unit in the last place); float32 has no excuse.
llama.cpp's types in capitals: it keeps what was read in 16 bits, whatever the weights are."""

GGUF_RESOLUTION = 2.0**-6
"""The same for quantised weights in llama.cpp, which rounds activations to 8 bits: between passes of one token and of
several the best logit of a 135M Q4_1 model moved by up to 0.42 over 96 positions."""

_WIDTHS = (1, 2, 3, 4, 5, 8, 16, 1 << 30)
"""Passes that compute the place where two answers part; the last one the whole text."""
_SHOWN = 8
"""Of so many tokens the probabilities are asked for there."""

LARGEST_LOGIT = 32.0
"""Logits of language models stay below this: two that differ by less than `RESOLUTION` of it may trade places."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, answered with the draft and by the target alone."""

    prompt: str
    verdict: str
    """equal, tie or different."""
    tokens: int
    position: int | None = None
    """First generated token that differs."""
    gap: float | None = None
    """Difference of the target's two best logits there, in the run without a draft."""
    moved: float | None = None
    """By how much that difference changes between passes of the target alone over that text; None: not looked at."""

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "verdict": self.verdict,
            "tokens": self.tokens,
            "position": self.position,
            "gap": self.gap,
            "moved": self.moved,
        }

    def describe(self) -> str:
        moved = "" if self.moved is None else f" (by themselves they move by {self.moved:.4f})"
        return (
            f"{self.verdict} at token {self.position}, where the target's two best logits are {self.gap:.4f} apart"
            f"{moved}: {self.prompt[:70]!r}"
        )


def compare(duo: Duo, prompt: Prompt, *, max_tokens: int, raw: bool = False, **options: Any) -> Comparison:
    """Answer a prompt twice, greedily, and say whether and where the answers part; options go to the drafted run."""
    common = {"temperature": 0.0, "max_tokens": max_tokens, "raw": raw, "logprobs": 2}
    drafted = duo.generate(prompt, **common, **options)
    alone = duo.generate(prompt, **common, draft=False)
    return settle(duo, prompt, drafted, alone, raw=raw)


def settle(duo: Duo, prompt: Prompt, drafted: Answer, alone: Answer, *, raw: bool = False) -> Comparison:
    """As `judge`, and where that finds more than rounding of the last layer explains, look at what rounding does here.

    Bits of a row may depend on what is computed beside it. So the target alone computes the place where the answers
    part again, in passes of several widths: where the difference of the two logits changes by as much as it is, it is a
    tie all the same.
    """
    dtype = duo.pipeline.info.target.dtype
    found = judge(str(prompt), drafted, alone, dtype)
    at = found.position
    if found.verdict != "different" or RESOLUTION.get(dtype, GGUF_RESOLUTION) == 0 or at is None:
        return found
    if at >= min(len(drafted.tokens), len(alone.tokens)):
        return found  # one of them goes on: no choice between two tokens
    request = duo.request(prompt, raw=raw, temperature=0.0, max_tokens=1, draft=False, logprobs=_SHOWN)
    text = (*request.prompt, *alone.token_ids[:at])
    rivals = alone.tokens[at].id, drafted.tokens[at].id
    gaps = [gap for width in _WIDTHS if (gap := _gap(duo, request, text, width, rivals)) is not None]
    if not gaps or found.gap is None:
        return found
    moved = max(*gaps, found.gap) - min(*gaps, found.gap)
    return replace(found, moved=moved, verdict="tie" if found.gap <= moved else "different")


def _gap(duo: Duo, request: Request, text: Ids, width: int, rivals: tuple[int, int]) -> float | None:
    """The logits' difference after a text whose last `width` ids share a pass; None where one of them is far behind."""
    whole = width >= len(text)
    for ids in (text,) if whole else (text[:-width], text):  # what comes first is found in the cache by what comes then
        asked = replace(request, request_id=new_request_id(), prompt=ids, reproducible=whole)
        answer = duo.generate(asked)
    shown = dict(answer.tokens[0].logprobs.top) if answer.tokens and answer.tokens[0].logprobs else {}
    first, second = (shown.get(token) for token in rivals)
    return None if first is None or second is None else first - second


def judge(prompt: str, drafted: Answer, alone: Answer, dtype: str) -> Comparison:
    """Compare two answers whose tokens carry the two best log probabilities each."""
    parted = _first_difference(drafted.tokens, alone.tokens)
    if parted is None:
        return Comparison(prompt, "equal", len(alone.tokens))
    top = alone.tokens[parted].logprobs if parted < len(alone.tokens) else None
    gap = top.top[0][1] - top.top[1][1] if top is not None and len(top.top) > 1 else float("inf")
    resolution = RESOLUTION.get(dtype, GGUF_RESOLUTION)
    tie = resolution > 0 and gap <= resolution * LARGEST_LOGIT
    return Comparison(prompt, "tie" if tie else "different", len(alone.tokens), parted, gap)


def _first_difference(a: Sequence[Token], b: Sequence[Token]) -> int | None:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left.id != right.id:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file, one object a line: `prompt`, `messages`, or Spec-Bench's `turns` (the first is used).

    Raises:
        DuoRayError: no such file, or a line that holds none of these, by its number.
    """
    prompts = []
    for number, line in read_lines(path):
        try:
            prompts.append(parse_prompt(line))
        except DuoRayError as error:
            raise DuoRayError(f"{path.name}, line {number}: {error}") from None
    return prompts


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers, for `parse_prompt`.

    Raises:
        DuoRayError: no such file, or no such line.
    """
    try:
        lines = path.read_bytes().split(b"\n")  # other line ends may stand within a JSON string
    except OSError as error:
        raise DuoRayError(f"{path}: {error.strerror or error}") from None
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DuoRayError(f'{path} has no prompts: write one JSON object a line, such as {{"prompt": "..."}}')
    return found


def parse_prompt(line: str | bytes) -> Prompt:
    """The prompt on one line; see `read_prompts`.

    Raises:
        DuoRayError: it holds none.
    """
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DuoRayError(f"not JSON: {error}") from None
    found = None
    if isinstance(entry, Mapping):
        turns = entry.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        found = next((value for value in (entry.get("prompt"), entry.get("messages"), first) if value), None)
    if not isinstance(found, str | list):
        raise DuoRayError("needs `prompt` (a text), `messages` (a list) or `turns` (a list of texts)")
    return found
