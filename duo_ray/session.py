"""A pipeline of one's own, text in and text out: what the command line uses, and any Python program can."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from duo_ray.actors.launch import Pipeline, new_request_id
from duo_ray.actors.prepare import Prepared, Progress, prepare
from duo_ray.closing import Closing
from duo_ray.config import Config, load_config
from duo_ray.core.step import check_prompt
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.types import Delta, Finished, FinishReason, Ids, InvalidRequest, Request, SamplingParams, Token, TraceEvent

logger = logging.getLogger(__name__)

Prompt = str | Sequence[Mapping[str, Any]]
"""A user's text, or a conversation: {"role": ..., "content": ...} each."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished generation."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stats: dict[str, object]
    trace: tuple[TraceEvent, ...] = ()

    @property
    def token_ids(self) -> Ids:
        return tuple(token.id for token in self.tokens)

    def as_dict(self) -> dict[str, object]:
        """The object that `duo-ray generate --json` prints."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": str(self.finish_reason),
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            },
            "stats": self.stats,
        }


class Duo(Closing):
    """Starts a pipeline and answers prompts.

        with Duo() as duo:
            print(duo.generate("Explain gravity to a child.").text)

    Args:
        config: settings, or what `prepare` made of them; None is the demo pair with defaults.
        progress: told what start-up is busy with.
    """

    def __init__(
        self, config: Config | Prepared | None = None, *, progress: Progress = lambda _text, _share: None
    ) -> None:
        if not isinstance(config, Prepared):
            config = prepare(config or load_config(), progress=progress)
        self.prepared = config
        for line in (*self.prepared.notes, *(f"{name}: {size}" for name, size in self.prepared.memory.items())):
            logger.info("%s", line)
        self.pipeline = Pipeline(self.prepared.settings, progress=lambda text: progress(text, None))
        try:
            self.prepared.keep_calibration(self.pipeline.info)
        except BaseException:
            self.close()
            raise
        for match in dict.fromkeys(draft.vocabulary for draft in self.pipeline.info.drafts):
            if not match.report.same:
                logger.warning("warning: %s", match.describe())

    def request(self, prompt: Prompt, **options: Any) -> Request:
        """A request for this pipeline; options as for `build_request`."""
        return checked_request(self.prepared, prompt, **options)

    def stream(self, prompt: Prompt | Request, **options: Any) -> Iterator[Token | Finished]:
        """Tokens as they become certain, then `Finished`; options as for `build_request`."""
        request = prompt if isinstance(prompt, Request) else self.request(prompt, **options)
        with contextlib.closing(self.pipeline.stream(request)) as items:
            for item in items:
                yield from unpacked(item)

    def generate(self, prompt: Prompt | Request, **options: Any) -> Answer:
        """The whole answer; options as for `build_request`."""
        return collect(self.stream(prompt, **options))

    def close(self) -> None:
        """Free every process and resource."""
        self.pipeline.close()
        self.prepared.claims.release()


def checked_request(prepared: Prepared, prompt: Prompt, **options: Any) -> Request:
    """A request for the pipeline that these preparations will start; options as for `build_request`.

    Raises:
        InvalidRequest: a parameter out of range or unknown, by name.
        ContextOverflow: the prompt does not fit.
    """
    request = build_request(prepared.config, prepared.tokenizer, prompt, **options)
    check_prompt(request, prepared.settings.target.max_context)
    return request


def build_request(
    config: Config,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    raw: bool = False,
    draft: bool = True,
    max_tokens: int | None = None,
    stop: Sequence[str] | None = None,
    ignore_eos: bool = False,
    draft_budget: int | None = None,
    max_sequences: int | None = None,
    draft_quant: str | None = None,
    trace: bool = False,
    seed: int | None = None,
    **sampling: Any,
) -> Request:
    """A request; what is None or left out comes from the configuration's `sampling` section.

    Args:
        tokenizer: the target's.
        raw: complete the text as it stands instead of answering it by the chat template.
        sampling: fields of `SamplingParams`.

    Raises:
        InvalidRequest: a parameter out of range or unknown, by name.
    """
    defaults = config.sampling
    if not isinstance(prompt, str):
        ids = tokenizer.chat(prompt)
    elif raw or not tokenizer.has_chat_template:
        ids = tokenizer.encode(prompt)
    else:
        ids = tokenizer.chat([{"role": "user", "content": prompt}])
    for name in sampling:
        if name not in SamplingParams.__dataclass_fields__:
            raise InvalidRequest(f"{name} is not an option; {_nearest_option(name)}")
    params = config.sampling_params(seed=secrets.randbits(62))
    given = {name: value for name, value in sampling.items() if value is not None}
    seed = defaults.seed if seed is None else seed
    params = replace(params, seed=params.seed if seed is None else seed, **given)
    return Request(
        request_id=new_request_id(),
        prompt=tuple(ids),
        sampling=params,
        max_tokens=defaults.max_tokens if max_tokens is None else max_tokens,
        stop=tuple(defaults.stop if stop is None else stop),
        ignore_eos=ignore_eos,
        draft=draft,
        reproducible=seed is not None and not params.greedy,
        draft_budget=draft_budget,
        max_sequences=max_sequences,
        draft_quant=draft_quant,
        trace=trace,
    )


def _nearest_option(name: str) -> str:
    own = [option for option in inspect.signature(build_request).parameters if option != "sampling"][3:]
    known = [*own, *SamplingParams.__dataclass_fields__]
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(dict.fromkeys(known))}"


def unpacked(item: Delta | Finished) -> Sequence[Token | Finished]:
    """What a stream of tokens shows of one item of a stream of deltas."""
    return (item,) if isinstance(item, Finished) else item.tokens


def collect(stream: Iterable[Token | Finished]) -> Answer:
    """What a stream amounted to."""
    tokens: list[Token] = []
    for item in stream:
        if isinstance(item, Finished):
            text = "".join(token.text for token in tokens)
            counts = item.prompt_tokens, item.completion_tokens
            return Answer(text, tuple(tokens), item.reason, *counts, item.stats, item.trace)
        tokens.append(item)
    raise RuntimeError("the stream ended without its end")
