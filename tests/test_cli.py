"""The command line as a user meets it: real processes, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DUO_RAY = str(Path(sys.executable).with_name("duo-ray"))
SMALL = ("--set", "models.target.precision=fp32", "--set", "models.target.max_seq_len=512",
         "--set", "optimization.warmup_steps=6")  # fmt: skip


def run(*arguments, timeout=300, **options):
    return subprocess.run(
        [DUO_RAY, *arguments], capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def refused(*arguments):
    """Run a command that must fail with one line on standard error and exit code 2; returns the line."""
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    return line


def test_help_names_every_command():
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("generate", "check", "diagnose", "doctor", "quantize", "distill"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "optimization.draft_budgt=4"], ["draft_budgt", "draft_budget"]),
        (["--set", "models.target.precision=fp16"], ["precision", "fp16", "CPU"]),
        (["--set", "hardware.cpu_affinity=4000"], ["cpu_affinity", "4000"]),
        (["--set", "models.target.max_seq_len=999999"], ["max_seq_len", "999999"]),
        (["--set", "models.draft.threads=512"], ["threads", "512"]),
        (["--target", "/nowhere/model.gguf"], ["/nowhere/model.gguf"]),
        (["--draft", __file__], ["GGUF"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--set", "models.target.max_seq_len=16"], ["16", "the prompt has"]),
        (["--trace", "/nowhere/trace.json"], ["/nowhere"]),
        (["--config", "/nowhere/config.yaml"], ["/nowhere/config.yaml"]),
        (["--draft", "demo", "--no-draft"], ["--no-draft"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
@pytest.mark.models
def test_a_wrong_setting_is_one_line_before_any_actor_starts(arguments, words, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # who joined a cluster now would say that none is there
    line = refused("generate", "Hi", *arguments)
    assert all(word in line for word in words), line
    assert "Traceback" not in line


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.usefixtures("cluster")
def test_generate_json_is_one_object_with_text_ids_usage_and_stats(tmp_path):
    trace = tmp_path / "trace.json"
    done = run(
        "generate",
        "--json",
        "--temperature",
        "0",
        "--max-tokens",
        "40",
        "--trace",
        str(trace),
        *SMALL,
        "Count from one to forty in words.",
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "stats"}
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) <= 40
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {"target", "draft-0", "coordinator"}


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.usefixtures("cluster")
def test_text_streams_to_standard_output_and_the_figures_to_standard_error():
    done = run("generate", "--temperature", "0", "--max-tokens", "8", *SMALL, "-", input="Explain gravity.")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "\x1b" not in done.stdout
    assert "tokens/s" in done.stderr


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.usefixtures("cluster")
def test_colours_show_origins_with_a_legend():
    done = run(
        "generate", "--color", "--temperature", "0", "--max-tokens", "40", *SMALL, "Count from one to forty in words."
    )
    assert all(origin in done.stdout for origin in ("accepted", "correction", "bonus", "plain"))
    assert "\x1b[32m" in done.stdout


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.usefixtures("cluster")
def test_check_counts_equal_answers(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"turns": ["Count to five.", "And on."]}\n')
    done = run("check", "--prompts", str(prompts), "--max-tokens", "12", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["equal"], report["tie"], report["different"]) == (2, 0, 0)


def test_check_names_the_line_that_is_no_prompt(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"question": "?"}\n')
    assert "line 2" in refused("check", "--prompts", str(prompts))


@pytest.mark.models
def test_doctor_says_what_was_chosen_and_what_is_wrong():
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stdout  # a busy machine is a warning
    report = json.loads(done.stdout)
    assert report["sections"]["machine"]["cores"]
    assert report["sections"]["choices"]["target precision"] in ("float32", "bfloat16")
    wrong = run("doctor", "--json", "--set", "models.target.device=cuda:7")
    assert wrong.returncode == 1
    assert any("cuda:7" in problem for problem in json.loads(wrong.stdout)["problems"])


@pytest.mark.models
def test_quantize_makes_a_smaller_file_and_names_a_wrong_type(demo_gguf, tmp_path):
    out = tmp_path / "small.gguf"
    assert run("quantize", str(demo_gguf), str(out), "--type", "Q2_K").returncode == 0
    assert 0 < out.stat().st_size < demo_gguf.stat().st_size
    assert "Q9_Z" in refused("quantize", str(demo_gguf), str(tmp_path / "x.gguf"), "--type", "Q9_Z")


@pytest.mark.models
def test_vocab_reports_what_two_vocabularies_have_in_common():
    done = run("vocab", "demo", "demo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["strategy"] == "same"
    assert report["target_ids"] == report["draft_ids"] == report["same_ids"] == 49152
    assert report["chat_markers_of_the_draft"] == ["<|im_start|>", "<|im_end|>"]


def test_vocab_refuses_an_unknown_strategy_with_the_known_ones():
    line = refused("vocab", "demo", "demo", "--strategy", "sane")
    assert all(word in line for word in ("sane", "auto", "same", "intersection", "string")), line
