"""Prompts in two forms, wrong lines by number, and the project's own."""

from __future__ import annotations

import json

import pytest

from benchmarks.tasks import TASKS, read_file, read_tasks
from duo_ray.types import DuoRayError


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_spec_bench_lines_keep_all_their_turns(tmp_path):
    line = json.dumps(
        {"question_id": 81, "category": "writing", "turns": ["One\u2028line.", "Two."]}, ensure_ascii=False
    )
    (prompt,) = read_file(write(tmp_path / "a.jsonl", line, ""), "dialogue")
    assert (prompt.id, prompt.turns) == ("81", ("One\u2028line.", "Two."))


def test_humaneval_lines_become_one_request_to_complete(tmp_path):
    line = json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "..."})
    (prompt,) = read_file(write(tmp_path / "a.jsonl", line), "code")
    assert prompt.id == "HumanEval/0"
    assert prompt.turns[0].endswith("def f():\n")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("not json", "not JSON"),
        ("[1]", "object"),
        ('{"turns": ["Hi"]}', "question_id"),
        ('{"question_id": 2}', "turns"),
        ('{"question_id": 2, "turns": []}', "turns"),
        ('{"question_id": 2, "turns": ["Hi", ""]}', "turns"),
        ('{"question_id": 2, "turns": "Hi"}', "turns"),
        ('{"question_id": 1, "turns": ["Hi"]}', "was there before"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_by_its_number(tmp_path, line, word):
    path = write(tmp_path / "qa.jsonl", '{"question_id": 1, "turns": ["Hi"]}', line)
    with pytest.raises(DuoRayError, match=rf"qa\.jsonl, line 2: .*{word}"):
        read_file(path, "qa")


def test_an_empty_or_missing_file_says_so(tmp_path):
    with pytest.raises(DuoRayError, match="no prompts"):
        read_file(write(tmp_path / "qa.jsonl"), "qa")
    with pytest.raises(DuoRayError, match=r"no math\.jsonl or math_reasoning\.jsonl"):
        read_tasks(["math"], tmp_path, None, 0)


def test_files_may_go_by_spec_benchs_names(tmp_path):
    write(tmp_path / "math_reasoning.jsonl", '{"question_id": 401, "turns": ["1 + 1?"]}')
    assert read_tasks(["math"], tmp_path, None, 0)[0].task == "math"


@pytest.mark.parametrize("task", TASKS)
def test_the_project_has_ten_different_prompts_of_its_own_for_every_task(task):
    prompts = read_tasks([task], None, None, 0)
    assert len({prompt.turns for prompt in prompts}) >= 10


def test_own_dialogues_have_several_turns():
    assert all(len(prompt.turns) >= 2 for prompt in read_tasks(["dialogue"], None, None, 0))


def test_a_seed_chooses_the_same_prompts_again_and_another_one_others():
    first, again, other = (read_tasks(["qa"], None, 4, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 4
    assert set(first) < set(read_tasks(["qa"], None, 6, 1))
