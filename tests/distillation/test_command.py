"""`duo-ray distill`: what it refuses, killed and resumed on a tiny target, and the whole path on the demo model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from duo_ray.distillation.workspace import write_json
from duo_ray.models.catalog import resolve_draft
from duo_ray.models.llama_cpp import LlamaCppDraft
from duo_ray.models.tokenizer import Tokenizer
from tests.distillation.models import small_config, write_model, write_prompts
from tests.distillation.test_gguf import write_tokenizer
from tests.models.tiny_transformers import own_greedy
from tests.models.tokenizers import byte_level
from tests.test_cli import DUO_RAY, SMALL, refused, run


def same_greedy_text(folder: Path) -> bool:
    """Whether the float32 file in llama.cpp and the directory in transformers continue a prompt alike."""
    (finest,) = folder.glob("*-F32.gguf")
    prompt = Tokenizer.load(folder).chat([{"role": "user", "content": "Tell me about the sea."}])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = own_greedy(model, prompt, 32)
    with closing(LlamaCppDraft.load(finest, threads=1, max_context=256, slots=1)) as draft:
        best = [int(row.argmax()) for row in draft.logits_along([*prompt, *answer])]
    return best[len(prompt) - 1 : -1] == answer


@pytest.mark.models
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "30"], ["--layers 30", "30 layers"]),
        (["--divergence", "sideways"], ["--divergence sideways", "forward"]),
        (["--resume"], ["nothing to resume"]),
        (["--max-tokens", "9000"], ["line 1", "9000"]),
        (["--target", "/nowhere"], ["/nowhere"]),
        (["--replicas", "2"], ["--replicas 2", "hardware.machine=cluster"]),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_before_anything_starts(arguments, words, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
    line = refused("distill", "--prompts", str(prompts), "--out", str(tmp_path / "draft"), *arguments)
    assert all(word in line for word in words), line


@pytest.mark.ray
@pytest.mark.models
def test_killed_and_interrupted_wherever_it_is_it_goes_on_and_ends_with_a_draft(demo_target, tmp_path):
    target = write_model(tmp_path / "target", small_config("llama", 49152, max_position_embeddings=512), demo_target)
    out = tmp_path / "draft"
    command = [
        DUO_RAY, "distill", "--target", str(target), "--prompts", str(write_prompts(tmp_path / "prompts.jsonl", 12)),
        "--out", str(out), "--layers", "2", "--max-tokens", "12", "--samples", "1", "--minutes", "60", "--on-policy",
        *SMALL,
    ]  # fmt: skip
    answers = out / "work/answers"
    end(command, signal.SIGKILL, lambda: len(list(answers.glob("*.npz"))) >= 3)
    written = {path: path.stat().st_mtime_ns for path in answers.glob("*.npz")}
    assert 3 <= len(written) < 24
    # Few steps of a known number, whatever the speed of this machine.
    plan = {"precision": "float32", "steps": 20, "interval": 10, "batch": 8, "divergence": "mixed", "answers": 22}
    for name in ("training", "training-own"):
        write_json(out / f"work/{name}.json", {**plan, "held_out_answers": 2})
    command.append("--resume")
    checkpoint = out / "work/checkpoints/checkpoint-10/trainer_state.json"
    end(command, signal.SIGINT, lambda: checkpoint.exists() or (out / "work/first").exists())
    assert {path: path.stat().st_mtime_ns for path in written} == written
    end(command, signal.SIGKILL, lambda: any((out / "work/own").glob("*.npz")))
    end(command, signal.SIGTERM, lambda: any(out.glob("*-F32.gguf")))

    done = run(*command[1:], "--json", timeout=400)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert len(list(answers.glob("*.npz"))) == 24
    found = json.loads(done.stdout)
    assert found["training"]["done"] == 20
    assert len(list((out / "work/own").glob("*.npz"))) == 22
    assert "texts of its own" in (out / "README.md").read_text()
    assert {each["quant"] for each in found["drafts"]} == {"Q8_0", "Q4_K_M", "Q4_1", "Q4_0"}
    assert all(each["t_draft"] > 0 and 0 <= each["acceptance"] <= 1 for each in found["drafts"])
    assert resolve_draft(str(out)) == out / found["best"]
    assert f"{found['best']} *" in (out / "README.md").read_text()
    assert same_greedy_text(out)


@pytest.mark.ray
@pytest.mark.models
def test_a_student_with_tokens_of_its_own_becomes_a_draft_with_them(cluster, demo_target, tmp_path):
    target = write_model(tmp_path / "target", small_config("llama", 49152, max_position_embeddings=512), demo_target)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", byte_level())
    student = write_model(tmp_path / "student", small_config("llama", 400, max_position_embeddings=2048), tokenizer)
    out = tmp_path / "draft"
    options = ["--target", str(target), "--student", str(student), "--out", str(out)]
    refusal = refused("distill", *options, "--on-policy", "--prompts", str(write_prompts(tmp_path / "p.jsonl", 3)))
    assert "vocabulary of its own" in refusal
    done = run(
        "distill", *options, "--prompts", str(write_prompts(tmp_path / "prompts.jsonl", 12)), "--max-tokens", "12",
        "--samples", "1", "--minutes", "0.3", "--json", *SMALL, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["training"]["done"] > 0
    assert all(0 <= each["acceptance"] <= 1 for each in found["drafts"])
    assert (out / "tokenizer.json").read_text() == (tokenizer / "tokenizer.json").read_text()
    assert same_greedy_text(out)


def end(command, how, when):
    """Start a command and end it by a signal when something is the case; nothing of it is left then."""
    mark, deadline = uuid.uuid4().hex, time.monotonic() + 400
    with subprocess.Popen(command, env={**os.environ, "DUO_RAY_TEST": mark}, stderr=subprocess.PIPE) as process:
        while not when():
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(how)
        said = process.communicate()[1].decode()
    assert process.returncode == (-how if how is signal.SIGKILL else 128 + how), said
    while any(_has(each, mark) for each in psutil.process_iter()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("DUO_RAY_TEST") == mark
    except psutil.Error:  # it ended meanwhile
        return False


@pytest.mark.ray
@pytest.mark.models
def test_in_three_minutes_a_draft_of_the_demo_model_becomes_better_and_is_used(tmp_path):
    out = tmp_path / "draft"
    done = run(
        "distill", "--prompts", str(write_prompts(tmp_path / "prompts.jsonl", 24)), "--out", str(out), "--minutes", "3",
        "--max-tokens", "32", "--json", *SMALL, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "answers to write (24 prompts, 2 of them held out)" in done.stderr
    found = json.loads(done.stdout)
    before, after = (found["training"][when]["acceptance"] for when in ("before", "after"))
    assert after > max(0.15, 3 * before)
    assert next(each for each in found["drafts"] if each["file"] == found["best"])["acceptance"] > 0.1
    assert same_greedy_text(out)
    command = ["generate", "--json", "--max-tokens", "24", "--temperature", "0", "--ignore-eos", *SMALL]
    command += ["--set", "models.target.precision=fp32", "Tell me about the number 3."]
    drafted = run(*command, "--draft", str(out), "--set", "optimization.fallback=false")
    alone = run(*command, "--no-draft")
    assert drafted.returncode == alone.returncode == 0, drafted.stderr + alone.stderr
    answer = json.loads(drafted.stdout)
    assert answer["stats"]["accepted_tokens"] > 0
    assert answer["token_ids"] == json.loads(alone.stdout)["token_ids"]
