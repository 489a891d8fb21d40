"""`duo-ray`: generate, check, diagnose, doctor, bench, plan, quantize, distill, vocab."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from duo_ray.config import Config, ConfigError, load_config
from duo_ray.terminal import errors, prepared, progress_bar, show_stream, started, user_errors
from duo_ray.types import DuoRayError

app = typer.Typer(
    help="Serve an LLM faster: a draft model on idle CPU cores and the target model work at the same time. "
    "Output is exactly what the target alone would give.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="Settings file (config.yaml).")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: --set optimization.max_sequences=2. Repeatable."),
]
TargetName = Annotated[
    str | None, typer.Option("--target", "-t", help='Target model: "demo", a hub id, a directory or a .gguf file.')
]
DraftName = Annotated[
    str | None, typer.Option("--draft", "-d", help='Draft model: "demo", a .gguf file or a directory of them.')
]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="The target alone, through the same actors.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads standard input.")],
    target: TargetName = None,
    draft: DraftName = None,
    no_draft: NoDraft = False,
    config: ConfigFile = None,
    setting: Setting = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the text as it stands, without a chat template.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", help="Tokens of the answer, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Keep the k most probable tokens; 0 keeps all.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Keep the most probable tokens up to this mass.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="Drop tokens below this share of the best one.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option("--repetition-penalty", help="1 is off.")] = None,
    presence_penalty: Annotated[float | None, typer.Option("--presence-penalty", help="0 is off.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option("--frequency-penalty", help="0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text on this machine.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. Repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    draft_budget: Annotated[int | None, typer.Option("--draft-budget", help="Fixed gamma for this request.")] = None,
    max_sequences: Annotated[
        int | None, typer.Option("--max-sequences", help="Drafted sequences a block may hold.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    colour: Annotated[
        bool | None, typer.Option("--color/--no-color", help="Colour tokens by origin; default: in a terminal.")
    ] = None,
) -> None:
    """Answer a prompt; the text streams as it is verified and ends with a line of figures."""
    with user_errors():
        from duo_ray.session import checked_request  # noqa: PLC0415 - Ray is imported only by commands that need it

        settings = _config(config, setting, target, draft, no_draft)
        if trace is not None and not trace.parent.is_dir():
            raise ConfigError(f"--trace {trace}: there is no directory {trace.parent}")
        text = sys.stdin.read() if prompt == "-" else prompt
        messages: Any = (
            text
            if system is None
            else [
                {"role": "system", "content": system},
                {"role": "user", "content": text},
            ]
        )
        ready = prepared(settings)
        # Refused, if it must be, before any actor starts.
        request = checked_request(
            ready,
            messages,
            raw=raw,
            draft=not no_draft,
            max_tokens=max_tokens,
            stop=stop or None,
            ignore_eos=ignore_eos,
            draft_budget=draft_budget,
            max_sequences=max_sequences,
            trace=trace is not None,
            seed=seed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
        with started(ready) as duo:
            if as_json:
                answer = duo.generate(request)
                print(json.dumps(answer.as_dict(), ensure_ascii=False))
                events = answer.trace
            else:
                events = show_stream(duo.stream(request), colour).trace
        if trace is not None:
            from duo_ray.trace import write_trace  # noqa: PLC0415

            write_trace(trace, events)
            errors.print(f"timeline written to {trace}: open it in ui.perfetto.dev", highlight=False)


@app.command()
def check(
    prompts: Annotated[
        Path, typer.Option(help='JSONL: {"prompt": ...}, {"messages": [...]} or Spec-Bench\'s {"turns": [...]} a line.')
    ],
    target: TargetName = None,
    draft: DraftName = None,
    config: ConfigFile = None,
    setting: Setting = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens of each answer.")] = 64,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts are completed without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Is the output really the target's? Every prompt greedily with draft and with the target alone, token by token.

    A difference where the target's two best logits are closer than its precision resolves is a tie, and reported apart;
    any other one fails the check (exit code 1).
    """
    with user_errors():
        from duo_ray.equivalence import compare, read_prompts  # noqa: PLC0415

        settings = _config(config, setting, target, draft, False)
        if settings.models.draft.model is None:
            raise ConfigError("check compares with and without a draft: give it one (--draft)")
        tasks = read_prompts(prompts)[:limit]
        with started(settings) as duo, progress_bar(quiet=as_json) as bar:
            task = bar.add_task("checking", total=len(tasks))
            results = []
            for prompt in tasks:
                results.append(compare(duo, prompt, max_tokens=max_tokens, raw=raw))
                bar.update(task, advance=1, description=f"checking ({results[-1].verdict})")
        counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("equal", "tie", "different")}
        if as_json:
            print(json.dumps({**counts, "results": [result.as_dict() for result in results]}, ensure_ascii=False))
        else:
            for result in results:
                if result.verdict != "equal":
                    print(result.describe())
            print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
        raise typer.Exit(1 if counts["different"] else 0)


@app.command()
def diagnose(
    target: TargetName = None,
    draft: DraftName = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL as for check: texts like those you serve. Default: eight built-in ones."),
    ] = None,
    config: ConfigFile = None,
    setting: Setting = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Tokens of each answer.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, max=100.0, help="Of the sampled answers; default: the configuration's.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts are completed without a chat template.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Another one draws other sampled answers.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write a report with plots to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How good is this draft for this target, does it pay on this machine, and what would help?

    First the pipeline answers every prompt, without and with the draft: that gives the target's own texts, the measured
    speed-up and the measured acceptance. Then both models are run along those texts and their distributions compared at
    every token: KL divergence and total variation by kind of token and by place, the acceptance they predict, the draft
    temperature that would fit best, the two chat templates. At last the loop is simulated with the measured times: by
    gamma, by number of sequences, by requests at once. The advice at the end names the figure behind each piece.

    Takes some minutes on CPUs. Fewer prompts (--limit) and tokens (--max-tokens) are faster, and less certain: shares
    come with their standard error.
    """
    with user_errors():
        from duo_ray.diagnosis import BUILT_IN, conclude, html_writer, observe, show_diagnosis  # noqa: PLC0415
        from duo_ray.equivalence import read_prompts  # noqa: PLC0415

        settings = _config(config, setting, target, draft, False)
        if settings.models.draft.model is None:
            raise ConfigError("diagnose compares a draft with a target: give it one (--draft)")
        if settings.hardware.machine == "cluster":
            raise ConfigError("diagnose loads both models on this machine: set hardware.machine to this")
        if settings.models.draft.quant == "auto":
            raise ConfigError("diagnose looks at one quantisation of the draft: --set models.draft.quant=Q4_0, or null")
        write = html_writer(html) if html is not None else None  # what is wrong with it is said now
        asked = read_prompts(prompts) if prompts is not None else BUILT_IN
        with started(settings) as duo, progress_bar(quiet=as_json) as bar:
            prepared, task = duo.prepared, bar.add_task("running the pipeline", total=1.0)
            observed = observe(
                duo, asked[:limit], max_tokens=max_tokens, temperature=temperature, raw=raw, seed=seed,
                progress=lambda text, share: bar.update(task, description=text, completed=share),
            )  # fmt: skip
        with progress_bar(quiet=as_json) as bar:
            task = bar.add_task("comparing", total=1.0)
            diagnosis = conclude(
                prepared, observed, lambda text, share: bar.update(task, description=text, completed=share)
            )
        if as_json:
            print(json.dumps(diagnosis.as_dict(), ensure_ascii=False))
        else:
            show_diagnosis(Console(highlight=False), diagnosis)
        if write is not None:
            write(diagnosis)
            errors.print(f"report written to {html}", highlight=False)


@app.command()
def doctor(
    target: TargetName = None,
    draft: DraftName = None,
    config: ConfigFile = None,
    setting: Setting = None,
    measure: Annotated[bool, typer.Option("--measure", help="Start the pipeline and measure both models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What this machine is, what would be chosen and why, and what is wrong."""
    with user_errors():
        from duo_ray.doctor import examine  # noqa: PLC0415

        with progress_bar(quiet=as_json) as bar:
            task = bar.add_task("examining", total=None)
            report = examine(
                lambda: _config(config, setting, target, draft, False),
                measure=measure,
                progress=lambda text, share: bar.update(task, description=text, completed=share or 0.0),
            )
        if as_json:
            print(json.dumps(report.as_dict(), ensure_ascii=False, default=str))
        else:
            report.show(Console(highlight=False))
        raise typer.Exit(1 if report.problems else 0)


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Directory of the runs; an interrupted series goes on from there.")],
    tasks: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    methods: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    prompts: Annotated[
        Path | None, typer.Option(help="Directory of .jsonl files in Spec-Bench's form; default: the project's own.")
    ] = None,
    count: Annotated[int | None, typer.Option("--n", min=1, help="Prompts of each task; default: all.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 128,
    seed: Annotated[int, typer.Option(help="Chooses the prompts, and the order of the methods.")] = 0,
    target: TargetName = None,
    draft: DraftName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Measure this system against its own parts and against other engines on the same models; writes a report."""
    with user_errors():
        try:
            from benchmarks import series  # noqa: PLC0415
        except ImportError as error:
            raise DuoRayError(f"bench needs {error.name}: install it with pip install 'duo-ray[bench]'") from None
        overrides = [f"{key}={value}" for key, value in series.DEFAULTS.items()]
        settings = _config(config, [*overrides, *(setting or [])], target, draft, False)
        with progress_bar() as bar:
            task = bar.add_task("starting", total=None)
            text = series.run(
                settings, out, tasks=tasks, methods=methods, prompts=prompts, count=count, tokens=tokens, seed=seed,
                progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
            )  # fmt: skip
        print(text)
        errors.print(f"runs, results.json, report.md and plots are in {out}", highlight=False)


@app.command()
def plan(
    t_target: Annotated[
        str | None, typer.Option("--t-target", help="Seconds of a target pass: 25ms, or 1:25ms,8:27ms,32:33ms.")
    ] = None,
    t_draft: Annotated[
        str | None, typer.Option("--t-draft", help="Seconds of a drafted token: 4ms, or by sequences 1:4ms,4:7ms.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option("--from", help="Take both from what `duo-ray doctor --measure --json` wrote.")
    ] = None,
    acceptance: Annotated[float, typer.Option(help="Chance that a drafted token is accepted.")] = 0.8,
    overhead: Annotated[str | None, typer.Option(help="What a step costs beside both models; 2ms.")] = None,
    t_draft_prompt: Annotated[
        str | None, typer.Option("--t-draft-prompt", help="Seconds per prompt token the draft reads.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of a prompt.")] = 128,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", help="Tokens of an answer.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Requests one pipeline holds at once.")] = 8,
    draft_actors: Annotated[int, typer.Option("--draft-actors", min=1, help="Draft processes of a pipeline.")] = 1,
    draft_cores: Annotated[int, typer.Option("--draft-cores", min=1, help="CPU cores of one draft process.")] = 8,
    rate: Annotated[float | None, typer.Option(help="Requests per second to serve: how many GPUs and cores?")] = None,
    seed: Annotated[int, typer.Option(help="Another one draws other texts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What to expect on hardware you do not have yet, by simulating the loop: speed-up, settings, capacity."""
    with user_errors():
        from duo_ray.planning import Text as Texts  # noqa: PLC0415
        from duo_ray.planning import predict, required_capacity  # noqa: PLC0415
        from duo_ray.planning.inputs import read_hardware  # noqa: PLC0415
        from duo_ray.planning.show import show_capacity, show_prediction  # noqa: PLC0415

        hardware = read_hardware(
            measured, t_target, t_draft, overhead, t_draft_prompt, slots=slots, draft_actors=draft_actors
        )
        texts = Texts(acceptance, prompt_tokens, answer_tokens)
        capacity = {}
        with errors.status("simulating"):
            prediction = predict(hardware, texts, concurrency=concurrency, seed=seed)
            if rate is not None:
                for name, drafted in (("with drafts", True), ("target alone", False)):
                    capacity[name] = required_capacity(
                        hardware, texts, rate=rate, draft=drafted, cores_per_actor=draft_cores, seed=seed
                    )
        if as_json:
            needed = {name.replace(" ", "_"): asdict(each) for name, each in capacity.items()}
            print(json.dumps({**prediction.as_dict(), "capacity": needed or None}))
            return
        console = Console(highlight=False)
        show_prediction(console, prediction)
        if capacity:
            show_capacity(console, capacity, f"{rate:g} requests/s")


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="A .gguf file.")],
    output: Annotated[Path, typer.Argument(help="The .gguf file to write; must not exist.")],
    type_name: Annotated[str, typer.Option("--type", help="llama.cpp's name: Q2_K, Q4_0, Q4_K_M, Q8_0, ...")],
    threads: Annotated[int, typer.Option(help="0: all cores.")] = 0,
) -> None:
    """Make a smaller, faster draft from a GGUF with llama.cpp's own quantiser."""
    with user_errors():
        from duo_ray.models.llama_library import quantize as run  # noqa: PLC0415

        with errors.status(f"quantising {source.name} to {type_name}"):
            run(source, output, type_name, threads)
        before, after = source.stat().st_size, output.stat().st_size
        errors.print(f"{output}: {after / 2**20:.0f} MiB, was {before / 2**20:.0f} MiB", highlight=False)


@app.command()
def distill(
    prompts: Annotated[Path, typer.Option(help="JSONL as for check: texts like those you serve.")],
    out: Annotated[Path, typer.Option(help="Directory to write; must be empty, but for --resume.")],
    target: TargetName = None,
    draft: DraftName = None,
    layers: Annotated[int, typer.Option(min=2, help="Of the target's layers, evenly spread.")] = 6,
    student: Annotated[
        str | None, typer.Option(help="Start from this directory or hub id, not from the target's layers.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="For all of it, over all its starts.")] = 40.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was begun in --out.")] = False,
    replicas: Annotated[
        int, typer.Option(min=1, help="Pipelines that answer at the same time, on a cluster (hardware.machine).")
    ] = 1,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Tokens of an answer, at most.")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Sampled answers to a prompt, beside the greedy one.")] = 3,
    divergence: Annotated[str, typer.Option(help="Of the training: forward, reverse or mixed.")] = "mixed",
    on_policy: Annotated[
        bool, typer.Option("--on-policy", help="In the end also on texts of the student, scored by the target.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts are completed without a chat template.")] = False,
    config: ConfigFile = None,
    setting: Setting = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a draft for a target: a small model that writes what the target writes.

    The target answers the prompts, with any --draft there is. A student, cut from it or a smaller sibling, is trained
    on these answers and the target's distributions; one prompt in ten is held out and tells the acceptance to expect.
    At last it is written for transformers and, in several weight types, for llama.cpp; all are measured here, and the
    fastest is what `--draft DIRECTORY` takes. Interrupted at any moment, the same command goes on with --resume.
    """
    with user_errors():
        from duo_ray.distillation import Task, distill  # noqa: PLC0415
        from duo_ray.distillation.card import show_drafts  # noqa: PLC0415

        settings = _config(config, setting, target, draft, False)
        model = settings.models.target.model
        if settings.models.draft.model == "demo" != model:  # the default, and of another family
            settings = _config(config, setting, target, None, True)
        with progress_bar(quiet=as_json) as bar:
            task = bar.add_task("starting", total=None)
            made = distill(
                Task(model, prompts, layers, student, max_tokens, samples, divergence, raw, on_policy), out, settings,
                minutes=minutes, resume=resume, replicas=replicas, start=started,
                say=lambda line: errors.print(line, highlight=False),
                progress=lambda text, share: bar.update(
                    task, description=text, total=None if share is None else 1.0, completed=share or 0.0
                ),
            )  # fmt: skip
        if as_json:
            print(json.dumps(made.as_dict(), ensure_ascii=False))
        else:
            show_drafts(Console(highlight=False), made.measured, made.best)


@app.command()
def vocab(
    target: Annotated[str, typer.Argument(help="Target model, as for --target.")],
    draft: Annotated[str, typer.Argument(help="Draft model, as for --draft.")],
    strategy: Annotated[
        str, typer.Option(help="auto, same, intersection or string: models.draft.vocabulary to report on.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What two vocabularies have in common, and how a draft of the one would serve a target of the other."""
    with user_errors():
        from duo_ray.models.catalog import resolve_draft, resolve_target  # noqa: PLC0415
        from duo_ray.models.translating import examine  # noqa: PLC0415

        settings = load_config(None, {"models.draft.vocabulary": strategy}).models.draft
        with progress_bar(quiet=as_json) as bar:
            task = bar.add_task("reading both vocabularies", total=None)
            files = resolve_target(target, progress=lambda text, _share: bar.update(task, description=text))
            match = examine(resolve_draft(draft), files, settings.vocabulary)
        if as_json:
            print(json.dumps(match.as_dict(), ensure_ascii=False))
        else:
            for name, value in match.as_dict().items():
                print(f"{name.replace('_', ' '):<24} {value}")


def _config(
    path: Path | None, settings: list[str] | None, target: str | None, draft: str | None, no_draft: bool
) -> Config:
    overrides: dict[str, object] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write section.key=value")
        overrides[key.strip()] = value
    if no_draft and draft is not None:
        raise ConfigError("--draft and --no-draft exclude each other")
    if target is not None:
        overrides["models.target.model"] = target
    if draft is not None:
        overrides["models.draft.model"] = draft
    if no_draft:
        overrides["models.draft.model"] = None
    return load_config(path, overrides)


def main() -> None:
    app()
