"""From a target and prompts to a draft: student, data, training, export, each of them resumable."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duo_ray.actors.prepare import prepare
from duo_ray.actors.target import TargetSettings
from duo_ray.config import Config
from duo_ray.distillation.data import (
    LEAST,
    Progress,
    Questions,
    describe_work,
    read_questions,
    write_answers,
)
from duo_ray.distillation.student import check_student, make_student
from duo_ray.distillation.translation import Translator, translate_answers
from duo_ray.distillation.workspace import Clock, DistillationError, Stage, Workspace, write_json
from duo_ray.hardware.machine import detect_machine
from duo_ray.hardware.placement import make_plan, target_device
from duo_ray.models.catalog import context_length, resolve_gguf_target, resolve_target
from duo_ray.models.silence import silence_transformers
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.session import Duo

DIVERGENCES = ("forward", "reverse", "mixed")

DATA_SHARE = 0.45
"""Of the time, at which the target stops answering."""
FIRST_SHARE, OWN_SHARE = 0.65, 0.72
"""Of the time, at which the first of two trainings ends, and the student's own texts."""
TRAINING_SHARE = 0.9
"""Of the time, at which training ends at the latest."""

Start = Callable[[Config], AbstractContextManager[Duo]]


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked for; a run can be resumed with the same."""

    target: str
    prompts: Path
    layers: int = 6
    student: str | None = None
    max_tokens: int = 128
    samples: int = 3
    divergence: str = "mixed"
    raw: bool = False
    on_policy: bool = False
    """Whether the student is trained on texts of its own in the end, which the target scores."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it: `training` as `train.train` tells, the exported files, the best of them."""

    training: dict[str, Any]
    measured: list[Any]
    best: Any

    def as_dict(self) -> dict[str, Any]:
        """What `duo-ray distill --json` prints."""
        return {
            "training": self.training,
            "drafts": [asdict(each) for each in self.measured],
            "best": self.best.file,
        }


def distill(
    task: Task,
    out: Path,
    config: Config,
    *,
    minutes: float,
    resume: bool,
    replicas: int,
    start: Start,
    say: Callable[[str], None],
    progress: Progress,
) -> Outcome:
    """Make a draft for a target in `out`, or go on with what was begun there.

    Args:
        minutes: for all of it, over all its starts: nearly half for the target's answers, nearly half for the training.
        replicas: pipelines that answer at the same time; more than one on a cluster.
        start: starts the pipeline of a configuration.
        say: told what is worth keeping on the screen.

    Raises:
        DistillationError: what cannot be done, before anything is begun where it can be known.
    """
    if task.divergence not in DIVERGENCES:
        raise DistillationError(f"--divergence {task.divergence}: choose one of {', '.join(DIVERGENCES)}")
    if replicas > 1 and config.hardware.machine != "cluster":
        raise DistillationError(
            f"--replicas {replicas}: this machine has room for one pipeline; on a cluster set hardware.machine=cluster"
        )
    # Of a target that stays packed only the tokenizer is needed, unless the student is cut from it.
    packed = task.student is not None and config.models.target.engine == "llama_cpp"
    files = (resolve_gguf_target if packed else resolve_target)(task.target, progress=progress)
    tokenizer = Tokenizer.load(files.tokenizer_path)
    asked = config.models.target.max_seq_len
    context = context_length(None if asked == "auto" else asked, files.context_length)
    source = check_student(task.target, files, layers=task.layers, student=task.student)
    if not source.own_vocabulary:
        context = min(context, source.context_length)
    questions = read_questions(
        task.prompts, config, tokenizer, context=context, raw=task.raw, max_tokens=task.max_tokens,
        samples=task.samples,
    )  # fmt: skip
    if task.on_policy and source.own_vocabulary:
        raise DistillationError(
            f"--on-policy: the target cannot score the tokens of --student {task.student}, which has a vocabulary of "
            "its own: leave one of them out"
        )
    device = _device(config)
    if task.on_policy and config.models.target.device != "cpu" and config.hardware.machine == "cluster":
        _check_gpu_here(device)
    silence_transformers()
    workspace = Workspace(out)
    workspace.begin(_plan(task, questions), resume=resume)
    clock = Clock(workspace.clock, minutes)
    progress("making the student", None)
    make_student(workspace.student, source, layers=task.layers if task.student is None else None)
    first, *others = workspace.stages(on_policy=task.on_policy)
    # A training that has begun goes on with what it began with.
    if not first.trained.is_dir() and not any(first.checkpoints.glob("*/trainer_state.json")):
        _answer(workspace, questions, config, replicas, clock, start, say, progress)
    training, testing = questions.split(workspace.answers)
    if source.own_vocabulary:
        say("the student has other tokens than the target: it is trained on the same texts in its own")
        translator = Translator(tokenizer, Tokenizer.load(source.tokenizer))
        training, testing = (
            translate_answers(each, workspace.translated, translator, source.context_length, progress)
            for each in (training, testing)
        )
    if workspace.trained.is_dir():
        say("the student is trained already")
    else:
        share = FIRST_SHARE if others else TRAINING_SHARE
        if not first.trained.is_dir():
            _train(first, share, training, testing, task, device, clock, say, progress)
        for stage in others:
            own = _own_samples(workspace, stage.start, training, tokenizer, config, device, clock, progress)
            say(f"the student wrote {len(own)} texts, which the target scored")
            mixed = [*own, *training[: len(own)]]
            _train(stage, TRAINING_SHARE, mixed, testing, task, device, clock, say, progress)
    return _export(workspace, testing, task, source.tokenizer_gguf, config, len(questions.prompts), say, progress)


def _plan(task: Task, questions: Questions) -> dict[str, Any]:
    return {**asdict(task), "prompts": questions.digest}


def _answer(
    workspace: Workspace,
    questions: Questions,
    config: Config,
    replicas: int,
    clock: Clock,
    start: Start,
    say: Callable[[str], None],
    progress: Progress,
) -> None:
    shards = questions.shards(workspace.answers)
    there = sum(path.is_file() for _, _, path in shards)
    if there == len(shards) or (there >= LEAST and clock.left(DATA_SHARE) < 0):
        return

    def watched(text: str, share: float | None) -> None:
        clock.keep()
        progress(text, share)

    with contextlib.ExitStack() as stack:
        duo = stack.enter_context(start(config))
        duos = [duo, *_more(duo, replicas - 1, stack, progress)]
        say(
            f"{describe_work(duos, questions, workspace.answers)}; {clock.left(DATA_SHARE) / 60:.1f} minutes may be "
            "used"
        )
        write_json(workspace.costs, duo.pipeline.describe().measured)
        write_answers(duos, questions, workspace.answers, until=lambda: clock.left(DATA_SHARE) < 0, progress=watched)
        write_json(workspace.costs, duo.pipeline.describe().measured)
    clock.keep()


def _more(first: Duo, count: int, stack: contextlib.ExitStack, progress: Progress) -> list[Duo]:
    """So many more pipelines like the first one, started at the same time."""
    started: list[Duo] = []
    if not count:
        return started
    progress(f"starting {count} more pipelines", None)

    def start_one(_: int) -> None:
        started.append(stack.enter_context(Duo(first.prepared)))

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(start_one, range(count)))
    return started


def _own_samples(
    workspace: Workspace,
    student: Path,
    answers: list[Path],
    tokenizer: Tokenizer,
    config: Config,
    device: str,
    clock: Clock,
    progress: Progress,
) -> list[Path]:
    from duo_ray.distillation.own_samples import write_own_samples  # noqa: PLC0415 - torch and transformers

    with contextlib.ExitStack() as stack:

        def settings() -> TargetSettings:
            alone = config.models.draft.model_copy(update={"model": None})
            prepared = prepare(config.model_copy(update={"models": config.models.model_copy(update={"draft": alone})}))
            stack.callback(prepared.claims.release)
            return prepared.settings.target

        def watched(text: str, share: float | None) -> None:
            clock.keep()
            progress(text, share)

        return write_own_samples(
            student, settings, answers, workspace.own, device=device, ends=tokenizer.eos_ids,
            until=lambda: clock.left(OWN_SHARE) < 0, progress=watched,
        )  # fmt: skip


def _device(config: Config) -> str:
    """Where the training runs: beside the target on this machine; of a cluster this machine is all that is known."""
    machine = detect_machine()
    if config.hardware.machine == "cluster":
        return "cuda" if machine.gpus else "cpu"
    return target_device(config, machine).partition(":")[0]


def _check_gpu_here(device: str) -> None:
    if device == "cpu":
        raise DistillationError(
            "--on-policy: the target has to be loaded where this command runs, and there is no GPU for it here: run "
            "the command on a machine with one, or leave --on-policy out"
        )


def _train(
    stage: Stage,
    share: float,
    training: list[Path],
    testing: list[Path],
    task: Task,
    device: str,
    clock: Clock,
    say: Callable[[str], None],
    progress: Progress,
) -> None:
    from duo_ray.distillation.train import train  # noqa: PLC0415 - torch and transformers

    say(f"training on {len(training)} answers, {clock.left(share) / 60:.1f} minutes at most")
    found = train(
        stage, training, testing, divergence=task.divergence, cut=task.student is None, clock=clock, share=share,
        device=device, progress=progress,
    )  # fmt: skip
    before, after = found["before"], found["after"]
    say(
        f"expected acceptance on held-out prompts: {before['acceptance']:.3f} before, {after['acceptance']:.3f} after "
        f"{found['done']} of {found['steps']} steps in {found['precision']}; greedy {before['greedy']:.3f}, "
        f"{after['greedy']:.3f}"
    )


def _export(
    workspace: Workspace,
    testing: list[Path],
    task: Task,
    tokenizer_gguf: Path | None,
    config: Config,
    prompts: int,
    say: Callable[[str], None],
    progress: Progress,
) -> Outcome:
    from duo_ray.distillation.card import write_card  # noqa: PLC0415 - refusals do without
    from duo_ray.distillation.export import export  # noqa: PLC0415 - as above

    threads = _draft_threads(config)
    # The .gguf file, where there was one, has the tokenizer in llama.cpp's form.
    measured, best = export(workspace, testing, tokenizer_gguf=tokenizer_gguf, threads=threads, progress=progress)
    found = json.loads((workspace.trained / "training.json").read_text(encoding="utf-8"))
    first, *others = workspace.stages(on_policy=task.on_policy)
    if others:  # its own training began where the first one ended
        found["before"] = json.loads((first.trained / "training.json").read_text(encoding="utf-8"))["before"]
    origin = f"{task.layers} of its layers" if task.student is None else f"{task.student} to start with"
    facts = {
        **found, "name": workspace.out.resolve().name, "folder": workspace.out, "target": task.target, "origin": origin,
        "texts": "the target's own answers and texts of its own" if task.on_policy else "the target's own answers",
        "prompts": prompts, "held_out": found["held_out_answers"], "threads": threads,
    }  # fmt: skip
    write_card(workspace.out / "README.md", measured, best, facts)
    say(f"{workspace.out} is a draft now, by {best.file}; its README.md has the figures")
    return Outcome(found, measured, best)


def _draft_threads(config: Config) -> int:
    """Those that a pipeline on this machine would give the draft."""
    machine = detect_machine()
    draft = config.models.draft.model_copy(update={"model": "demo"})
    models = config.models.model_copy(update={"draft": draft})
    shares = make_plan(config.model_copy(update={"models": models}), machine).drafts
    return min(shares[0].cpus, len(machine.cores)) if shares else 1
