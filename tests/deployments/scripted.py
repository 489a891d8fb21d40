"""An engine in this process, over the core loop and scripted models, and a real HTTP server around it."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache

import numpy as np
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from deployments.openai_api import create_api
from duo_ray.config import load_config
from duo_ray.core.decode import decode
from duo_ray.core.gamma import Plan
from duo_ray.core.stats import RequestStats
from duo_ray.core.step import Decoding
from duo_ray.metrics import Figures, Meter
from duo_ray.models.scripted import ScriptedDraft, ScriptedTarget, Table, random_table
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.types import Delta, DuoRayError, Finished, Ids, Request
from tests.core.exactness import Fixed

ANSWER = "Grüße, 世界! Two emoji: 👩‍👧 and 🙂, done."
TEMPLATE = """
{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("system messages come first") }}{% endif %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{{- "<|im_start|>assistant\\n<|answer|>" }}
"""


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, without merges beyond ASCII: every character outside it is split over several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|answer|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["two emoji done and the system user assistant"] * 3, trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    special = {"eos_token": "<|im_end|>"}
    return Tokenizer(backend, special=special, chat_template=TEMPLATE)


VOCAB = 300
"""Of the models: a few more than the tokenizer's, as where an embedding is padded."""
MARK, EOS = 2, 1


def says(text: str, *, peak: float = 12.0) -> Table:
    """A model that writes `text` after the last <|answer|> (or the whole prompt's end), then EOS, then noise."""
    answer = [*tokenizer().encode_part(text), EOS]
    noise = random_table(VOCAB, seed=1, order=2, scale=1.0)

    def table(ids: Ids) -> np.ndarray:
        place = len(ids) - 1 - ids[::-1].index(MARK) if MARK in ids else 0
        written = len(ids) - place - 1
        logits = noise(ids)
        if written < len(answer):
            logits[answer[written]] += peak
        return logits

    return table


def now_and_then_wrong(table: Table) -> Table:
    """A draft that misses every fifth token."""

    def draft(ids: Ids) -> np.ndarray:
        logits = table(ids)
        if len(ids) % 5 == 0:
            logits[int(logits.argmax())] -= 30.0
        return logits

    return draft


def not_finite_from(table: Table, length: int) -> Table:
    """A model that breaks at a context of that length."""
    return lambda ids: table(ids) if len(ids) < length else np.full(VOCAB, np.nan)


class ScriptedEngine:
    """An `Engine`. `running` holds the ids of requests in work, `ended` those that were closed or finished."""

    def __init__(
        self,
        table: Table | None = None,
        *,
        settings: dict[str, object] | None = None,
        max_context: int = 512,
        pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.config = load_config(
            None, {"serving.model_name": "scripted", "sampling.temperature": 0.0} | (settings or {})
        )
        self.tokenizer = tokenizer()
        self.max_context = max_context
        self.model_name = "scripted"
        self.table = table or says(ANSWER)
        self.pause = pause
        self.meter = Meter(model="scripted", replica="only")
        self.health: DuoRayError | None = None
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.steps = 0
        self.last_token = 0.0

    async def stream(self, request: Request) -> AsyncIterator[Delta | Finished]:
        self.requests.append(request)
        self.running.add(request.request_id)
        target = ScriptedTarget(self.table, VOCAB, max_context=self.max_context)
        draft = ScriptedDraft(now_and_then_wrong(self.table), VOCAB) if request.draft else None
        decoding = Decoding(
            request,
            eos_ids=self.tokenizer.eos_ids,
            detokenizer=self.tokenizer.stream(),
            controller=Fixed(Plan(2, 6, True, "test")),
            stats=RequestStats(started=time.time()),
            max_context=self.max_context,
            draft_context=self.max_context if draft else None,
            max_sequences=2,
        )
        try:
            with closing(decode(decoding, target, draft)) as tokens:
                for _, step in itertools.groupby(tokens, lambda token: token.step):
                    self.last_token = time.monotonic()
                    yield Delta(tuple(step))
                    decoding.stats.first_token = decoding.stats.first_token or time.time()
                    self.steps += 1
                    await asyncio.sleep(self.pause())
            reason = decoding.generation.finish_reason
            stats = decoding.stats
            yield Finished(reason, stats.prompt_tokens, stats.completion_tokens, stats.as_dict() | {"cached_tokens": 3})
        finally:
            self.running.remove(request.request_id)

    async def check_health(self) -> None:
        if self.health is not None:
            raise self.health

    async def figures(self) -> list[Figures]:
        return [self.meter.figures()]


@contextmanager
def served(engine: ScriptedEngine) -> Iterator[str]:
    """The address of a real server around `engine`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(create_api(engine), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def events(text: str) -> list[dict[str, object]]:
    """The JSON of every event of a stream, which must end as OpenAI's does."""
    *blocks, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("event: error\n").removeprefix("data: ")) for block in blocks]
