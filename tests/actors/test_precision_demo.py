"""The demo pair with its draft in Q4_1, Q4_0 and Q2_K: no text depends on which of them wrote the drafts."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from duo_ray.config import load_config
from duo_ray.session import Duo
from tests.actors.conftest import SMALL
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.ray, pytest.mark.models]

COUNT = 32


@pytest.fixture(scope="module")
def duo():
    with Duo(load_config(None, {**SMALL, "models.draft.quant": "auto"})) as running:
        yield running


@pytest.fixture(scope="module")
def own(duo, reference):
    prompts = [duo.request(prompt).prompt for prompt in PROMPTS[:4]]
    return list(zip(PROMPTS[:4], reference(prompts, COUNT), strict=True))


def test_all_were_measured_before_the_first_request(duo):
    info = duo.pipeline.info
    assert [each.quant for each in info.precision] == ["Q4_1", "Q4_0", "Q2_K"]
    assert all(dict(timings)[1] > 0 for timings in info.drafts[0].timings.values())
    fine, _, coarse = info.precision
    assert fine.token > coarse.token
    assert sum(each.in_use for each in info.precision) == 1
    assert all(trial["judged"] > 20 for trial in info.calibration["trials"].values())


def test_greedy_ids_are_the_targets_own_whichever_wrote_the_drafts_and_however_they_take_turns(duo, own):
    for prompt, wanted in own:
        for quant in ("Q4_1", "Q2_K", "Q4_0", "Q4_1"):
            answer = duo.generate(prompt, temperature=0.0, max_tokens=COUNT, draft_quant=quant)
            assert (answer.stats["draft_quant"], list(answer.token_ids)) == (quant, wanted), prompt
            assert answer.stats["draft_tokens"] > 0


def test_greedy_ids_are_the_targets_own_when_different_ones_share_rounds(duo, own):
    got = {}

    def ask(index, prompt, quant):
        got[index] = duo.generate(prompt, temperature=0.0, max_tokens=COUNT, draft_quant=quant)

    quants = ("Q4_1", "Q2_K", "Q4_0", "Q2_K")
    threads = [threading.Thread(target=ask, args=(i, prompt, quants[i])) for i, (prompt, _) in enumerate(own)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [list(got[i].token_ids) for i in range(len(own))] == [wanted for _, wanted in own]


def test_a_seed_gives_the_same_text_whatever_others_use_meanwhile(duo):
    ask = {"temperature": 1.0, "seed": 7, "max_tokens": COUNT, "ignore_eos": True}
    first = duo.generate("Tell me about rivers.", **ask)
    duo.generate("Tell me about rivers.", temperature=0.0, max_tokens=COUNT, draft_quant="Q2_K")
    again = duo.generate("Tell me about rivers.", **ask)
    assert again.token_ids == first.token_ids
    assert again.stats["draft_quant"] == first.stats["draft_quant"] == duo.pipeline.info.calibration["quant"]


def test_a_draft_that_comes_back_has_all_of_them(duo, own):
    """Last in this file: it kills the draft."""
    pid = duo.pipeline.info.drafts[0].pid
    prompt, wanted = own[0]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    for quant in ("Q2_K", "Q4_1"):
        while True:
            answer = duo.generate(prompt, temperature=0.0, max_tokens=COUNT, draft_quant=quant)
            assert list(answer.token_ids) == wanted
            if answer.stats["draft_tokens"]:
                break
            assert time.monotonic() < deadline
    assert duo.pipeline.describe().draft_restarts == 1
