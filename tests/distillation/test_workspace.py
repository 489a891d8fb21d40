"""What a folder is begun and resumed with, and the time that is counted over all starts."""

from __future__ import annotations

import pytest

from duo_ray.distillation.workspace import Clock, DistillationError, Workspace, make_folder, write_json

PLAN = {"target": "demo", "layers": 6}


def test_a_folder_with_something_in_it_is_not_begun_in(tmp_path):
    (tmp_path / "precious.txt").touch()
    with pytest.raises(DistillationError, match="--resume"):
        Workspace(tmp_path).begin(PLAN, resume=False)


def test_a_start_that_was_killed_before_it_had_written_its_plan_is_begun_again(tmp_path):
    workspace = Workspace(tmp_path / "draft")
    workspace.work.mkdir(parents=True)
    (workspace.work / "plan.json.part").write_text("{")
    workspace.begin(PLAN, resume=False)
    assert workspace.answers.is_dir()
    workspace.answers.rmdir()
    workspace.begin(PLAN, resume=True)
    assert workspace.answers.is_dir()


def test_nothing_is_resumed_where_nothing_was_begun(tmp_path):
    with pytest.raises(DistillationError, match="nothing to resume"):
        Workspace(tmp_path / "new").begin(PLAN, resume=True)


def test_a_run_is_resumed_with_the_options_it_was_begun_with(tmp_path):
    workspace = Workspace(tmp_path / "draft")
    workspace.begin(PLAN, resume=False)
    workspace.begin(PLAN, resume=True)
    with pytest.raises(DistillationError, match="layers 6, not 4"):
        workspace.begin({**PLAN, "layers": 4}, resume=True)


def test_time_spent_before_counts(tmp_path):
    write_json(tmp_path / "clock.json", {"seconds": 90.0})
    clock = Clock(tmp_path / "clock.json", minutes=2)
    assert 28.0 < clock.left(1.0) <= 30.0
    assert clock.left(0.5) < 0
    clock.keep()
    assert Clock(tmp_path / "clock.json", minutes=2).spent >= 90.0


def test_a_folder_is_made_whole_or_not_at_all(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_folder(tmp_path / "made", fail)
    assert not (tmp_path / "made").exists()
    make_folder(tmp_path / "made", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["whole"]
    make_folder(tmp_path / "made", fail)  # it is there: nothing is done
