"""Real training of a tiny student on a tiny target's answers: it learns, stops, and goes on after a kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from duo_ray.distillation.data import TOP, Answer
from duo_ray.distillation.student import load_model
from duo_ray.distillation.train import answer_logits, collate, fastest_precision, last_checkpoint, train
from duo_ray.distillation.workspace import Clock, Workspace, make_folder, read_json, write_json
from tests.models.tiny_transformers import VOCAB, own_logits, tiny_model

PLAN = {"precision": "float32", "steps": 40, "interval": 5, "batch": 8}


def answer_of(model, prompt, count, seed):
    """A sampled answer with the target's most probable tokens, as the pipeline would have written it."""
    random, text = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(count):
        text.append(int(torch.multinomial(own_logits(model, text)[-1].softmax(-1), 1, generator=random)))
    rows = own_logits(model, text[:-1])[len(prompt) - 1 :].softmax(-1)
    probs, ids = rows.topk(TOP)
    parts = (np.array(prompt, np.int32), np.array(text[len(prompt) :], np.int32), ids.numpy().astype(np.int32))
    return Answer(*parts, probs.numpy().astype(np.float16))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A workspace with answers of a target with 3 layers and a student that is 2 of them."""
    workspace = Workspace(tmp_path_factory.mktemp("begun"))
    workspace.answers.mkdir(parents=True)
    target = tiny_model("llama", sharpness=2.0)
    for number in range(28):
        answer = answer_of(target, [number, 5, 90 - number][: 1 + number % 3], 10 + number % 4, number)
        answer.save(workspace.answers / f"0-{number:06}.npz")

    def fill(folder):
        target.model.layers = target.model.layers[::2]
        target.config.num_hidden_layers = 2
        target.save_pretrained(folder)

    make_folder(workspace.student, fill)
    write_json(stage_of(workspace).plan, PLAN)
    return workspace


@pytest.fixture
def workspace(begun, tmp_path):
    shutil.copytree(begun.work, tmp_path / "work")
    return Workspace(tmp_path)


def stage_of(workspace):
    return workspace.stages(on_policy=False)[0]


def run(workspace, minutes=60.0, cut=False):
    answers = sorted(workspace.answers.glob("*.npz"))
    clock = Clock(workspace.clock, minutes)
    return train(
        stage_of(workspace), answers[4:], answers[:4], divergence="mixed", cut=cut, clock=clock, share=1.0,
        device="cpu", progress=lambda text, _share: print(text, flush=True),
    )  # fmt: skip


def counting(start, count):
    """An answer of a target that counts on, sure of the next number by 0.9."""
    text = (start + np.arange(count + 1)) % VOCAB
    ids = (text[1:, None] + np.arange(TOP)) % VOCAB
    probs = np.tile([0.9, *[0.1 / (VOCAB - 1)] * (TOP - 1)], (count, 1))
    return Answer(*(each.astype(np.int32) for each in (text[:1], text[1:], ids)), probs.astype(np.float16))


def test_a_student_learns_and_the_best_of_it_is_kept(workspace, monkeypatch):
    for number, path in enumerate(sorted(workspace.answers.glob("*.npz"))):
        counting(7 * number, 24).save(path)
    write_json(stage_of(workspace).plan, {**PLAN, "steps": 80, "interval": 20})
    monkeypatch.setattr("duo_ray.distillation.train.LEARNING_RATE", 5e-3)
    found = run(workspace)
    assert found["done"] == 80
    assert [entry["step"] for entry in found["history"]] == [20, 40, 60, 80]
    assert found["before"]["acceptance"] < 0.2
    assert found["after"]["acceptance"] > 0.5
    assert found["after"]["greedy"] > 0.5
    assert found["after"]["acceptance"] == pytest.approx(
        max(entry["acceptance"] for entry in found["history"]), abs=1e-6
    )
    assert read_json(workspace.trained / "training.json") == found
    assert not stage_of(workspace).checkpoints.exists()
    assert load_model(workspace.trained).config.num_hidden_layers == 2


SCRIPT = "import sys; from tests.distillation.test_train import *; run(Workspace(Path(sys.argv[1])))"


def test_a_killed_training_ends_as_if_it_had_not_been_killed(workspace, begun, tmp_path_factory):
    other = Workspace(tmp_path_factory.mktemp("other"))
    shutil.copytree(begun.work, other.work)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(workspace.out)], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        whole = stage_of(workspace).checkpoints / "checkpoint-10/trainer_state.json"
        deadline = time.monotonic() + 240
        while not whole.is_file() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not workspace.trained.exists()
    assert last_checkpoint(stage_of(workspace).checkpoints) is not None
    resumed, straight = run(workspace), run(other)
    assert resumed["history"] == straight["history"]
    ours, theirs = (load_file(each.trained / "model.safetensors") for each in (workspace, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_training_stops_when_the_acceptance_no_longer_rises(workspace, monkeypatch):
    monkeypatch.setattr("duo_ray.distillation.train.LEARNING_RATE", 0.0)
    found = run(workspace)
    # Two of eight evaluations may bring nothing after the first.
    assert found["done"] == 15


def test_training_ends_with_its_time_and_what_it_has_is_kept(workspace):
    found = run(workspace, minutes=0.0)
    assert found["done"] == 1
    assert len(found["history"]) == 1
    assert load_model(workspace.trained)


def test_a_step_is_measured_where_nothing_is_planned_yet(workspace):
    stage_of(workspace).plan.unlink()
    found = run(workspace, minutes=0.05)
    assert set(found["step_seconds"]) == {"bfloat16", "float32"}
    assert found["precision"] in found["step_seconds"]
    assert found["steps"] % found["interval"] == 0
    assert (found["frozen"], found["learning_rate"]) == (False, 5e-4)


def test_logits_are_those_before_each_answered_id_whatever_else_is_in_the_batch(begun):
    answers = [Answer.load(path) for path in sorted(begun.answers.glob("*.npz"))[:3]]
    model = load_model(begun.student).eval()
    with torch.no_grad():
        together = answer_logits(model, collate(answers))
    alone = [
        own_logits(model, [*each.prompt.tolist(), *each.answer.tolist()])[len(each.prompt) - 1 : -1] for each in answers
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_measuring_a_step_leaves_the_student_as_it_is(begun):
    model = load_model(begun.student)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    batch = collate([Answer.load(path) for path in sorted(begun.answers.glob("*.npz"))[:2]])
    fastest_precision(model, batch, "forward", "cpu")
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_a_half_written_checkpoint_is_removed(tmp_path):
    for name, state in (("checkpoint-5", '{"global_step": 5}'), ("checkpoint-10", None), ("checkpoint-15", '{"glo')):
        (tmp_path / name).mkdir()
        if state is not None:
            (tmp_path / name / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert last_checkpoint(tmp_path / "nothing") is None


def test_the_best_checkpoint_is_found_where_the_folder_has_moved(tmp_path):
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "best_metric": 0.5, "best_model_checkpoint": "elsewhere/checkpoint-5"}
        write_json(tmp_path / f"checkpoint-{step}/trainer_state.json", state)
    last = last_checkpoint(tmp_path)
    assert last == str(tmp_path / "checkpoint-10")
    found = read_json(Path(last) / "trainer_state.json")
    assert found == {"global_step": 10, "best_metric": 0.5, "best_model_checkpoint": str(tmp_path / "checkpoint-5")}


def test_a_student_cut_from_its_target_keeps_the_targets_embedding_and_head(workspace):
    write_json(stage_of(workspace).plan, {**PLAN, "frozen": True, "learning_rate": 5e-3})
    run(workspace, cut=True)
    before, after = (load_file(each / "model.safetensors") for each in (workspace.student, workspace.trained))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if "layers" in name or name == "model.norm.weight"}
