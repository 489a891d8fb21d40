"""Many requests at once: total speed, fairness and latency, with and without drafting, interleaved in one run.

    python -m benchmarks.concurrency [--streams 1,2,4,8,16] [--tokens 64] [--repeats 2] [--out results.json]
    python -m benchmarks.concurrency --url http://127.0.0.1:8000    # the same of a running service, over HTTP

One pipeline with as many slots as the most streams (start a service so: models.target.slots=16). For every number of
streams the same prompts are answered at once with drafting and with drafting off, in alternating order, so that drift
of the machine's speed hits both alike. EOS is ignored: all streams are equally long.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from rich.progress import track

from benchmarks.pipeline import PROMPTS
from duo_ray.config import load_config
from duo_ray.hardware.machine import detect_machine
from duo_ray.session import Duo
from duo_ray.types import DuoRayError, Finished

TOPICS = ("a lighthouse", "the sea", "winter", "bread", "a clock", "music", "rain", "an old train", "bees", "chess")


@dataclass(frozen=True, slots=True)
class Stream:
    """What one reader saw: when each message came (seconds since the start of all), and how many tokens it brought."""

    arrivals: tuple[tuple[float, int], ...]
    text: str
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """One batch of equal streams."""

    tokens_per_s: float
    """All tokens over the time from the first request to the last token."""
    slowest: float
    """When the last stream ended, as a multiple of when the first one did."""
    ttft_ms: float
    """Median time to the first token."""
    between_p50_ms: float
    """Time between messages of a stream, divided by the tokens each brought."""
    between_p99_ms: float
    accepted: float
    """Drafted tokens accepted per target step."""
    gamma: float
    """Mean budget of the blocks asked for."""
    share_drafting: float
    """Share of steps that asked for a block."""
    overhead_ms: float


def prompts(count: int) -> list[str]:
    """`count` different ones."""
    return [*PROMPTS, *(f"Write a short poem about {topic}." for topic in TOPICS)][:count]


Message = tuple[int, str] | dict[str, Any]
"""Tokens and text that came together; the statistics at the end."""


def through_ray(duo: Duo, prompt: str, tokens: int, *, draft: bool) -> Iterator[Message]:
    """The answer of a pipeline of one's own."""
    request = duo.request(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True, draft=draft)
    for message in duo.pipeline.stream(request):
        if isinstance(message, Finished):
            yield message.stats
        else:
            yield len(message.tokens), "".join(token.text for token in message.tokens)


def over_http(client: httpx.Client, model: str, prompt: str, tokens: int, *, draft: bool) -> Iterator[Message]:
    """The answer of a service."""
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": tokens,
        "ignore_eos": True, "stream": True, "duo": {"draft": draft, "trace": True},
    }  # fmt: skip
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != HTTPStatus.OK:
            raise DuoRayError(f"{client.base_url}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise DuoRayError(f"{client.base_url}: {chunk['error']['message']}")
                traced = chunk.get("duo", {"tokens": []})
                if traced["tokens"]:
                    yield len(traced["tokens"]), "".join(token["text"] for token in traced["tokens"])
                if "stats" in traced:
                    yield traced["stats"]


def together(ask: Callable[..., Iterator[Message]], texts: Sequence[str], tokens: int, *, draft: bool) -> list[Stream]:
    """Answer all of them at once, a reader's thread for each."""
    begin = threading.Barrier(len(texts) + 1)
    started = 0.0

    def read(prompt: str) -> Stream:
        arrivals: list[tuple[float, int]] = []
        text, stats = "", dict[str, Any]()
        begin.wait()
        for message in ask(prompt, tokens, draft=draft):
            if isinstance(message, dict):
                stats = message
            else:
                arrivals.append((time.perf_counter() - started, message[0]))
                text += message[1]
        return Stream(tuple(arrivals), text, stats)

    with ThreadPoolExecutor(len(texts)) as pool:
        reading = [pool.submit(read, text) for text in texts]
        started = time.perf_counter()
        begin.wait()
        return [each.result() for each in reading]


def figures(streams: Sequence[Stream]) -> Figures:
    """Of one batch."""
    ends = [stream.arrivals[-1][0] for stream in streams]
    between = sorted(
        1000 * (now - before) / count
        for stream in streams
        for (before, _), (now, count) in zip(stream.arrivals, stream.arrivals[1:], strict=False)
        for _ in range(count)
    )
    steps = sum(stream.stats["target_steps"] for stream in streams)
    gammas = [gamma for stream in streams for gamma in stream.stats["gamma_history"]]
    return Figures(
        tokens_per_s=sum(count for stream in streams for _, count in stream.arrivals) / max(ends),
        slowest=max(ends) / min(ends),
        ttft_ms=statistics.median(1000 * stream.arrivals[0][0] for stream in streams),
        between_p50_ms=between[len(between) // 2],
        between_p99_ms=between[int(0.99 * (len(between) - 1))],
        accepted=sum(stream.stats["accepted_tokens"] for stream in streams) / steps,
        gamma=statistics.mean(gammas) if gammas else 0.0,
        share_drafting=len(gammas) / steps,
        overhead_ms=statistics.median(stream.stats["round_overhead_ms"]["p50"] for stream in streams),
    )


def run(counts: Sequence[int], tokens: int, repeats: int, settings: dict[str, object]) -> dict[str, Any]:
    """Every batch, and medians over the repeats."""
    settings = {"models.target.slots": max(counts), "models.target.max_seq_len": 512, **settings}
    with Duo(load_config(None, settings)) as duo:
        rows = measure(partial(through_ray, duo), counts, tokens, repeats)
        target = duo.pipeline.info.target
        about = {
            "target": {"dtype": target.dtype, "cores": target.cores},
            "measured": duo.pipeline.describe().measured,
            "settings": settings,
        }
    return report(rows, counts, tokens, repeats, about)


def run_service(url: str, counts: Sequence[int], tokens: int, repeats: int) -> dict[str, Any]:
    """The same of a running service."""
    with httpx.Client(base_url=url, timeout=600) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        rows = measure(partial(over_http, client, model), counts, tokens, repeats)
    return report(rows, counts, tokens, repeats, {"url": url, "model": model})


def measure(
    ask: Callable[..., Iterator[Message]], counts: Sequence[int], tokens: int, repeats: int
) -> list[dict[Any, Any]]:
    """Every batch."""
    rows = []
    together(ask, prompts(max(counts)), 16, draft=True)  # every process has run once
    for repeat in track(range(repeats), "rounds"):
        for count in counts if repeat % 2 == 0 else reversed(counts):
            ways = (True, False)[:: (-1) ** repeat]
            batches = {draft: together(ask, prompts(count), tokens, draft=draft) for draft in ways}
            equal = sum(a.text == b.text for a, b in zip(batches[True], batches[False], strict=True))
            rows.append({"streams": count, "equal": equal} | {d: figures(b) for d, b in batches.items()})
    return rows


def report(
    rows: list[dict[Any, Any]], counts: Sequence[int], tokens: int, repeats: int, about: dict[str, Any]
) -> dict[str, Any]:
    machine = detect_machine()
    return {
        "when": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": machine.cpu, "cores": len(machine.cores), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("ray", "torch", "transformers", "llama-cpp-python")},
        **about,
        "tokens": tokens,
        "repeats": repeats,
        "batches": rows,
        "summary": {count: summary([row for row in rows if row["streams"] == count]) for count in counts},
    }


def summary(rows: Sequence[dict[Any, Any]]) -> dict[str, str]:
    """Of one number of streams: medians over the repeats, and the ratio with its standard error and range."""

    def median(name: str, draft: bool = True) -> float:
        return float(statistics.median(getattr(row[draft], name) for row in rows))

    on, off = ([1 / row[draft].tokens_per_s for row in rows] for draft in (True, False))
    # Of all the time the batches took: a single one of some seconds says little on a machine that changes its speed.
    ratio = sum(off) / sum(on)
    rests = [b - ratio * a for a, b in zip(on, off, strict=True)]
    error = statistics.stdev(rests) * len(rows) ** 0.5 / sum(on) if len(rows) > 1 else math.nan
    single = [b / a for a, b in zip(on, off, strict=True)]
    return {
        "tokens/s": f"{median('tokens_per_s'):.1f}",
        "draft off": f"{median('tokens_per_s', False):.1f}",
        "ratio": f"{ratio:.2f} +- {error:.2f} ({min(single):.2f}-{max(single):.2f})",
        "slowest/fastest end": f"{median('slowest'):.2f}",
        "TTFT ms": f"{median('ttft_ms'):.0f} / {median('ttft_ms', False):.0f}",
        "between p50 ms": f"{median('between_p50_ms'):.0f} / {median('between_p50_ms', False):.0f}",
        "p99 ms": f"{median('between_p99_ms'):.0f} / {median('between_p99_ms', False):.0f}",
        "accepted/step": f"{median('accepted'):.2f}",
        "gamma": f"{median('gamma'):.1f}",
        "steps that draft": f"{median('share_drafting'):.2f}",
        "overhead ms": f"{median('overhead_ms'):.1f} / {median('overhead_ms', False):.1f}",
        "equal": f"{sum(row['equal'] for row in rows)}/{sum(row['streams'] for row in rows)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,2,4,8,16", help="numbers of streams at once, separated by commas")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the pipeline")
    parser.add_argument("--url", help="of a running service, which is asked instead of a pipeline of one's own")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    counts = [int(part) for part in arguments.streams.split(",")]
    if arguments.url and arguments.set:
        parser.error("--set is for a pipeline of one's own: start the service of --url with these settings")
    settings: dict[str, object] = dict(item.split("=", 1) for item in arguments.set)
    if arguments.url:
        result = run_service(arguments.url, counts, arguments.tokens, arguments.repeats)
    else:
        result = run(counts, arguments.tokens, arguments.repeats, settings)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, default=asdict))
    columns = list(next(iter(result["summary"].values())))
    print("| streams | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for count, row in result["summary"].items():
        print(f"| {count} | " + " | ".join(row.values()) + " |")
    print({name: result[name] for name in ("target", "measured", "url", "model") if name in result})


if __name__ == "__main__":
    main()
