"""Settings on the node that made them and on another one."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from duo_ray.actors import draft, target
from duo_ray.actors.draft import DraftActor, DraftSettings
from duo_ray.actors.target import TargetActor, TargetSettings
from duo_ray.config import ConfigError
from duo_ray.hardware.gpus import Gpu
from duo_ray.hardware.machine import detect_machine
from duo_ray.models.catalog import CatalogError, quant_of
from duo_ray.models.llama_library import LlamaCppError
from tests.models.tiny_gguf import write_tiny_llama
from tests.models.tiny_transformers import tiny_model


@pytest.fixture(autouse=True)
def on_node_b(monkeypatch):
    for module in (draft, target):
        monkeypatch.setattr(module, "node_id", lambda: "b")
    monkeypatch.setattr("duo_ray.actors.node.get_node_ip_address", lambda: "10.0.0.2")


def settings(kind, **given):
    """Settings of which only what is given matters."""
    return kind(**{each.name: None for each in fields(kind)} | {"cores": (4, 5)} | given)


def test_where_they_were_made_they_hold_as_they_are():
    made = settings(DraftSettings, node="b", files=(("Q4_1", "/cache/small.gguf"),), model="demo")
    assert made.here() is made


def test_elsewhere_a_draft_is_found_by_its_name_and_pinned_to_no_core(tmp_path):
    file = write_tiny_llama(tmp_path / "small.gguf")
    made = settings(DraftSettings, node="a", files=(("F32", "/cache/of/node/a.gguf"),), model=str(file), quant=None)
    assert (made.here().files, made.here().cores) == ((("F32", str(file)),), ())


def test_elsewhere_each_quantisation_of_a_draft_is_found_or_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_tiny_llama(tmp_path / "small.gguf")
    files = ((quant_of(file), "/cache/of/node/a.gguf"), ("Q8_0", "/cache/of/node/b.gguf"))
    (_, finest), (_, made) = settings(DraftSettings, node="a", files=files, model=str(file), quant="auto").here().files
    assert finest == str(file)
    assert quant_of(Path(made)) == "Q8_0"
    assert Path(made).is_relative_to(tmp_path / "cache")


def test_elsewhere_a_target_is_found_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512, "vocab_size": 100}')
    (tmp_path / "model.safetensors").touch()
    here = settings(
        TargetSettings, node="a", path="/cache/of/node/a", model=str(tmp_path), engine="transformers"
    ).here()
    assert (here.path, here.cores) == (str(tmp_path), ())


def test_a_model_that_is_not_on_the_node_is_an_error_that_names_the_node(tmp_path):
    made = settings(DraftSettings, node="a", files=(("Q4_1", "a.gguf"),), model=str(tmp_path / "gone.gguf"), quant=None)
    with pytest.raises(CatalogError, match=r"gone\.gguf: no such file .*on node 10\.0\.0\.2"):
        made.here()


@pytest.mark.parametrize("engine", ["draft", "llama_cpp", "gpu"])
def test_on_a_node_nobody_has_looked_at_what_does_not_fit_is_refused_before_it_is_loaded(engine, tmp_path, monkeypatch):
    machine, gpu = detect_machine(), Gpu("NVIDIA A800", 24 << 30, "570.1", used=(24 << 30) - 1000)
    monkeypatch.setattr("duo_ray.actors.node.detect_machine", lambda: replace(machine, memory_available=1000))
    monkeypatch.setattr("duo_ray.actors.node.list_gpus", lambda: (gpu,))
    file = str(write_tiny_llama(tmp_path / "small.gguf"))
    sizes = {"node": "b", "max_context": 64, "slots": 2, "unseen": True}
    if engine == "draft":
        actor, made = DraftActor, settings(DraftSettings, files=(("F32", file),), **sizes)
    elif engine == "llama_cpp":
        actor, made = TargetActor, settings(TargetSettings, engine="llama_cpp", device="cpu", path=file, **sizes)
    else:
        tiny_model("llama").save_pretrained(tmp_path)
        made = settings(
            TargetSettings, engine="transformers", device="cuda:0", path=str(tmp_path), dtype="bfloat16",
            quantization="none", **sizes,
        )  # fmt: skip
        actor = TargetActor
    place = "GPU memory" if engine == "gpu" else "memory"
    with pytest.raises(ConfigError, match=rf"are needed, but 0\.00 GiB of {place} on node 10\.0\.0\.2 are free"):
        actor(made)


def test_a_node_that_was_looked_at_is_not_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.setattr("duo_ray.actors.node.detect_machine", lambda: pytest.fail("looked at"))
    sizes = {"max_context": 64, "slots": 2, "max_sequences": 1, "threads": 1}
    made = settings(DraftSettings, node="b", files=(("F32", "/not/there.gguf"),), unseen=False, **sizes)
    with pytest.raises(LlamaCppError, match="not/there"):
        DraftActor(replace(made, cores=()))
