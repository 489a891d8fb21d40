"""A draft of another family, SmolLM2-135M for Gemma 3 270M: each strategy, the target alone, transformers' own method.

    python -m benchmarks.universal [--tokens 64] [--prompts 40] [--again 12] [--out universal.json]

transformers' universal assisted generation runs the same two models in its own process on all cores; the pipeline
shares them out between target and draft. For every prompt they answer in turn, the order reversed from prompt to
prompt, so that drift of the machine's speed hits all alike. No answer finds its prompt in a cache. EOS is ignored, so
that every answer has the same length.

One answer each way says little about one prompt on a machine whose speed changes. So prompts that seem slower than the
target alone by more than 5% are answered again, without the draft, twice with it, and without, until the geometric
mean of five turns or more is two standard errors above or below 0.95, or `--again` turns are over. Of those prompts
only what was measured then counts for `least`; `slow` counts those that ended below.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.drafts import demo_draft, gemma
from benchmarks.pipeline import forget, measure, seconds
from duo_ray.config import load_config
from duo_ray.core.decode import decode
from duo_ray.core.gamma import Plan
from duo_ray.models.catalog import resolve_target
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.models.translating import adapt
from duo_ray.session import Duo
from duo_ray.types import DraftJob, DraftProbs, SamplingParams, Span, TargetReply, Verdict, VerifyJob
from tests.core.exactness import decoding
from tests.prompts import PROMPTS

STRATEGIES = ("string", "intersection")
SLOW = 0.95
"""Prompts below this are measured again."""

Answered = tuple[list[int], float, dict[str, Any]]
"""Ids, seconds, stats."""

PEER = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
target_path, draft_path, dtype, tokens = sys.argv[1:]
def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)), AutoTokenizer.from_pretrained(path)
target, target_tokenizer = load(target_path)
draft, draft_tokenizer = load(draft_path)
target.generation_config.eos_token_id = None
assisted = {"assistant_model": draft, "tokenizer": target_tokenizer, "assistant_tokenizer": draft_tokenizer}
for line in sys.stdin:
    request = json.loads(line)
    ids = torch.tensor([request["ids"]])
    started = time.perf_counter()
    out = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=int(tokens),
                          **(assisted if request["assisted"] else {}))
    seconds = time.perf_counter() - started
    print(json.dumps({"ids": out[0, ids.shape[1]:].tolist(), "seconds": seconds}), flush=True)
"""


class Peer:
    """transformers' `generate` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def generate(self, ids: Sequence[int], *, assisted: bool) -> tuple[list[int], float]:
        """Ids and seconds."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the peer was started without pipes")
        self._process.stdin.write(json.dumps({"ids": list(ids), "assisted": assisted}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("transformers' process ended: its error is above")
        answer = json.loads(line)
        return answer["ids"], answer["seconds"]


@contextlib.contextmanager
def peer(dtype: str, tokens: int) -> Iterator[Peer]:
    paths = [str(resolve_target(str(path)).path) for path in (gemma(), demo_draft())]
    command = [sys.executable, "-c", PEER, *paths, dtype, str(tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


def run(strategy: str, tokens: int, prompts: Sequence[str], again: int) -> list[dict[str, Any]]:
    """One row for each prompt: seconds of every way to answer it, and the pipeline's stats.

    `again`: how many turns a prompt that seems slow gets at most.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        duo = stack.enter_context(pipeline(strategy))
        dtype = duo.pipeline.info.target.dtype
        other = stack.enter_context(peer(dtype, tokens))

        def ours(prompt: str, *, draft: bool) -> Answered:
            forget(duo)
            answer = measure(duo, prompt, tokens, draft=draft)
            return list(answer.token_ids), seconds(answer), dict(answer.stats)

        def theirs(prompt: str) -> Answered:
            return *other.generate(duo.request(prompt).prompt, assisted=True), {}

        ways: dict[str, Callable[[str], Answered]] = {
            "alone": partial(ours, draft=False),
            "duo": partial(ours, draft=True),
            "transformers": theirs,
        }
        for ask in ways.values():
            ask("Hello!")
        for number, prompt in enumerate(track(prompts, strategy)):
            order = ways if number % 2 else reversed(ways)
            answers: dict[str, Answered] = {way: ways[way](prompt) for way in order}
            rows.append(
                {
                    "prompt": prompt,
                    "prompt_ids": list(duo.request(prompt).prompt),
                    "ids": answers["alone"][0],
                    "dtype": dtype,
                    "seconds": {way: taken for way, (_, taken, _) in answers.items()},
                    "equal": {way: ids == answers["alone"][0] for way, (ids, _, _) in answers.items()},
                    "stats": answers["duo"][2],
                }
            )
        slow = [row for row in rows if speedup(row["seconds"]) < SLOW]
        for row in track(slow, f"{strategy}: {len(slow)} again"):
            ratios: list[float] = []
            while len(ratios) < again and undecided(ratios):
                first, *drafted, last = (ways[way](row["prompt"])[1] for way in ("alone", "duo", "duo", "alone"))
                ratios.append((first + last) / sum(drafted))
            if ratios:
                row["again"] = ratios
    return rows


def undecided(ratios: Sequence[float]) -> bool:
    """Whether the geometric mean of these is within two standard errors of `SLOW`."""
    if len(ratios) < 5:
        return True
    away = [math.log(ratio / SLOW) for ratio in ratios]
    error = statistics.stdev(away) / math.sqrt(len(away))
    return abs(statistics.fmean(away)) < 2.0 * error


def speedup(taken: Mapping[str, float], other: str = "alone") -> float:
    return taken[other] / taken["duo"]


def pipeline(strategy: str) -> Duo:
    settings: dict[str, object] = {
        "models.target.model": str(gemma()),
        "models.target.engine": "transformers",
        "models.target.slots": 2,
        "models.target.max_seq_len": 512,
        "models.draft.vocabulary": strategy,
    }
    return Duo(load_config(None, settings))


class KnownText:
    """A `TargetModel` that draws a text which is known already."""

    vocab_size, max_context, slots = 2**31, 2**20, 1

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def verify(self, jobs: Sequence[VerifyJob], _probs: Sequence[DraftProbs | None]) -> TargetReply:
        verdicts = []
        for job in jobs:
            text = self._ids[job.context.length :]
            pairs = zip(job.block, text, strict=False)
            accepted = next((i for i, (drafted, own) in enumerate(pairs) if drafted != own), len(job.block))
            verdicts.append(Verdict(job.context.request_id, accepted, text[accepted]))
        return TargetReply(tuple(verdicts), Span(0.0, 0.0), 0)

    def release(self, request_id: str) -> None:
        """Nothing is held."""


def translation_ms(strategy: str, rows: Sequence[dict[str, Any]]) -> float:
    """Milliseconds a step that the draft spends on translating, over the texts of earlier answers."""
    model = LlamaCppDraft.load(demo_draft(), threads=1, max_context=1024, slots=1, max_sequences=4)
    draft, _ = adapt(model, Tokenizer.load(resolve_target(str(gemma())).tokenizer_path), strategy)
    inside, whole = Stopwatch(model.draft), Stopwatch(draft.draft)
    vars(model)["draft"], vars(draft)["draft"] = inside, whole
    plan, steps = Plan(lead=2, gamma=5, overlap=True, reason="benchmark"), 0
    for number, row in enumerate(rows):
        prompt, ids = row["prompt_ids"], row["ids"]
        task = decoding(
            SamplingParams(temperature=0.0), plan, prompt=prompt, max_tokens=len(ids), max_sequences=4,
            request_id=str(number),
        )  # fmt: skip
        for _ in decode(task, KnownText([*prompt, *ids, *[0] * 64]), draft):
            pass
        steps += task.stats.target_steps
    model.close()
    return (whole.seconds - inside.seconds) / steps * 1000


class Stopwatch:
    """A `DraftModel.draft` that adds up the seconds it takes."""

    def __init__(self, draft: Callable[[Sequence[DraftJob]], Any]) -> None:
        self._draft = draft
        self.seconds = 0.0

    def __call__(self, jobs: Sequence[DraftJob]) -> Any:
        started = time.perf_counter()
        try:
            return self._draft(jobs)
        finally:
            self.seconds += time.perf_counter() - started


def summary(strategy: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def ratios(other: str) -> list[float]:
        return [speedup(row["seconds"], other) for row in rows]

    certain = [statistics.geometric_mean(row["again"]) if "again" in row else speedup(row["seconds"]) for row in rows]
    sure = [row for row in rows if "again" in row and not undecided(row["again"])]
    stats = [row["stats"] for row in rows]
    step_ms = statistics.median(1000 * row["seconds"]["duo"] / row["stats"]["target_steps"] for row in rows)
    translation = translation_ms(strategy, rows[:10])
    return {
        "vs alone": round(statistics.median(ratios("alone")), 2),
        "least": round(min(certain), 2),
        "measured again": sum("again" in row for row in rows),
        "slow": sum(statistics.geometric_mean(row["again"]) < SLOW for row in sure),
        "most": round(max(ratios("alone")), 2),
        "vs transformers": round(statistics.median(ratios("transformers")), 2),
        "accepted/step": round(statistics.median(each["mean_accepted"] for each in stats), 2),
        "T_target ms": round(statistics.median(each["t_target_ms"] for each in stats), 1),
        "T_draft ms": round(statistics.median(each["t_draft_ms"] for each in stats), 1),
        "translation ms": round(translation, 2),
        "of a step": f"{translation / step_ms:.1%}",
        "transformers vs alone": round(
            statistics.median(row["seconds"]["alone"] / row["seconds"]["transformers"] for row in rows), 2
        ),
        "equal": f"{sum(row['equal']['duo'] for row in rows)}/{len(rows)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--again", type=int, default=12, help="turns for a prompt that seems slow, at most")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for strategy in arguments.strategies:
        rows[strategy] = run(strategy, arguments.tokens, PROMPTS[: arguments.prompts], arguments.again)
        if arguments.out:
            arguments.out.write_text(json.dumps(rows, indent=1, default=str))
        figures = summary(strategy, rows[strategy])
        if len(rows) == 1:
            print("| strategy | " + " | ".join(figures) + " |")
            print("|---" * (len(figures) + 1) + "|")
        print(f"| {strategy} | " + " | ".join(map(str, figures.values())) + " |", flush=True)


if __name__ == "__main__":
    main()
