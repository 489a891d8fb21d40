"""`duo-ray bench`: every method on every prompt, run by run in turn, kept as it goes, resumable.

For each prompt all methods run one after the other, beginning with another one each time: what the machine does
meanwhile hits all alike. A finished run is a line of `runs.jsonl` in the output directory; started again with the same
settings, the harness goes on with what is missing.
"""

from __future__ import annotations

import json
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measured import Method, Run, Turn
from benchmarks.ours import VARIANTS, Engine
from benchmarks.peers import PEERS, Peer, PeerSettings, unavailable
from benchmarks.tasks import Prompt, read_tasks
from duo_ray.config import Config
from duo_ray.hardware.machine import Machine
from duo_ray.models.catalog import resolve_draft, resolve_target
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.types import DuoRayError

METHODS = {name: variant.about for name, variant in VARIANTS.items()} | PEERS

DEFAULTS: dict[str, object] = {"models.target.slots": 2}
"""Settings of the harness beside the user's: it asks one question at a time."""

_WARM_UP = "Hello! Name three colours and say what you like about them."
_GIVE_UP = 2
"""Failures in a row after which a method is left out."""

Progress = Callable[[str, int, int], None]
"""What is running, runs done, runs in all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    prompts: Path | None
    count: int | None
    """Prompts of each task; None: all."""
    tokens: int
    """Most tokens of an answer; it ends earlier where the model ends it."""
    seed: int
    """Chooses the prompts and the order of the methods."""

    def fingerprint(self, config: Config) -> dict[str, Any]:
        """What must be the same for runs to be compared; methods, tasks and their number may grow."""
        return {"tokens": self.tokens, "seed": self.seed, "config": config.model_dump(mode="json")}


def chosen(asked: str, known: Sequence[str], kind: str) -> tuple[str, ...]:
    """Names of a comma-separated list, or all of them.

    Raises:
        DuoRayError: one that is not known.
    """
    if asked == "all":
        return tuple(known)
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise DuoRayError(f"no {kind} {name!r}; there are {', '.join(known)}, or all")
    if not names:
        raise DuoRayError(f"no {kind} given; there are {', '.join(known)}, or all")
    return names


class Journal:
    """The finished runs of an output directory."""

    def __init__(self, directory: Path, fingerprint: dict[str, Any]) -> None:
        """Begin one, or go on with it.

        Raises:
            DuoRayError: the directory holds runs under other settings, or cannot be written.
        """
        self.path = directory / "runs.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else []
        except OSError as error:
            raise DuoRayError(f"{directory}: {error.strerror or error}") from None
        self.runs: list[Run] = []
        if not any(lines):
            self._append({"settings": fingerprint})
            return
        # The end of a killed run may be half a line: it is written again.
        complete, rest = lines[:-1], lines[-1]
        try:
            header, *runs = [json.loads(line) for line in complete]
            self.runs = [Run.from_dict(run) for run in runs]
            before = header["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise DuoRayError(f"{self.path} is no journal of the harness ({error!r}): choose another --out") from None
        if before != fingerprint:
            changed = sorted(name for name in fingerprint if before.get(name) != fingerprint[name])
            raise DuoRayError(f"{self.path} was begun with other settings ({', '.join(changed)}): choose another --out")
        if rest:
            self.path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self._append(run.as_dict())

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def done(self) -> set[tuple[str, str, str]]:
        """Keys of the runs that succeeded; a failed one is tried again."""
        return {run.key for run in self.runs if run.error is None}


def schedule(prompts: Sequence[Prompt], methods: Sequence[str], seed: int) -> Iterator[tuple[Prompt, str]]:
    """Which method answers which prompt when: all methods for each prompt, each prompt beginning with the next one.

    The order they follow in is drawn anew after each full rotation, so that no method always runs behind the same.
    """
    order = list(methods)
    shuffle = random.Random(seed).shuffle
    for number, prompt in enumerate(prompts):
        start = number % len(order)
        if start == 0:
            shuffle(order)
        for method in (*order[start:], *order[:start]):
            yield prompt, method


def converse(method: Method, prompt: Prompt, tokenizer: Tokenizer, tokens: int, *, trace: bool) -> Iterator[Turn]:
    """Turn after turn; each question comes after the method's own answers."""
    messages: list[dict[str, str]] = []
    for text in prompt.turns:
        messages.append({"role": "user", "content": text})
        ids = tokenizer.chat(messages) if tokenizer.has_chat_template else tokenizer.encode(_joined(messages))
        turn = method.generate(ids, tokens, trace=trace)
        yield turn
        messages.append({"role": "assistant", "content": _text(turn, tokenizer)})


def _joined(messages: Sequence[dict[str, str]]) -> str:
    return "\n\n".join(message["content"] for message in messages)


def _text(turn: Turn, tokenizer: Tokenizer) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push(token) for token in turn.ids if token not in tokenizer.eos_ids) + stream.flush()


def measure(plan: Plan, config: Config, out: Path, progress: Progress) -> tuple[Journal, dict[str, Any]]:
    """Run what is missing; the journal and a description of what ran on what.

    Raises:
        DuoRayError: nothing can be measured: wrong names, unreadable prompts, another journal, models that do not load.
    """
    prompts = read_tasks(plan.tasks, plan.prompts, plan.count, plan.seed)
    journal = Journal(out, plan.fingerprint(config))
    # The order is that of the whole plan, whatever was done before.
    missing = [(p, m) for p, m in schedule(prompts, plan.methods, plan.seed) if (p.task, p.id, m) not in journal.done]
    about: dict[str, Any] = {"plan": {**asdict(plan), "prompts": str(plan.prompts or "the project's own")}}
    about_path = out / "about.json"

    def keep() -> None:
        about_path.write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")

    if not missing:
        return journal, json.loads(about_path.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        progress("starting", 0, len(missing))
        own = [name for name in VARIANTS if any(m == name for _, m in missing)]
        engine = Engine(config, own, lambda text, _share: progress(text, 0, len(missing)))
        stack.callback(engine.close)
        methods: dict[str, Method] = dict(engine.methods)
        about |= _describe(engine)
        left_out: dict[str, str] = {}
        peer_settings = _peer_settings(engine)
        for name in (name for name in PEERS if any(m == name for _, m in missing)):
            if reason := unavailable(name, peer_settings(name)):
                left_out[name] = reason
                continue
            progress(f"loading {name}", 0, len(missing))
            try:
                peer = Peer(peer_settings(name))
            except DuoRayError as error:
                left_out[name] = str(error)
                continue
            stack.callback(peer.close)
            methods[name] = peer
        tokenizer = engine.duo.prepared.tokenizer
        about |= {"methods": {name: method.describe() for name, method in methods.items()}, "left_out": left_out}
        keep()
        for name, method in methods.items():
            progress(f"warming up {name}", 0, len(missing))
            _run(method, Prompt("warm-up", name, (_WARM_UP,)), name, tokenizer, 24, trace=False)
        failures: dict[str, int] = {}
        for done, (prompt, name) in enumerate(missing):
            if name in left_out:
                continue
            progress(f"{prompt.task} {prompt.id}: {name}", done, len(missing))
            traced = name == "duo" and not any(run.task == prompt.task and run.method == name for run in journal.runs)
            run = _run(methods[name], prompt, name, tokenizer, plan.tokens, trace=traced)
            journal.add(run)
            failures[name] = 0 if run.error is None else failures.get(name, 0) + 1
            if failures[name] == _GIVE_UP:
                left_out[name] = f"failed {_GIVE_UP} times in a row: {run.error}"
        keep()
    return journal, about


def _run(method: Method, prompt: Prompt, name: str, tokenizer: Tokenizer, tokens: int, *, trace: bool) -> Run:
    """One prompt by one method; a failure is a run, too."""
    run = Run(prompt.task, prompt.id, name)
    try:
        turns = tuple(converse(method, prompt, tokenizer, tokens, trace=trace))
        run = replace(run, turns=turns, peak_bytes=method.peak_bytes())
        method.between()
    except DuoRayError as error:
        return replace(run, turns=(), error=str(error))
    return run


def _describe(engine: Engine) -> dict[str, Any]:
    prepared = engine.duo.prepared
    machine: Machine = prepared.machine
    return {
        "versions": {name: version(name) for name in ("duo-ray", "ray", "torch", "transformers", "llama-cpp-python")}
        | {"python": platform.python_version()},
        "hardware": {
            "cpu": machine.cpu,
            "cores": list(machine.cores),
            "memory": machine.memory_total,
            "gpus": [gpu.name for gpu in machine.gpus],
        },
        "models": {"target": prepared.files.source, "draft": str(prepared.draft_path)},
        "config": prepared.config.model_dump(mode="json"),
        "measured": engine.duo.pipeline.describe().measured,
    }


def _peer_settings(engine: Engine) -> Callable[[str], PeerSettings]:
    """What each peer loads: the same weights, precision, device and context; all cores of the pipeline."""
    prepared = engine.duo.prepared
    settings = prepared.settings
    name = prepared.config.models.target.model
    # The catalog finds the file a name stands for; only a GGUF target has one.
    gguf = str(resolve_draft(name)) if name == "demo" or name.endswith(".gguf") else None

    def of(method: str) -> PeerSettings:
        draft = None
        if method == "assisted" and prepared.draft_path is not None:
            draft = str(resolve_target(str(prepared.draft_path)).path)
        return PeerSettings(
            method=method,
            target=str(prepared.files.path),
            target_gguf=gguf,
            draft=draft,
            dtype=settings.target.dtype,
            device=settings.target.device,
            threads=len({*settings.target.cores, *(core for each in settings.drafts for core in each.cores)}),
            max_context=settings.target.max_context,
            eos_ids=tuple(sorted(prepared.tokenizer.eos_ids)),
        )

    return of
