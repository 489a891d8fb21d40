"""The figures of README.md: drafts of three qualities against the target alone, interleaved in one run.

    python -m benchmarks.pipeline [--tokens 128] [--prompts 10] [--out results.json]

Two baselines: the target alone on the cores it has in the pipeline (what a user with a GPU sees) and the target alone
on all cores of the machine (what a user without one would do). For every prompt they answer in turn, there and back
(A B C C B A), so that drift of the machine's speed hits all alike. No answer finds its prompt in a cache, only the
words that all chats begin with, which are there from the start. EOS is ignored, so that every answer has the same
length. One first token more or less late says little, so short answers are asked for besides, only for theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from rich.progress import track

from benchmarks.drafts import demo_draft, poor_draft, random_draft
from duo_ray.actors.launch import start_local
from duo_ray.config import load_config
from duo_ray.hardware.machine import detect_machine
from duo_ray.session import Answer, Duo

PROMPTS = (
    "Explain gravity to a child.",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "Translate to French: The weather is nice today and we are going to the park with our friends.",
    "What are the three laws of thermodynamics?",
    "Write a short story about a lighthouse keeper.",
    "Give step-by-step instructions for changing a bicycle tire.",
    "Summarise the history of the Roman Empire in a paragraph.",
    "A train travels 120 km in 2 hours. How far does it travel in 5 hours? Think step by step.",
    "List ten healthy breakfast ideas with one sentence each.",
    "Who was Marie Curie and why is she famous?",
)


SHORT, SHORT_TURNS = 3, 3
"""Tokens of the answers that are asked for only to time their first one, and how often there and back."""


def measure(duo: Duo, prompt: str, tokens: int, **options: Any) -> Answer:
    return duo.generate(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True, **options)


def forget(duo: Duo) -> None:
    """Push out what the caches of target and draft keep of earlier prompts, but for the words all chats begin with."""
    for number in range(duo.prepared.config.models.target.slots):
        duo.generate(f"{number}: nothing", max_tokens=3, draft_budget=1, ignore_eos=True)  # the draft is asked, too


def speed(answers: Sequence[Answer]) -> float:
    """Tokens per second from a request's arrival to its last token, over all the answers."""
    return sum(answer.completion_tokens for answer in answers) / sum(map(seconds, answers))


def seconds(answer: Answer) -> float:
    """From the request's arrival to its last token."""
    stats: dict[str, Any] = answer.stats
    return float((answer.completion_tokens - 1) / stats["tokens_per_s"] + stats["ttft_ms"] / 1000)


def first_token(answers: Sequence[Answer]) -> float:
    """Mean time to the first token, ms."""
    stats: list[dict[str, Any]] = [answer.stats for answer in answers]
    return statistics.fmean(each["ttft_ms"] for each in stats)


def short_answers(
    ways: dict[str, Callable[[str, int], Answer]], forget_all: Callable[[], None], prompt: str
) -> dict[str, list[Answer]]:
    """Answers of a few tokens, there and back; the draft reads the prompt beside the target."""
    answers: dict[str, list[Answer]] = {way: [] for way in ways}
    for _ in range(SHORT_TURNS):
        for way in (*ways, *reversed(ways)):
            forget_all()
            answers[way].append(ways[way](prompt, SHORT))
    return answers


def run(tokens: int, prompts: Sequence[str], settings: dict[str, object]) -> dict[str, Any]:
    drafts = {"demo": demo_draft(), "Q2_K": poor_draft(), "random": random_draft()}
    with contextlib.ExitStack() as stack:
        start_local([{"CPU": 16, "draft_cpu": 8}])
        stack.callback(ray.shutdown)
        rows = {
            name: measure_draft(name, path, tokens, prompts, settings, all_cores=name == "demo")
            for name, path in drafts.items()
        }
    machine = detect_machine()
    first = rows["demo"][0]
    return {
        "when": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": machine.cpu, "cores": len(machine.cores), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("ray", "torch", "transformers", "llama-cpp-python")},
        "target": first["target"],
        "settings": settings,
        "tokens": tokens,
        "prompts": len(prompts),
        "summary": {name: summary(rows[name]) for name in drafts},
        "rows": rows,
    }


def measure_draft(
    name: str, path: Path, tokens: int, prompts: Sequence[str], settings: dict[str, object], *, all_cores: bool
) -> list[dict[str, Any]]:
    """Every prompt with this draft and by the target alone, in turns; `all_cores`: on all cores alone, too."""
    rows = []
    with contextlib.ExitStack() as stack:
        duo = stack.enter_context(Duo(load_config(None, {**settings, "models.draft.model": str(path)})))
        pipelines = {"alone": duo, "duo": duo}
        if all_cores:
            everything = stack.enter_context(Duo(load_config(None, {**settings, "models.draft.model": None})))
            pipelines = {"alone": duo, "all_cores": everything, "duo": duo}
        ways = {way: partial(measure, each, draft=way != "alone") for way, each in pipelines.items()}
        for ask in ways.values():  # every process has run once
            ask("Hello!", 24)
        for number, prompt in enumerate(track(prompts, name)):
            order = list(ways) if number % 2 else list(reversed(ways))
            answers: dict[str, list[Answer]] = {way: [] for way in ways}
            for way in (*order, *reversed(order)):
                forget(pipelines[way])
                answers[way].append(ways[way](prompt, tokens))
            judged: dict[str, Callable[[str, int], Answer]] = {way: ways[way] for way in ("alone", "duo")}
            short = short_answers(judged, partial(forget, duo), prompt)
            rows.append(
                {
                    "prompt": prompt,
                    "target": {"dtype": duo.pipeline.info.target.dtype, "cores": duo.pipeline.info.target.cores},
                    "speed": {way: speed(both) for way, both in answers.items()},
                    "ttft_vs_alone": first_token(answers["duo"] + short["duo"])
                    / first_token(answers["alone"] + short["alone"]),
                    "equal": len({answer.token_ids for way in ("alone", "duo") for answer in answers[way]}) == 1,
                    **answers["duo"][-1].stats,
                }
            )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the prompts for one draft."""

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return round(statistics.median(value(row) for row in rows), 3)

    ratios = [row["speed"]["duo"] / row["speed"]["alone"] for row in rows]
    figures = {
        "vs alone": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "vs all cores": "-",
        "tokens/s": median(lambda row: row["speed"]["duo"]),
        "overhead p50 ms": median(lambda row: row["round_overhead_ms"]["p50"]),
        "both idle": median(lambda row: row["both_idle"]),
        "TTFT vs alone": median(lambda row: row["ttft_vs_alone"]),
        "accepted/step": median(lambda row: row["mean_accepted"]),
        "T_target ms": median(lambda row: row["t_target_ms"]),
        "T_draft ms": median(lambda row: row["t_draft_ms"]),
        "equal": f"{sum(row['equal'] for row in rows)}/{len(rows)}",
    }
    if "all_cores" in rows[0]["speed"]:
        figures["vs all cores"] = median(lambda row: row["speed"]["duo"] / row["speed"]["all_cores"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the built-in prompts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all pipelines")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    settings: dict[str, object] = {"models.target.slots": 2, "models.target.max_seq_len": 1024}
    settings |= dict(item.split("=", 1) for item in arguments.set)
    result = run(arguments.tokens, PROMPTS[: arguments.prompts], settings)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, default=str))
    columns = list(next(iter(result["summary"].values())))
    print("| draft | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, figures in result["summary"].items():
        print(f"| {name} | " + " | ".join(str(figures[column]) for column in columns) + " |")
    print(f"target: {result['target']}")


if __name__ == "__main__":
    main()
