"""The GPU script, on the CPU with a tiny shape: it runs, finds the passes exact, and would say so if they were not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "report.json"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "benchmarks.gpu_check", "--shapes", "tiny", "--minutes", "0.5",
         "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text()), done


def test_it_prints_one_table_with_every_width(report):
    _, done = report
    assert all(f"T({n})" in done.stdout for n in (1, 8, 32))


def test_it_needs_no_ray(report):
    _, done = report
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" in loaded
    assert not loaded & {"ray", "llama_cpp"}


def test_float32_is_exact_and_half_precision_up_to_ties(report):
    single, half = report[0]["results"]
    assert (single["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert single["verdicts"]["tie"] == single["verdicts"]["different"] == half["verdicts"]["different"] == 0
    assert single["verdicts"]["equal"] > 3 * gpu_check.CHECKED


def test_every_batch_is_timed_or_named_as_left_out(report):
    half = report[0]["results"][1]
    for batch in gpu_check.BATCHES:
        timed = sum(key.startswith(f"eager/{batch}/") for key in half["seconds"])
        assert timed == len(gpu_check.WIDTHS) or any(f"batch {batch}," in left for left in half["left_out"])
    assert half["seconds"]["eager/1/1"] > 0


def test_a_verify_pass_that_differs_is_found():
    shape, device = gpu_check.SHAPES["tiny"], torch.device("cpu")
    target = gpu_check.target(gpu_check.build(shape, device, torch.float32), slots=2, max_context=128)
    verify = target.verify

    def off_by_one(jobs, probs):
        reply = verify(jobs, probs)
        wrong = [replace(v, token=(v.token + 1) % shape.vocabulary) if jobs[0].block else v for v in reply.verdicts]
        return replace(reply, verdicts=tuple(wrong))

    target.verify = off_by_one
    assert gpu_check.compare(target, shape, torch.float32)["different"] > 0


def test_the_bytes_of_a_pass_are_weights_and_cache_without_input_embeddings():
    shape = gpu_check.SHAPES["tiny"]
    model = gpu_check.build(shape, torch.device("cpu"), torch.bfloat16)
    total = sum(p.nbytes for p in model.parameters())
    embeddings = shape.vocabulary * shape.hidden * 2
    cache = 10 * 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * 2
    assert gpu_check.bytes_per_pass(model, 10) == total - embeddings + cache
