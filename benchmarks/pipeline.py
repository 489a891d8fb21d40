"""The figures of README.md: drafts of three qualities against the target alone, interleaved in one run.

    python -m benchmarks.pipeline [--tokens 128] [--prompts 10] [--out results.json]

Two baselines: the target alone on the cores it has in the pipeline (what a user with a GPU sees) and the target alone
on all cores of the machine (what a user without one would do). For every prompt, each pipeline answers in turn, so that
drift of the machine's speed hits all alike. EOS is ignored, so that every answer has the same length.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from rich.progress import track

from benchmarks.drafts import demo_draft, poor_draft, random_draft
from duo_ray.actors.launch import start_local
from duo_ray.config import load_config
from duo_ray.hardware import detect_machine
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


def measure(duo: Duo, prompt: str, tokens: int, **options: Any) -> Answer:
    return duo.generate(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True, **options)


def speed(answer: Answer) -> float:
    """Tokens per second from the request's arrival to its last token."""
    stats: dict[str, Any] = answer.stats
    decode = (answer.completion_tokens - 1) / stats["tokens_per_s"]
    return answer.completion_tokens / (decode + stats["ttft_ms"] / 1000)


def run(tokens: int, count: int, settings: dict[str, object]) -> dict[str, Any]:
    drafts = {"demo": demo_draft(), "Q2_K": poor_draft(), "random": random_draft()}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        start_local([{"CPU": 16, "draft_cpu": 8}])
        stack.callback(ray.shutdown)
        everything = stack.enter_context(Duo(load_config(None, {**settings, "models.draft.model": None})))
        pipelines = {
            name: stack.enter_context(Duo(load_config(None, {**settings, "models.draft.model": str(path)})))
            for name, path in drafts.items()
        }
        demo = pipelines["demo"]
        for duo in (everything, *pipelines.values()):  # every process has run once, caches are warm
            measure(duo, "Hello!", 24)
        for prompt in track(PROMPTS[:count], "measuring"):
            alone = measure(demo, prompt, tokens, draft=False)
            row: dict[str, Any] = {"prompt": prompt, "alone": speed(alone), "alone_ttft_ms": alone.stats["ttft_ms"]}
            row["all_cores"] = speed(measure(everything, prompt, tokens))
            for name, duo in pipelines.items():
                answer = measure(duo, prompt, tokens)
                row[name] = {"speed": speed(answer), "equal": answer.token_ids == alone.token_ids, **answer.stats}
            again = measure(demo, prompt, tokens, draft=False)
            row["alone"] = statistics.mean((row["alone"], speed(again)))
            row["alone_ttft_ms"] = statistics.mean((row["alone_ttft_ms"], again.stats["ttft_ms"]))
            rows.append(row)
        info = demo.pipeline.info
    return {
        "when": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpu": detect_machine().cpu,
            "cores": len(detect_machine().cores),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ("ray", "torch", "transformers", "llama-cpp-python")},
        "target": {"dtype": info.target.dtype, "device": info.target.device, "cores": len(info.target.cores)},
        "tokens": tokens,
        "summary": {name: summary(rows, name) for name in drafts},
        "all_cores_over_alone": statistics.median(row["all_cores"] / row["alone"] for row in rows),
        "rows": rows,
    }


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Medians over the prompts for one draft."""

    def median(value: Any) -> float:
        return round(statistics.median(value(row) for row in rows), 3)

    ratios = [row[name]["speed"] / row["alone"] for row in rows]
    return {
        "vs_alone": round(statistics.median(ratios), 3),
        "vs_alone_min": round(min(ratios), 3),
        "vs_alone_max": round(max(ratios), 3),
        "vs_all_cores": median(lambda row: row[name]["speed"] / row["all_cores"]),
        "tokens_per_s": median(lambda row: row[name]["speed"]),
        "overhead_p50_ms": median(lambda row: row[name]["round_overhead_ms"]["p50"]),
        "both_idle": median(lambda row: row[name]["both_idle"]),
        "ttft_vs_alone": median(lambda row: row[name]["ttft_ms"] / row["alone_ttft_ms"]),
        "mean_accepted": median(lambda row: row[name]["mean_accepted"]),
        "t_target_ms": median(lambda row: row[name]["t_target_ms"]),
        "t_draft_ms": median(lambda row: row[name]["t_draft_ms"]),
        "equal": sum(row[name]["equal"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the built-in prompts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all pipelines")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    settings: dict[str, object] = {"models.target.slots": 2, "models.target.max_seq_len": 1024}
    settings |= dict(item.split("=", 1) for item in arguments.set)
    result = run(arguments.tokens, arguments.prompts, settings)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, default=str))
    columns = list(next(iter(result["summary"].values())))
    print("| draft | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, figures in result["summary"].items():
        print(f"| {name} | " + " | ".join(str(figures[column]) for column in columns) + " |")
    print(f"target: {result['target']}; all cores over alone: {result['all_cores_over_alone']:.2f}")


if __name__ == "__main__":
    main()
