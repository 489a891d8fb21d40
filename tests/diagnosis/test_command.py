"""`duo-ray diagnose` on the demo pair with a coarse draft, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from duo_ray.cli import app
from tests.test_cli import SMALL, run


@pytest.mark.ray
@pytest.mark.models
@pytest.mark.usefixtures("cluster")
def test_a_coarse_draft_is_diagnosed_with_json_and_html(tmp_path):
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.html"
    prompts.write_text('{"prompt": "Why does ice float?"}\n{"turns": ["Count from one to ten in words."]}\n')
    done = run(
        "diagnose", "--prompts", str(prompts), "--max-tokens", "16", "--set", "models.draft.quant=Q2_K", "--json",
        "--html", str(report), *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["draft_quantisation"] == "Q2_K"
    assert found["texts"] == 4  # two greedy, two sampled
    everything = found["distributions"]["all"]
    assert 0.01 < everything["kl_nats"] < 3.0
    assert 0.05 < everything["total_variation"] < 0.7
    greedy = found["acceptance"]["greedy"]
    assert 0.2 < greedy["predicted"]["value"] < 1.0
    assert greedy["predicted"]["count"] <= everything["tokens"] <= 64
    assert found["vocabulary"]["strategy"] == "same"
    assert found["speed"]["alone_tokens_per_s"] > 0
    assert found["simulated"]["t_target_over_t_draft"] > 0
    assert found["advice"]
    assert report.read_text().count("<svg") == 6


def refused(*arguments: str) -> str:
    """The error of a command that must fail with exit code 2."""
    done = CliRunner().invoke(app, ["diagnose", *arguments], terminal_width=120)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    return done.stderr


def test_a_line_that_is_no_prompt_is_named(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hi"}\nnot JSON\n')
    assert "prompts.jsonl, line 2" in refused("--prompts", str(prompts))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "none"], ["--draft"]),
        (["--html", "/nowhere/report.html"], ["--html", "/nowhere/report.html"]),
        (["--set", "hardware.machine=cluster"], ["hardware.machine"]),
        (["--set", "models.draft.quant=auto"], ["models.draft.quant"]),
        (["--prompts", "/nowhere/prompts.jsonl"], ["/nowhere/prompts.jsonl"]),
        (["--temperature", "0"], ["--temperature"]),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_before_anything_starts(arguments, words):
    error = refused(*arguments)
    assert all(word in error for word in words), error
    assert "Traceback" not in error


def test_the_help_says_what_is_measured():
    done = CliRunner().invoke(app, ["diagnose", "--help"])
    assert done.exit_code == 0
    assert all(word in done.stdout for word in ("--prompts", "--html", "KL", "acceptance", "simulated"))
