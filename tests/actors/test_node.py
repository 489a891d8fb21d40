"""Settings on the node that made them and on another one."""

from __future__ import annotations

from dataclasses import fields

import pytest

from duo_ray.actors import draft, target
from duo_ray.actors.draft import DraftSettings
from duo_ray.actors.target import TargetSettings
from duo_ray.models.catalog import CatalogError
from tests.models.tiny_gguf import write_tiny_llama


@pytest.fixture(autouse=True)
def on_node_b(monkeypatch):
    for module in (draft, target):
        monkeypatch.setattr(module, "node_id", lambda: "b")
    monkeypatch.setattr("duo_ray.actors.node.get_node_ip_address", lambda: "10.0.0.2")


def settings(kind, **given):
    """Settings of which only what is given matters."""
    return kind(**{each.name: None for each in fields(kind)} | {"cores": (4, 5)} | given)


def test_where_they_were_made_they_hold_as_they_are():
    made = settings(DraftSettings, node="b", path="/cache/small.gguf", model="demo")
    assert made.here() is made


def test_elsewhere_a_draft_is_found_by_its_name_and_pinned_to_no_core(tmp_path):
    file = write_tiny_llama(tmp_path / "small.gguf")
    here = settings(DraftSettings, node="a", path="/cache/of/node/a.gguf", model=str(file), quant="auto").here()
    assert (here.path, here.cores) == (str(file), ())


def test_elsewhere_a_target_is_found_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512, "vocab_size": 100}')
    (tmp_path / "model.safetensors").touch()
    here = settings(
        TargetSettings, node="a", path="/cache/of/node/a", model=str(tmp_path), engine="transformers"
    ).here()
    assert (here.path, here.cores) == (str(tmp_path), ())


def test_a_model_that_is_not_on_the_node_is_an_error_that_names_the_node(tmp_path):
    made = settings(DraftSettings, node="a", model=str(tmp_path / "gone.gguf"), quant="auto")
    with pytest.raises(CatalogError, match=r"gone\.gguf: no such file .*on node 10\.0\.0\.2"):
        made.here()
