"""Several pipelines of a cluster write a target's answers, read by Ray tasks beside them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray

from duo_ray.config import load_config
from duo_ray.distillation.data import Answer, _read_here, _read_there, read_questions, write_answers
from duo_ray.session import Duo
from duo_ray.types import DuoRayError
from tests.distillation.models import small_config, write_model, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.models]


@pytest.fixture(scope="module")
def duos(cluster, demo_target, tmp_path_factory):
    """Two pipelines with one tiny target."""
    folder = tmp_path_factory.mktemp("target")
    target = write_model(folder / "tiny", small_config("llama", 49152, max_position_embeddings=8192), demo_target)
    settings = {
        "hardware.machine": "cluster", "models.target.model": str(target), "models.target.device": "cpu",
        "models.target.precision": "fp32", "models.target.threads": 1, "models.target.slots": 2,
        "models.target.max_seq_len": 8192, "models.draft.model": None, "optimization.warmup_steps": 1,
    }  # fmt: skip
    with Duo(load_config(None, settings)) as first, Duo(first.prepared) as second:
        yield first, second


def options(duo, count):
    return duo.request(
        "Tell me about the sea.", max_tokens=count, stop=(), ignore_eos=True, logprobs=64, temperature=0.0
    )


def test_an_answer_is_the_same_wherever_it_is_read(duos):
    here = _read_here(duos[0], options(duos[0], 12), threading.Event())
    for duo in duos:
        there = _read_there(duo, options(duo, 12), threading.Event())
        for name in ("prompt", "answer"):
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
        np.testing.assert_allclose(here.top_probs, there.top_probs, atol=1e-3)


def test_whoever_stops_ends_the_work_on_it(duos):
    duo, stop = duos[0], threading.Event()

    def running():
        return ray.get(duo.pipeline.reader.coordinator.load.remote()).running

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read_there, duo, options(duo, 8000), stop)
        deadline = time.monotonic() + 120
        while not running():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stop.set()
        assert reading.result(timeout=60) is None
    assert not running()


def test_what_goes_wrong_there_is_one_line_here(duos):
    duo = duos[0]
    with pytest.raises(DuoRayError, match="context") as error:
        _read_there(duo, duo.request("sea " * 9000), threading.Event())
    assert "\n" not in str(error.value)


def test_all_answers_are_written_by_both_together(duos, tmp_path):
    config, tokenizer = duos[0].prepared.config, duos[0].prepared.tokenizer
    path = write_prompts(tmp_path / "prompts.jsonl", 12)
    questions = read_questions(path, config, tokenizer, context=8192, raw=False, max_tokens=6, samples=1)
    folder = tmp_path / "answers"
    folder.mkdir()
    write_answers(duos, questions, folder, until=lambda: False, progress=lambda *_: None)
    shards = questions.shards(folder)
    assert all(0 < len(Answer.load(path).answer) <= 6 for _, _, path in shards)
    assert len(shards) == 24
