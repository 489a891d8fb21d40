"""Every form of a target: its memory, its times, how it agrees with the unquantised one, what a draft gains.

    python -m benchmarks.targets [--tokens 64] [--prompts 4] [--forms all] [--shaped] [--out targets.json]

The demo model in transformers (float32, bfloat16, int8, int4) and in llama.cpp (several quantisations), each with the
Q2_K draft. Baselines: the form alone on the cores it has while no draft works (in llama.cpp all, where that is faster),
alone on all cores, and for a .gguf file llama-cpp-python by itself on all cores, without actors. `--shaped` adds one
of a billion weights in llama.cpp whose draft is right for 80% of the tokens, by construction (`benchmarks.shaped`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.drafts import demo_draft, poor_draft
from benchmarks.harness import chosen
from benchmarks.peers import Peer, PeerSettings
from benchmarks.pipeline import PROMPTS, measure, speed
from benchmarks.shaped import ONE_BILLION, SMALL, write_shaped
from duo_ray.actors.launch import start_local
from duo_ray.config import load_config
from duo_ray.core.context import IdLog
from duo_ray.hardware.machine import detect_machine
from duo_ray.models.catalog import cache_directory, resolve_draft, resolve_target
from duo_ray.models.llama_cpp_target import LlamaCppTarget
from duo_ray.models.transformers import TransformersTarget
from duo_ray.session import Answer, Duo
from duo_ray.types import Ids, SamplingParams, TargetModel, VerifyJob

_GREEDY = SamplingParams(temperature=0.0)
_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Form:
    """A way to hold a target."""

    settings: dict[str, object]
    draft: Path
    prompts: tuple[str, ...]
    judged: bool = True
    """Whether the unquantised form of the same model is known, to agree with."""

    def load(self) -> TargetModel:
        """The model alone, in this process, for `agreement`."""
        path = str(self.settings["models.target.model"])
        if self.settings["models.target.engine"] == "llama_cpp":
            return LlamaCppTarget.load(path, threads=1, max_context=_CONTEXT, slots=1)
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[str(self.settings["models.target.precision"])]
        return TransformersTarget.load(
            resolve_target(path).path,
            dtype=dtype,
            slots=1,
            max_context=_CONTEXT,
            quantization=str(self.settings.get("models.target.quantization", "none")),
        )


def forms(prompts: Sequence[str], *, shaped: bool) -> dict[str, Form]:
    """The unquantised one first."""
    demo, draft = tuple(prompts), poor_draft()
    found = {
        f"transformers {precision}": Form(_settings("demo", "transformers", precision), draft, demo)
        for precision in ("fp32", "bf16")
    }
    for quantization in ("int8", "int4"):
        settings = {**_settings("demo", "transformers", "bf16"), "models.target.quantization": quantization}
        found[f"transformers {quantization}"] = Form(settings, draft, demo)
    for quant in ("Q8_0", "Q4_1", "Q4_0"):
        path = demo_draft() if quant == "Q4_1" else resolve_draft("demo", quant, threads=2)
        found[f"llama.cpp {quant}"] = Form(_settings(str(path), "llama_cpp"), draft, demo)
    if shaped:
        folder = cache_directory() / "benchmarks"
        folder.mkdir(parents=True, exist_ok=True)
        target, small = folder / "shaped-1b.gguf", folder / "shaped-draft-80.gguf"
        if not small.exists():
            write_shaped(target, ONE_BILLION, 1.0)
            write_shaped(small, SMALL, 0.8)
        texts = tuple("".join(chr(0x4E00 + 7 * i + j) for j in range(16)) for i in range(len(prompts)))
        found["llama.cpp 1B-shaped Q4_0"] = Form(_settings(str(target), "llama_cpp"), small, texts, judged=False)
    return found


def _settings(model: str, engine: str, precision: str = "auto") -> dict[str, object]:
    return {
        "models.target.model": model,
        "models.target.engine": engine,
        "models.target.precision": precision,
        "models.target.device": "cpu",
        "models.target.slots": 1,
        "models.target.max_seq_len": _CONTEXT,
    }


def agreement(target: TargetModel, prompt: Ids, answer: Ids) -> float:
    """Share of the answer's tokens that are the target's own greedy choice after those before them."""
    ids, agreed, right, start = IdLog(prompt), 0, 0, 0
    while start < len(answer):
        context = ids.context("agreement", agreed=agreed, prompt_length=len(prompt))
        block = answer[start : start + 64]
        [verdict] = target.verify([VerifyJob(context, block, _GREEDY)], [None]).verdicts
        agreed, right = len(ids), right + verdict.accepted
        taken = min(verdict.accepted + 1, len(block))  # the wrong one is put right, and the text goes on
        ids.extend(answer[start : start + taken])
        start += taken
    target.release("agreement")
    return right / len(answer)


def run(tokens: int, prompts: Sequence[str], asked: str, *, shaped: bool) -> dict[str, Any]:
    every = forms(prompts, shaped=shaped)
    known = {name: every[name] for name in chosen(asked, list(every), "form of a target")}
    rows, reference = {}, list[tuple[Ids, Ids]]()
    with contextlib.ExitStack() as stack:
        start_local([{"CPU": 16, "draft_cpu": 8}])
        stack.callback(ray.shutdown)
        for name, form in known.items():
            rows[name], answers = measure_form(name, form, tokens)
            reference = reference or answers
    for name, form in known.items():
        if form.judged:
            model = form.load()
            rows[name]["agreement"] = statistics.fmean(agreement(model, *texts) for texts in reference)
    machine = detect_machine()
    return {
        "when": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": machine.cpu, "cores": len(machine.cores)},
        "tokens": tokens,
        "prompts": len(prompts),
        "rows": rows,
    }


def measure_form(name: str, form: Form, tokens: int) -> tuple[dict[str, Any], list[tuple[Ids, Ids]]]:
    """Speeds in turns, there and back, and (prompt, own greedy answer) for each prompt."""
    with contextlib.ExitStack() as stack:
        duo = stack.enter_context(Duo(load_config(None, {**form.settings, "models.draft.model": str(form.draft)})))
        whole = stack.enter_context(Duo(load_config(None, {**form.settings, "models.draft.model": None})))
        ways = {
            "duo": partial(measure, duo),
            "alone": partial(measure, duo, draft=False),
            "all": partial(measure, whole),
        }
        answers: dict[str, list[Answer]] = {way: [] for way in ways}
        peer = (
            stack.enter_context(closing(_plain(form))) if form.settings["models.target.engine"] == "llama_cpp" else None
        )
        for ask in ways.values():
            ask(form.prompts[0], 24)
        by_peer: list[float] = []
        for number, prompt in enumerate(track(form.prompts, name)):
            order = list(ways) if number % 2 else list(reversed(ways))
            for way in (*order, *reversed(order)):
                answers[way].append(ways[way](prompt, tokens))
            if peer is not None:
                turns = [peer.generate(duo.request(prompt).prompt, tokens) for _ in range(2)]
                by_peer += [(turn.at[-1] - turn.at[0]) / (len(turn.at) - 1) for turn in turns]
        info = duo.pipeline.info
        (timings,) = info.drafts[0].timings.values()
        target, draft = dict(info.target.timings), dict(timings)
        texts = [
            (duo.request(prompt).prompt, answer.token_ids)
            for prompt, answer in zip(form.prompts, answers["alone"][::2], strict=True)
        ]
    stats: list[dict[str, Any]] = [answer.stats for answer in answers["duo"]]
    drafted = sum(each["draft_tokens"] for each in stats)
    return {
        "memory_mib": info.target.memory_bytes / 2**20,
        "t1_ms": target[1] * 1000,
        "t8_ms": target[8] * 1000,
        "t_draft_ms": draft[1] * 1000,
        "accepted": sum(each["accepted_tokens"] for each in stats) / drafted if drafted else 0.0,
        "tokens_per_s": speed(answers["duo"]),
        "speed_up": speed(answers["duo"]) / speed(answers["alone"]),
        "speed_up_all_cores": speed(answers["duo"]) / speed(answers["all"]),
        **({"by_itself": 1.0 / statistics.median(by_peer)} if by_peer else {}),
    }, texts


def _plain(form: Form) -> Peer:
    """llama.cpp without this project, on all cores."""
    path = str(form.settings["models.target.model"])
    return Peer(
        PeerSettings("llama.cpp", path, path, None, "float32", "cpu", len(detect_machine().cores), _CONTEXT, eos_ids=())
    )


_COLUMNS = {
    "memory_mib": ("memory MiB", ".0f"),
    "t1_ms": ("T(1) ms", ".1f"),
    "t8_ms": ("T(8) ms", ".1f"),
    "t_draft_ms": ("T_draft ms", ".1f"),
    "agreement": ("agreement", ".2f"),
    "accepted": ("accepted", ".2f"),
    "tokens_per_s": ("tokens/s", ".1f"),
    "by_itself": ("llama-cpp-python tokens/s", ".1f"),
    "speed_up": ("x alone", ".2f"),
    "speed_up_all_cores": ("x alone, all cores", ".2f"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--prompts", type=int, default=4, help=f"how many, up to {len(PROMPTS)}")
    parser.add_argument(
        "--forms", default="all", help="comma-separated rows of the table; the first one is agreed with"
    )
    parser.add_argument("--shaped", action="store_true", help="also a target of a billion random weights (0.6 GB)")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    arguments = parser.parse_args()
    results = run(arguments.tokens, PROMPTS[: arguments.prompts], arguments.forms, shaped=arguments.shaped)
    table = Table("target", *(title for title, _ in _COLUMNS.values()))
    for name, row in results["rows"].items():
        table.add_row(name, *(format(row[key], form) if key in row else "-" for key, (_, form) in _COLUMNS.items()))
    Console(width=160).print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
