"""Prompts of the seven tasks, in Spec-Bench's JSONL form or HumanEval's."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duo_ray.types import DuoRayError

OWN_PROMPTS = Path(__file__).parent / "prompts"

TASKS: dict[str, tuple[str, ...]] = {
    "dialogue": ("dialogue", "mt_bench"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math": ("math", "math_reasoning"),
    "rag": ("rag",),
    "code": ("code", "humaneval"),
}
"""Tasks of the DuoDecoding paper (arXiv 2503.00784) and the names their files go by."""

_COMPLETE = "Complete this Python function. Answer with code only.\n\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, or a conversation: what the user says turn by turn."""

    task: str
    id: str
    turns: tuple[str, ...]


def read_tasks(names: Sequence[str], directory: Path | None, count: int | None, seed: int) -> list[Prompt]:
    """Prompts of these tasks, `count` of each drawn at random by `seed` (None: all), in the order of the tasks.

    Args:
        directory: where the .jsonl files are; None: the project's own.

    Raises:
        DuoRayError: an unknown task, no file for one, or a line that is no prompt, by its number.
    """
    prompts: list[Prompt] = []
    for name in names:
        if name not in TASKS:
            raise DuoRayError(f"no task {name!r}; there are {', '.join(TASKS)}, or all")
        found = read_file(_file(name, directory or OWN_PROMPTS), name)
        if count is not None and count < len(found):
            order = random.Random(f"{seed} {name}").sample(range(len(found)), len(found))
            found = [found[i] for i in sorted(order[:count])]  # those of a smaller count are among them
        prompts += found
    return prompts


def _file(task: str, directory: Path) -> Path:
    candidates = [directory / f"{name}.jsonl" for name in TASKS[task]]
    for path in candidates:
        if path.is_file():
            return path
    raise DuoRayError(f"{directory} has no {' or '.join(path.name for path in candidates)} for the task {task}")


def read_file(path: Path, task: str) -> list[Prompt]:
    """All prompts of one file: a JSON object a line, `turns` (a list of texts) or HumanEval's `prompt`.

    Raises:
        DuoRayError: the file cannot be read or is empty, or a line is no prompt or repeats an id, by its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON texts may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise DuoRayError(f"{path}: cannot be read: {error}") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse(line, task, f"{path.name}, line {number}")
        if prompt.id in prompts:
            raise DuoRayError(f"{path.name}, line {number}: id {prompt.id} was there before")
        prompts[prompt.id] = prompt
    if not prompts:
        raise DuoRayError(f'{path} has no prompts: one JSON object a line, {{"question_id": 1, "turns": ["..."]}}')
    return list(prompts.values())


def _parse(line: str, task: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise DuoRayError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, Mapping):
        raise DuoRayError(f"{where}: a JSON object is needed, this is a {type(entry).__name__}")
    name = entry.get("question_id", entry.get("task_id"))
    if not isinstance(name, str | int):
        raise DuoRayError(f"{where}: needs `question_id` or `task_id`")
    turns = entry.get("turns")
    if turns is None and isinstance(entry.get("prompt"), str):
        turns = [_COMPLETE + entry["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DuoRayError(f"{where}: needs `turns` (a list of texts, none empty) or `prompt` (a text)")
    return Prompt(task, str(name), tuple(turns))
