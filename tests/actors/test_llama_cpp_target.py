"""A pipeline whose target is a .gguf file in llama.cpp, of a type that is repacked where that is faster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from duo_ray.config import load_config
from duo_ray.core.costs import STRETCH_S
from duo_ray.equivalence import GGUF_RESOLUTION, LARGEST_LOGIT, compare
from duo_ray.models.catalog import resolve_draft
from duo_ray.session import Duo
from duo_ray.types import ContextOverflow, InvalidRequest, Token

pytestmark = [pytest.mark.ray, pytest.mark.models]

PROMPTS = (
    "List three primes.",
    "Write a short poem about the sea.",
    "The following text is to be summarised in one sentence: " + "Rivers carry water from the hills to the sea. " * 12,
)
TOKENS = 24

_LLAMA = """
import json, sys
from llama_cpp import Llama, llama_cpp
default = llama_cpp.llama_model_default_params
def plain():
    params = default()
    params.use_extra_bufts = False
    return params
llama_cpp.llama_model_default_params = plain
llama = Llama(sys.argv[1], n_ctx=640, n_threads=1, n_threads_batch=1, verbose=False)
answers = []
for ids in json.load(sys.stdin):
    answer = []
    for token in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
        if token == llama.token_eos() or len(answer) == int(sys.argv[2]):
            break
        answer.append(token)
    answers.append(answer)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def duo(demo_q4_0: Path) -> Iterator[Duo]:
    settings = {
        "models.target.model": str(demo_q4_0),
        "models.target.engine": "llama_cpp",
        "models.target.max_seq_len": 640,
        "models.target.slots": 3,
        "models.draft.model": str(resolve_draft("demo", "Q2_K")),
        "optimization.fallback": False,
        "optimization.draft_budget": 4,
    }
    with Duo(load_config(None, settings)) as running:
        yield running


def test_the_running_target_says_what_it_is(duo: Duo) -> None:
    target = duo.pipeline.info.target
    assert (target.engine, target.dtype, target.device) == ("llama_cpp", "Q4_0", "cpu")
    assert [n for n, _ in target.timings] == [1, 2, 4, 8, 16, 32]


def test_greedy_text_is_llama_cpps_own_up_to_ties(duo: Duo, demo_q4_0: Path) -> None:
    requests = [list(duo.request(prompt).prompt) for prompt in PROMPTS]
    done = subprocess.run(
        [sys.executable, "-c", _LLAMA, str(demo_q4_0), str(TOKENS)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=True,
    )
    for prompt, expected in zip(PROMPTS, json.loads(done.stdout), strict=True):
        tokens = duo.generate(prompt, temperature=0.0, max_tokens=TOKENS, draft=False, logprobs=2).tokens
        parted = next((i for i, token in enumerate(expected) if token != tokens[i].id), None)
        if parted is not None:
            shown = tokens[parted].logprobs
            assert shown is not None
            (_, best), (second, worse) = shown.top
            assert second == expected[parted]
            assert best - worse <= GGUF_RESOLUTION * LARGEST_LOGIT


def test_plain_steps_of_a_request_alone_are_taken_together(duo: Duo) -> None:
    """The text is llama.cpp's own by the test above, whose requests are plain ones, too."""
    answer = duo.generate(PROMPTS[0], temperature=0.0, max_tokens=TOKENS, ignore_eos=True, draft=False, trace=True)
    together = [int(dict(event.details)["passes"]) for event in answer.trace if event.name == "verify"]
    assert sum(together) == answer.stats["target_steps"] == len(answer.tokens) == TOKENS
    assert [token.step for token in answer.tokens] == list(range(TOKENS))
    assert together[0] == 1  # the first token is shown at once
    if dict(duo.pipeline.info.target.timings)[1] < STRETCH_S / 4:  # on a slow machine a step is a stretch by itself
        assert max(together) > 1


def test_with_a_draft_greedy_text_is_the_targets_own_up_to_ties(duo: Duo) -> None:
    comparisons = [compare(duo, prompt, max_tokens=TOKENS) for prompt in PROMPTS]
    assert all(comparison.verdict in ("equal", "tie") for comparison in comparisons), comparisons


def test_drafted_tokens_are_accepted_beside_other_requests_and_after_a_cancelled_one(duo: Duo) -> None:
    with ThreadPoolExecutor(3) as pool:
        running = [
            pool.submit(duo.generate, prompt, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            for prompt in PROMPTS[1:]
        ]
        stream = duo.stream(PROMPTS[0], temperature=0.7, seed=1, max_tokens=200)
        assert isinstance(next(stream), Token)
        stream.close()  # type: ignore[attr-defined]
        answers = [each.result() for each in running]
    assert all(len(answer.tokens) == TOKENS for answer in answers)
    assert sum(int(str(answer.stats["accepted_tokens"])) for answer in answers) > 0
    again = duo.generate(PROMPTS[1], temperature=0.0, max_tokens=TOKENS)
    assert int(str(again.stats["cached_tokens"])) > 0


def test_a_seed_gives_the_same_text_again(duo: Duo) -> None:
    first, second = (duo.generate(PROMPTS[1], temperature=0.8, seed=5, max_tokens=12).text for _ in range(2))
    assert first == second


def test_more_than_the_context_holds_is_refused_and_the_next_request_works(duo: Duo) -> None:
    with pytest.raises((ContextOverflow, InvalidRequest)):
        duo.generate("word " * 700, max_tokens=8)
    assert duo.generate(PROMPTS[0], temperature=0.0, max_tokens=4).tokens
