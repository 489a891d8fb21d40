"""Order, conversations, resuming and figures, with methods that answer at once."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from benchmarks import harness, report
from benchmarks.harness import Journal, chosen, converse, schedule
from benchmarks.measured import Run, Turn
from benchmarks.tasks import Prompt
from duo_ray.types import DuoRayError

PROMPTS = [Prompt("qa", str(i), ("Hi",)) for i in range(12)]
SETTINGS = {"tokens": 8, "seed": 0}


class Letters:
    """A tokenizer whose ids are code points; 0 ends an answer."""

    has_chat_template = True
    eos_ids = frozenset({0})

    def chat(self, messages):
        return [ord(c) for message in messages for c in f"{message['role'][0]}:{message['content']};"]

    def stream(self):
        return self

    def push(self, token):
        return chr(token)

    def flush(self):
        return ""


class Echo:
    """A method that answers with the number of the turn."""

    def __init__(self):
        self.asked, self.cleared = [], 0

    def generate(self, ids, max_tokens, *, trace=False):
        self.asked.append("".join(map(chr, ids)))
        return Turn(len(ids), (ord(str(len(self.asked))), 0), (0.5, 0.75), 0.1)

    def between(self):
        self.cleared += 1

    def peak_bytes(self):
        return {"echo": 1}

    def describe(self):
        return "echo"


def turn(ids=(1, 2, 3, 4), seconds=2.0, stats=None):
    at = tuple(seconds * (i + 1) / len(ids) for i in range(len(ids)))
    return Turn(5, tuple(ids), at, 0.4, stats or {})


def run(method, prompt="1", task="qa", **others):
    return Run(task, prompt, method, (turn(**others),), {"target": 100})


# --- order


def test_every_method_answers_every_prompt_once():
    pairs = Counter((prompt.id, method) for prompt, method in schedule(PROMPTS, ["a", "b", "c"], 0))
    assert set(pairs.values()) == {1}
    assert len(pairs) == 3 * len(PROMPTS)


def test_methods_take_turns_at_being_first_and_the_order_changes():
    orders = [
        tuple(method for _, method in group)
        for _, group in itertools.groupby(schedule(PROMPTS, ["a", "b", "c"], 0), key=lambda pair: pair[0].id)
    ]
    assert set(Counter(order[0] for order in orders).values()) == {4}
    assert len(set(orders)) > 3


def test_the_same_seed_gives_the_same_order():
    first, again, other = (list(schedule(PROMPTS, ["a", "b", "c", "d"], seed)) for seed in (1, 1, 2))
    assert first == again != other


# --- conversations


def test_a_later_turn_comes_after_the_methods_own_answer():
    method = Echo()
    turns = list(converse(method, Prompt("dialogue", "1", ("Hi", "And?")), Letters(), 8, trace=False))
    assert len(turns) == 2
    assert method.asked == ["u:Hi;", "u:Hi;a:1;u:And?;"]


def test_a_run_ends_with_empty_caches_and_a_failure_is_a_run():
    method = Echo()
    done = harness._run(method, Prompt("qa", "1", ("Hi",)), "echo", Letters(), 8, trace=False)
    assert (done.error, done.tokens, method.cleared) == (None, 2, 1)

    def fail(*_args, **_options):
        raise DuoRayError("it broke")

    method.generate = fail
    assert harness._run(method, Prompt("qa", "1", ("Hi",)), "echo", Letters(), 8, trace=False).error == "it broke"


# --- resuming


def test_a_journal_goes_on_where_it_was_and_tries_failed_runs_again(tmp_path):
    journal = Journal(tmp_path, SETTINGS)
    journal.add(run("duo", stats={"draft_tokens": 3}))
    journal.add(Run("qa", "2", "duo", error="it broke"))
    again = Journal(tmp_path, SETTINGS)
    assert again.runs == journal.runs
    assert again.done == {("qa", "1", "duo")}


def test_half_a_line_at_the_end_is_dropped(tmp_path):
    journal = Journal(tmp_path, SETTINGS)
    journal.add(run("duo"))
    with journal.path.open("a") as file:
        file.write('{"task": "qa", "pro')
    again = Journal(tmp_path, SETTINGS)
    again.add(run("target"))
    assert [each.method for each in Journal(tmp_path, SETTINGS).runs] == ["duo", "target"]


def test_other_settings_need_another_directory(tmp_path):
    Journal(tmp_path, SETTINGS)
    with pytest.raises(DuoRayError, match=r"other settings \(tokens\).*--out"):
        Journal(tmp_path, SETTINGS | {"tokens": 9})


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    (tmp_path / "runs.jsonl").write_text("hello\nworld\n")
    with pytest.raises(DuoRayError, match="no journal"):
        Journal(tmp_path, SETTINGS)


@pytest.mark.parametrize(("asked", "names"), [("all", ("a", "b")), ("b", ("b",)), ("b, a,b", ("b", "a"))])
def test_names_are_a_list_or_all(asked, names):
    assert chosen(asked, ["a", "b"], "method") == names


@pytest.mark.parametrize("asked", ["c", "a,c", "", ","])
def test_an_unknown_name_is_refused_with_those_there_are(asked):
    with pytest.raises(DuoRayError, match="a, b"):
        chosen(asked, ["a", "b"], "method")


# --- figures


def test_phi_is_the_median_over_the_prompts_of_speed_against_the_target_alone():
    runs = [run("target", str(i), seconds=2.0) for i in range(3)]
    runs += [run("duo", str(i), seconds=seconds) for i, seconds in enumerate((1.0, 0.5, 4.0))]
    row = report.summarise(runs)["qa"]["duo"]
    assert (row["phi"], row["phi_least"], row["phi_most"]) == (2.0, 0.5, 4.0)
    assert row["tokens_per_s"] == 4.0
    assert row["cpu_seconds_per_token"] == pytest.approx(0.1)


def test_texts_are_compared_token_by_token_with_the_targets():
    runs = [run("target", "1"), run("target", "2"), run("duo", "1"), run("duo", "2", ids=(1, 2, 3, 5))]
    assert report.summarise(runs)["qa"]["duo"]["equal"] == "1/2"


def test_tokens_that_come_together_have_no_gap():
    together = Run("qa", "1", "duo", (Turn(5, (1, 2, 3), (1.0, 1.0, 3.0), 0.1),))
    row = report.summarise([together])["qa"]["duo"]
    assert row["gap_p50_ms"] == 1000.0
    assert row["gap_p99_ms"] == pytest.approx(1980.0)
    assert row["ttft_ms"] == 1000.0


def test_failed_runs_are_named_and_do_not_count(tmp_path):
    runs = [run("target"), run("duo"), Run("qa", "2", "duo", error="it broke")]
    text = report.write_report(runs, {"methods": {"duo": "all of it"}}, tmp_path)
    assert "duo on qa 2: it broke" in text
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["summary"]["qa"]["duo"]["runs"] == 1


def test_tasks_are_reported_apart_and_together():
    runs = [run(method, task=task) for method in ("target", "duo") for task in ("qa", "math")]
    summary = report.summarise(runs)
    assert list(summary) == ["qa", "math", report.ALL]
    assert summary[report.ALL]["duo"]["runs"] == 2


def test_methods_are_listed_in_the_order_they_were_asked_for():
    runs = [run(method) for method in ("b", "target", "a")]
    assert list(report.summarise(runs, ("target", "a"))["qa"]) == ["target", "a", "b"]
