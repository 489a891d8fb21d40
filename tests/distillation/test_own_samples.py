"""Texts of the student, scored by the target."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from duo_ray.actors.target import TargetSettings
from duo_ray.distillation import own_samples
from duo_ray.distillation.data import TOP, Answer
from duo_ray.distillation.own_samples import score, write_own_samples
from duo_ray.models.transformers import TransformersTarget
from tests.models.tiny_transformers import VOCAB, own_logits, tiny_model

END = 7
SETTINGS = TargetSettings(
    "", "transformers", "", "cpu", "float32", slots=4, max_context=64, vocab_size=VOCAB, threads=1, cores=(),
    attn_implementation="sdpa", chunk=128, device_map=None, cuda_graphs=False, quantization="none", gpu_layers=0,
    warmup_steps=1,
)  # fmt: skip


@pytest.fixture
def target():
    return TransformersTarget(tiny_model("llama", sharpness=2.0), slots=1, max_context=64)


@pytest.fixture
def asked(tmp_path):
    """Answers of 12 tokens to prompts of different lengths."""
    folder = tmp_path / "answers"
    folder.mkdir()
    for number in range(20):
        parts = np.arange(1 + number % 5), np.full(12, 9), np.zeros((12, TOP)), np.zeros((12, TOP))
        Answer(*(part.astype(np.int32) for part in parts)).save(folder / f"0-{number:06}.npz")
    return sorted(folder.iterdir())


@pytest.fixture
def write(target, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(own_samples, "load_target", lambda settings: target if settings.slots == 1 else None)
    tiny_model("llama", sharpness=0.5).save_pretrained(tmp_path / "student")

    def run(until=lambda: False):
        return write_own_samples(
            tmp_path / "student", lambda: SETTINGS, asked, tmp_path / "own", device="cpu", ends=frozenset({END}),
            until=until, progress=lambda *_: None,
        )  # fmt: skip

    return run


def test_the_target_says_what_it_thinks_at_each_place(target):
    prompt, sample = np.array([3, 4, 5], np.int32), np.array([8, 1, 9, 2], np.int32)
    found = score(target, prompt, sample)
    rows = own_logits(tiny_model("llama", sharpness=2.0), [3, 4, 5, 8, 1, 9])[2:].softmax(-1)
    probs, ids = rows.topk(TOP)
    assert found.own
    np.testing.assert_array_equal(found.top_ids, ids.numpy())
    np.testing.assert_allclose(found.top_probs.astype(float), probs.numpy(), atol=1e-3)


def test_every_prompt_is_answered_up_to_an_end_and_no_longer_than_by_the_target(write, asked):
    torch.manual_seed(0)
    files = write()
    assert [path.name for path in files] == [path.name for path in asked]
    found = [Answer.load(path) for path in files]
    for answer, before in zip(found, map(Answer.load, asked), strict=True):
        assert answer.own
        assert answer.prompt.tolist() == before.prompt.tolist()
        assert 1 <= len(answer.answer) <= 12
        assert END not in answer.answer[:-1]
    assert len({tuple(answer.answer) for answer in found}) > 10


def test_samples_are_drawn_from_the_students_own_distribution(tmp_path):
    """Whatever stands before in the batch: the first token after one prompt, among longer ones, 4000 times."""
    student = tiny_model("llama", sharpness=0.5)
    prompt = np.array([3, 4], np.int32)
    asked = [SimpleNamespace(prompt=prompt, answer=np.zeros(1))] * 4000
    asked.append(SimpleNamespace(prompt=np.arange(9, dtype=np.int32), answer=np.zeros(1)))
    torch.manual_seed(0)
    drawn = [int(each[0]) for each in own_samples._samples(student, asked, frozenset(), VOCAB)][:-1]
    shares = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    expected = own_logits(student, [3, 4])[-1].softmax(-1).numpy()
    assert np.abs(shares - expected).sum() / 2 < 0.1


def test_what_was_written_stays_and_the_time_ends_the_rest(write, tmp_path):
    files = write(until=lambda: True)
    assert len(files) == 8
    before = {path: path.stat().st_mtime_ns for path in files}
    assert write(until=lambda: True) == files
    assert len(write()) == 20
    assert {path: path.stat().st_mtime_ns for path in files} == before
