"""A small series with real models: our engine and a peer, resumed, reported, drawn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import Peer, PeerDied, PeerSettings

DUO_RAY = str(Path(sys.executable).with_name("duo-ray"))


def bench(out, *arguments):
    return subprocess.run(
        [DUO_RAY, "bench", "--out", str(out), "--tasks", "qa,dialogue", "--n", "1", "--tokens", "16",
         "--set", "models.target.precision=fp32", "--set", "optimization.fallback=false", *arguments],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    out = tmp_path_factory.mktemp("series")
    done = bench(out, "--methods", "target,sequential,duo,llama.cpp")
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.ray
@pytest.mark.models
def test_every_method_is_in_the_report(series):
    out, text = series
    assert text.strip() == (out / "report.md").read_text().strip()
    assert all(f"| {method} |" in text for method in ("target", "sequential", "duo", "llama.cpp"))


@pytest.mark.ray
@pytest.mark.models
def test_our_texts_are_the_targets_and_every_turn_was_answered(series):
    results = json.loads((series[0] / "results.json").read_text())
    assert results["summary"]["all tasks"]["duo"]["equal"] == "2/2"
    runs = [json.loads(line) for line in (series[0] / "runs.jsonl").read_text().splitlines()[1:]]
    assert {len(run["turns"]) for run in runs if run["task"] == "dialogue"} >= {2}
    assert all(run["error"] is None for run in runs)


@pytest.mark.ray
@pytest.mark.models
def test_figures_of_the_loop_and_of_the_processes_are_kept(series):
    row = json.loads((series[0] / "results.json").read_text())["summary"]["all tasks"]["duo"]
    assert set(row["peak_bytes"]) == {"target", "draft-0", "coordinator"}
    assert row["mean_accepted"] > 0
    assert row["cpu_seconds_per_token"] > 0
    assert sum(row["gamma_counts"].values()) > 0


@pytest.mark.ray
@pytest.mark.models
def test_pictures_are_drawn(series):
    for name in ("phi.png", "timeline.png", "gamma.png"):
        assert (series[0] / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
@pytest.mark.models
def test_a_finished_series_is_only_reported_again(series):
    out, text = series
    before = (out / "runs.jsonl").read_bytes()
    done = bench(out, "--methods", "target,sequential,duo,llama.cpp")
    assert done.stdout == text
    assert (out / "runs.jsonl").read_bytes() == before


@pytest.mark.ray
@pytest.mark.models
def test_other_settings_are_refused_in_one_line(series):
    done = bench(series[0], "--tokens", "17")
    assert done.returncode == 2
    assert "other settings" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.models
def test_a_peer_that_dies_says_so_and_is_started_again(demo_gguf):
    peer = Peer(PeerSettings("llama.cpp", "", str(demo_gguf), None, "float32", "cpu", 1, 256, (2,)))
    try:
        before = peer.generate((1, 2, 3), 3)
        assert len(before.ids) == len(before.at) == 3
        os.kill(peer._process.pid, signal.SIGKILL)
        with pytest.raises(PeerDied, match=r"llama\.cpp.*-9"):
            peer.generate((1, 2, 3), 3)
        assert peer.generate((1, 2, 3), 3).ids == before.ids
    finally:
        peer.close()


@pytest.mark.models
def test_a_peer_that_cannot_load_says_why():
    with pytest.raises(Exception, match=r"llama\.cpp.*cannot be loaded.*nowhere"):
        Peer(PeerSettings("llama.cpp", "", "/nowhere.gguf", None, "float32", "cpu", 1, 256, (2,)))
