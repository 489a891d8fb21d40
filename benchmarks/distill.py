"""A draft cut from the demo target: acceptance, T_draft and speed-up before and after its training.

    python -m benchmarks.distill [--minutes 40] [--layers 6] [--out distilled] [--tokens 64] [--resume]

The draft is made by `duo-ray distill` in the minutes given, all in. Then, beside that time, the untrained student is
written in the same weight type, T_draft of both and of the demo's own Q4_1 draft are measured in turn on one core, and
the pipeline answers prompts that nothing was trained on by the target alone and with either student, interleaved.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.concurrency import TOPICS
from benchmarks.drafts import demo_draft
from benchmarks.pipeline import measure, speed
from benchmarks.tasks import TASKS, read_tasks
from duo_ray.config import load_config
from duo_ray.distillation.gguf_file import write_gguf
from duo_ray.distillation.workspace import Workspace
from duo_ray.hardware.machine import detect_machine
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.llama_library import quantize
from duo_ray.session import Answer, Duo

FORMS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What should one know about {}?",
    "List five facts about {}, one per line.",
    "Translate to French: Yesterday we talked about {} until midnight.",
    "Write a short poem about {}.",
    "Give me step-by-step instructions that have to do with {}.",
    "Write an email to a friend who likes {}.",
    "Which questions would you ask an expert on {}?",
    "Describe {} in two sentences.",
    "Write a Python function whose docstring mentions {}.",
    "Why do people care about {}?",
)
MORE_TOPICS = (
    "volcanoes", "the moon", "money", "football", "photography", "honey", "bridges", "sleep", "maps", "glass", "tea",
    "dinosaurs", "electricity", "a garden", "the desert",
)  # fmt: skip
TESTED = 8
_STEPS, _ROUNDS = 24, 5


def write_prompts(path: Path) -> tuple[list[str], list[str]]:
    """Write prompts of the seven tasks and of all forms and topics, mixed; returns those written and others."""
    texts = [prompt.turns[0] for prompt in read_tasks(list(TASKS), None, None, 0)]
    texts += [form.format(topic) for form, topic in product(FORMS, (*TOPICS, *MORE_TOPICS))]
    random.Random(0).shuffle(texts)
    tested, asked = texts[:TESTED], texts[TESTED:]
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in asked), encoding="utf-8")
    return asked, tested


def run(out: Path, minutes: float, layers: int, tokens: int, resume: bool) -> dict[str, Any]:
    out.parent.mkdir(parents=True, exist_ok=True)
    prompts = out.with_name(f"{out.name}.prompts.jsonl")
    asked, tested = write_prompts(prompts)
    started = time.perf_counter()
    command = ["distill", "--prompts", str(prompts), "--out", str(out), "--minutes", str(minutes)]
    command += ["--layers", str(layers), "--json", *(["--resume"] if resume else [])]
    program = str(Path(sys.executable).with_name("duo-ray"))
    done = subprocess.run([program, *command], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    best = next(each for each in found["drafts"] if each["file"] == found["best"])
    drafts = {"before": untrained(out, best["quant"]), "after": out / best["file"]}
    training = found["training"]
    machine = detect_machine()
    return {
        "when": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": machine.cpu, "cores": len(machine.cores)},
        "minutes": {"asked": minutes, "taken": (time.perf_counter() - started) / 60},
        "prompts": len(asked),
        "expected_acceptance": {when: training[when] for when in ("before", "after")},
        "t_draft": draft_times({**drafts, "demo Q4_1": demo_draft()}),
        "speedup": speedups(drafts, tested, tokens),
        **found,
    }


def untrained(out: Path, quant: str) -> Path:
    """The student as it was cut, in the weight type of the best draft."""
    workspace = Workspace(out)
    finest, path = workspace.work / "untrained-F32.gguf", workspace.work / f"untrained-{quant}.gguf"
    write_gguf(workspace.student, demo_draft(), finest, "untrained")
    path.unlink(missing_ok=True)
    quantize(finest, path, quant, 0)
    return path


def draft_times(paths: dict[str, Path]) -> dict[str, float]:
    """T_draft of each on one core, in turn, median of the rounds, seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(_ROUNDS):
        for name, path in paths.items():
            with closing(LlamaCppDraft.load(path, threads=1, max_context=256, slots=1, max_sequences=1)) as draft:
                seconds[name].append(statistics.median(each for _, each in draft.warm_up(_STEPS)))
    return {name: statistics.median(each) for name, each in seconds.items()}


def speedups(drafts: dict[str, Path], prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    """Tokens per second with each draft by the target's alone: median, least and most of the prompts."""
    rows: dict[str, Any] = {}
    for name, path in drafts.items():
        ratios = []
        with Duo(load_config(None, {"models.draft.model": str(path)})) as duo:
            measure(duo, "Hello!", 24)
            for number, prompt in enumerate(track(prompts, name)):
                answers: dict[bool, list[Answer]] = {True: [], False: []}
                for draft in (True, False, False, True) if number % 2 else (False, True, True, False):
                    answers[draft].append(measure(duo, prompt, tokens, draft=draft))
                ratios.append(speed(answers[True]) / speed(answers[False]))
        rows[name] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("distilled"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    results = run(options.out, options.minutes, options.layers, options.tokens, options.resume)
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    acceptance, times, gains = (results[name] for name in ("expected_acceptance", "t_draft", "speedup"))
    before, after = acceptance["before"], acceptance["after"]
    for name in ("acceptance", "greedy"):
        print(f"{name}: {before[name]:.3f} before, {after[name]:.3f} after")
    own, demo = times["after"], times["demo Q4_1"]
    print(f"T_draft: {1000 * own:.1f} ms, {own / demo:.2f} of the Q4_1 draft's {1000 * demo:.1f}")
    for name, gain in gains.items():
        print(f"speed-up {name}: {gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})")


if __name__ == "__main__":
    main()
