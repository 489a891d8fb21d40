"""What the two completion endpoints accept: OpenAI's parameters, one by one, and those of our own.

Every parameter of the official request is here: honoured, accepted without effect, or refused by name when it asks for
what this server cannot do. Anything else is refused with the name of the nearest known one. `null` is "not given".
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20


def _valid_unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text and has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has half a surrogate pair at character {error.start}: send valid Unicode") from None
    return text


def printable(text: str) -> str:
    """What an error message can show of a client's text: short, half surrogate pairs escaped."""
    return text[:80].encode("utf-8", "backslashreplace").decode()


def _token_keys(value: object) -> object:
    # As JSON writes integers; int() alone would take " 7", "07" and "1_0" too.
    keys = value if isinstance(value, dict) else ()
    wrong = next((key for key in keys if not (key[:20].isdecimal() and str(int(key[:20])) == key)), None)
    if wrong is not None:
        raise ValueError(f"key {printable(wrong)!r} is not a token id")
    return value


def _listed(value: object) -> object:
    """One text stands for a list of it."""
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    kinds = [part.get("type") for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    foreign = next((kind for kind in kinds if isinstance(kind, str) and kind != "text"), None)
    if foreign is not None:
        raise ValueError(f"has a part of type {printable(foreign)!r}: this model reads text only")
    return value


def _speaker(value: object) -> object:
    if value in ("tool", "function"):
        raise ValueError(f"role {value!r} is not supported: this server calls no tools")
    return value


def _prompts(value: object) -> object:
    """Any of the four forms of a prompt as the most general one: a list of texts and of lists of ids."""
    prompts = value if isinstance(value, list) and value and not _is_ids(value) else [value]
    for prompt in prompts:
        if isinstance(prompt, str):
            _valid_unicode(prompt)
        elif not _is_ids(prompt):
            raise ValueError(f"must be a text, a list of token ids, or a list of those, got {json_like(value)}")
    return prompts


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _unsupported(*neutral: object) -> BeforeValidator:
    """A parameter that cannot be honoured: only null and `neutral` values, which ask for nothing, may be given."""

    def check(value: object) -> object:
        if value is None or any(value == allowed and type(value) is type(allowed) for allowed in neutral):
            return None
        allowed = "".join(f" or give {json.dumps(choice)}" for choice in neutral)
        raise ValueError(f"is not supported by this server: leave it out{allowed}")

    return BeforeValidator(check)


def json_like(value: object) -> str:
    """A value for an error message: short, and never a deep structure."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
    text = repr(value) if isinstance(value, float | str) else _digits(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _digits(value: object) -> str:
    # Python refuses to print an integer of thousands of digits.
    return (
        f"a number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 256 else repr(value)
    )


Text = Annotated[str, AfterValidator(_valid_unicode)]
Ignored = Any
"""Accepted without effect: it steers billing, storage or hardware of the original service."""
Unsupported = Annotated[None, _unsupported()]
Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],  # with limits, pydantic checks the Unicode
    Field(max_length=MAX_STOPS),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]


class _Parameters(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        unknown = [name for name in data if name not in cls.model_fields] if isinstance(data, dict) else []
        if unknown:
            name = printable(unknown[0])
            near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(cls.model_fields)}"
            raise PydanticCustomError("unknown_parameter", "{hint}", {"name": name, "hint": hint})
        return data


class DuoOptions(_Parameters):
    """How this request is sped up; a greedy text, or what a sampled one is drawn from, does not depend on it."""

    draft: bool | None = None
    """false: the target alone."""
    draft_budget: Annotated[int | None, Field(ge=1, le=128)] = None
    """Tokens of one drafted block; null: chosen at each step."""
    max_sequences: Annotated[int | None, Field(ge=1, le=8)] = None
    """Sequences one drafted block may hold."""
    trace: bool | None = None
    """Report where every token came from, in `duo` of the response or of each chunk; for one choice only."""


class StreamOptions(_Parameters):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """End with a chunk that has the usage and no choices."""
    include_obfuscation: Ignored = None
    """Accepted without effect: chunks are never padded."""


class _Generation(_Parameters):
    """Parameters that both endpoints share. What is not given comes from the server's `sampling` settings."""

    model: str
    """A name that `/v1/models` lists."""
    stream: bool | None = None
    """Send the answer as it is written, in server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    """Answers to each prompt, drawn with the seeds seed, seed + 1, ..."""
    max_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    """Length of an answer; it ends earlier where the context is full."""
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """0 is greedy."""
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    """Keep the smallest set of most probable tokens whose mass reaches top_p."""
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    """Keep the k most probable tokens; 0 and -1 keep all."""
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    """Drop tokens less probable than min_p times the most probable one."""
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    """The same seed and request give the same text."""
    stop: Stop | None = None
    """Texts that end the answer and are cut from it."""
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    """Subtracted once from the logit of every token already in the answer."""
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    """Subtracted from the logit of a token once for each time it is in the answer."""
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    """Divides positive, multiplies negative logits of tokens in prompt or answer; 1 is off."""
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(max_length=MAX_BIASES),
        BeforeValidator(_token_keys),
    ] = None
    """Added to the logits of these token ids; -100 bans a token."""
    ignore_eos: bool | None = None
    """Go on after the model's end-of-text token."""
    duo: DuoOptions | None = None
    """This server's own options."""
    user: Ignored = None
    """Accepted without effect."""

    @model_validator(mode="after")
    def _consistent(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise_for("stream_options", "is only allowed when stream is true")
        if self.duo is not None and self.duo.trace and (self.n or 1) > 1:
            raise_for("duo.trace", "works with n=1 only")
        return self


def raise_for(parameter: str, complaint: str) -> None:
    """Refuse a parameter from a validator of the whole model."""
    raise PydanticCustomError("inconsistent", "{complaint}", {"name": parameter, "complaint": complaint})


class TextPart(_Parameters):
    type: Literal["text"]
    text: Text


class Message(_Parameters):
    """One turn of a conversation."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_speaker)]
    """developer is OpenAI's newer word for system."""
    content: Annotated[
        list[TextPart], Field(min_length=1), BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])
    ]
    """A text, or a list of text parts, which are joined by line breaks."""
    name: Text | None = None
    """Who speaks, for chat templates that show it."""
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Annotated[None, _unsupported([])] = None
    annotations: Annotated[None, _unsupported([])] = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)


class ChatRequest(_Generation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    """The conversation so far."""
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Report the log probability of every token, before temperature and truncation."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """And of that many most probable tokens at its place."""

    tools: Annotated[None, _unsupported([])] = None
    tool_choice: Annotated[None, _unsupported("none", "auto")] = None
    functions: Annotated[None, _unsupported([])] = None
    function_call: Annotated[None, _unsupported("none", "auto")] = None
    response_format: Annotated[None, _unsupported({"type": "text"})] = None
    modalities: Annotated[None, _unsupported(["text"])] = None
    audio: Unsupported = None
    moderation: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    parallel_tool_calls: Ignored = None
    """Accepted without effect, as there are no tools."""
    prediction: Ignored = None
    """Accepted without effect on the text, as it should be; the draft model does the predicting."""
    metadata: Ignored = None
    """Accepted without effect."""
    prompt_cache_key: Ignored = None
    """Accepted without effect: equal beginnings are found without it."""
    prompt_cache_options: Ignored = None
    """Accepted without effect."""
    prompt_cache_retention: Ignored = None
    """Accepted without effect."""
    safety_identifier: Ignored = None
    """Accepted without effect."""
    service_tier: Ignored = None
    """Accepted without effect."""
    store: Ignored = None
    """Accepted without effect: nothing is stored."""

    @model_validator(mode="after")
    def _consistent_chat(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise_for("max_tokens", "and max_completion_tokens mean the same: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise_for("top_logprobs", "is only allowed when logprobs is true")
        return self


class CompletionRequest(_Generation):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    """A text, a list of token ids, or a list of those; each gets n answers."""
    echo: bool | None = None
    """Begin the answer with the prompt's text."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """Report the log probability of every token and of that many most probable ones; as in a chat."""
    best_of: Annotated[int | None, Field(ge=1)] = None
    """Must equal n: answers are not ranked."""
    suffix: Annotated[None, _unsupported("")] = None

    @model_validator(mode="after")
    def _consistent_completion(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise_for("best_of", "is not supported by this server: leave it out or give the value of n")
        if self.echo and self.logprobs is not None:
            raise_for("echo", "cannot be combined with logprobs: those of the prompt are not computed")
        if self.duo is not None and self.duo.trace and len(self.prompt) > 1:
            raise_for("duo.trace", "works with one prompt only")
        return self
