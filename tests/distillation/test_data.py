"""Prompts that are checked before anything starts, and answers as they are kept."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from duo_ray.config import load_config
from duo_ray.distillation import data
from duo_ray.distillation.data import TOP, Answer, Questions, read_questions, write_answers
from duo_ray.distillation.workspace import DistillationError
from duo_ray.models.tokenizer import Tokenizer
from duo_ray.types import Finished, FinishReason, Origin, Request, SamplingParams, Token, TokenLogprobs
from tests.models.tokenizers import byte_level


def read(path, lines, **changes):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(text.encode(errors="surrogateescape"))
    options = {"context": 64, "raw": True, "max_tokens": 16, "samples": 1, **changes}
    return read_questions(path, load_config(), Tokenizer(byte_level()), **options)


def test_every_bad_line_is_named_by_its_number(tmp_path):
    lines = [
        {"prompt": "fine"}, '{"prompt": ', {"prompt": "  "}, {"prompt": "also fine"}, {"text": "no"},
        {"prompt": "字" * 60}, {"messages": [{"role": "user", "content": "fine too"}]}, {"messages": ["hi"]},
        {"messages": [{"role": "user", "content": " "}]}, '{"prompt": "\u2028 is no end of a line"}', "\udcff",
    ]  # fmt: skip
    with pytest.raises(DistillationError) as error:
        read(tmp_path / "prompts.jsonl", lines)
    text = str(error.value)
    assert [f"line {number}:" in text for number in range(1, 12)] == [
        False, True, True, False, True, True, False, True, True, False, True,
    ]  # fmt: skip
    assert "not JSON" in text
    assert "empty" in text
    assert "the 64 that target and student hold" in text


def test_a_repeated_prompt_counts_once(tmp_path):
    found = read(tmp_path / "prompts.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"turns": ["a"]}])
    assert found.prompts == ("a", "b")


def test_one_prompt_is_not_enough(tmp_path):
    with pytest.raises(DistillationError, match="at least 2"):
        read(tmp_path / "prompts.jsonl", [{"prompt": "a"}, {"prompt": "a"}])


@pytest.mark.parametrize(("count", "held_out"), [(2, {1}), (9, {8}), (10, {9}), (25, {9, 19})])
def test_every_tenth_prompt_is_held_out_and_one_at_least(count, held_out):
    assert Questions(tuple(map(str, range(count))), True, 8, 1).held_out == held_out


@pytest.mark.parametrize("count", [240, 300, 5000])
def test_of_many_prompts_24_at_most_are_held_out(count):
    held_out = Questions(tuple(map(str, range(count))), True, 8, 1).held_out
    assert 20 <= len(held_out) <= 24
    assert max(held_out) > 0.9 * count


def test_wherever_the_time_ends_a_tenth_of_the_answers_is_to_held_out_prompts(tmp_path):
    questions = Questions(tuple(map(str, range(1000))), True, 8, 1)
    order = [number for sample, number, _ in questions.shards(tmp_path) if sample == 0]
    assert sorted(order) == list(range(1000))
    for count in (10, 50, 200):
        assert len(questions.held_out.intersection(order[:count])) == count // 10


def test_held_out_prompts_are_sampled_once(tmp_path):
    questions = Questions(tuple(map(str, range(12))), True, 8, 3)
    shards = questions.shards(tmp_path)
    assert [number for sample, number, _ in shards if sample == 0] == [9, *range(9), 10, 11]
    assert [sample for sample, number, _ in shards if number == 9] == [0, 1]
    assert len({path for _, _, path in shards}) == len(shards) == 4 * 11 + 2


def test_only_answers_that_are_there_are_trained_on_and_held_out_ones_never(tmp_path):
    questions = Questions(tuple(map(str, range(12))), True, 8, 1)
    for name in ("0-000009", "1-000003", "0-000011"):
        (tmp_path / f"{name}.npz").touch()
    (tmp_path / "0-000004.part").touch()
    training, testing = questions.split(tmp_path)
    assert {path.stem for path in training} == {"1-000003", "0-000011"}
    assert {path.stem for path in testing} == {"0-000009"}


def test_too_few_answers_say_so(tmp_path):
    with pytest.raises(DistillationError, match="--minutes"):
        Questions(("a", "b"), True, 8, 1).split(tmp_path)


def test_an_answer_is_read_as_it_was_written(tmp_path):
    random = np.random.default_rng(0)
    logprobs = np.sort(random.normal(-6, 2, (5, TOP)), -1)[:, ::-1]
    tokens = [
        Token(number, "", Origin.PLAIN, 0, TokenLogprobs(0.0, tuple((i, float(x)) for i, x in enumerate(row))))
        for number, row in enumerate(logprobs)
    ]
    Answer.of((7, 8), tokens).save(tmp_path / "a.npz")
    found = Answer.load(tmp_path / "a.npz")
    assert found.prompt.tolist() == [7, 8]
    assert found.answer.tolist() == [0, 1, 2, 3, 4]
    assert found.top_ids.shape == (5, TOP)
    np.testing.assert_allclose(found.top_probs.astype(float), np.exp(logprobs), rtol=1e-3, atol=1e-7)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


class ScriptedDuo:
    """A pipeline with 4 slots that answers with 3 tokens, but a prompt that says so for ever."""

    prepared = SimpleNamespace(settings=SimpleNamespace(target=SimpleNamespace(slots=4)), config=load_config())

    def __init__(self):
        self.opened, self.closed = 0, 0

    def request(self, prompt, **options):
        request = Request(prompt, (1, 2), SamplingParams(temperature=options["temperature"]), options["max_tokens"])
        return replace(request, reproducible=True)

    def stream(self, request):
        self.opened += 1
        token = Token(5, "", Origin.PLAIN, 0, TokenLogprobs(-1.0, tuple((i, -4.0) for i in range(TOP))))
        try:
            yield from (token,) * 3
            while request.request_id == "endless":
                time.sleep(0.01)
                yield token
            yield Finished(FinishReason.LENGTH, 2, 3, {})
        finally:
            self.closed += 1


def test_every_answer_becomes_a_shard_and_what_is_there_is_not_asked_for_again(tmp_path):
    questions, duo = Questions(tuple(map(str, range(12))), True, 8, 1), ScriptedDuo()
    (tmp_path / "0-000003.npz").touch()
    shares = []
    write_answers([duo], questions, tmp_path, until=lambda: False, progress=lambda _, share: shares.append(share))
    assert duo.opened == duo.closed == 23
    assert all(path.is_file() for _, _, path in questions.shards(tmp_path))
    assert Answer.load(tmp_path / "1-000011.npz").answer.tolist() == [5, 5, 5]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_when_the_time_is_over_there_is_still_something_to_train_with(tmp_path):
    questions, duo = Questions(tuple(map(str, range(40))), True, 8, 1), ScriptedDuo()
    write_answers([duo], questions, tmp_path, until=lambda: True, progress=lambda *_: None)
    assert 16 <= len(list(tmp_path.iterdir())) < 20  # 4 at once may see that 15 were begun
    training, testing = questions.split(tmp_path)
    assert len(testing) == 2
    assert training


def test_an_interruption_ends_the_answers_being_written_and_keeps_those_that_are(tmp_path):
    questions, duo = Questions(("0", "endless", "also 0", "1"), True, 8, 1), ScriptedDuo()

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers([duo], questions, tmp_path, until=lambda: False, progress=interrupt)
    assert duo.opened == duo.closed
    written = {path.name for path in tmp_path.iterdir()}
    assert written
    assert written <= {path.name for _, number, path in questions.shards(tmp_path) if number != 1}


def test_several_pipelines_share_the_answers_and_none_gets_more_at_once_than_it_has_slots(tmp_path, monkeypatch):
    questions, duos = Questions(tuple(map(str, range(12))), True, 8, 1), [ScriptedDuo(), ScriptedDuo()]
    most = []

    def read(duo, request, stop):
        most.append(duo.opened - duo.closed)
        time.sleep(0.01)
        return data._read_here(duo, request, stop)

    monkeypatch.setattr(data, "_read_there", read)
    write_answers(duos, questions, tmp_path, until=lambda: False, progress=lambda *_: None)
    assert all(path.is_file() for _, _, path in questions.shards(tmp_path))
    assert sum(duo.opened for duo in duos) == len(questions.shards(tmp_path))
    assert min(duo.opened for duo in duos) >= 4
    assert max(most) < 4
