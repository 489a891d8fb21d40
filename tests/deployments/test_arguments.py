"""What the builder makes of its arguments, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import deployments
from deployments import Arguments, app
from deployments.replica import _with_api_key
from duo_ray.config import ConfigError, load_config


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.setattr(deployments, "_tags", frozenset)


def built(**settings):
    """The deployment of the application built with these settings."""
    return app(Arguments(**{"hardware.cpu_cores": 1, **settings}))._bound_deployment


def test_a_file_and_dotted_settings_over_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("serving: {queue: 3, model_name: ours}")
    config = Arguments.model_validate({"config": str(file), "serving.queue": "5"}).load()
    assert (config.serving.queue, config.serving.model_name) == (5, "ours")


def test_sections_may_be_nested_as_in_a_serve_file():
    arguments = yaml.safe_load("{serving: {api_key: '007', queue: 3}, models: {draft: {model: none}}}")
    config = Arguments.model_validate(arguments).load()
    assert (config.serving.api_key, config.serving.queue, config.models.draft.model) == ("007", 3, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"serving.que": "3"}, "serving.que is not a setting; did you mean queue?"),
        ({"serving": {"que": 3}}, "serving.que is not a setting; did you mean queue?"),
        ({"confg": "x.yaml"}, "confg is not a setting"),
        ({"models.target.precision": "fp8"}, "must be auto, fp32, bf16 or fp16"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        app(Arguments(**settings))


def test_concurrency_is_the_number_of_the_targets_slots():
    assert Arguments(**{"serving.concurrency": "3"}).load().models.target.slots == 3
    assert Arguments(**{"models.target.slots": "3"}).load().models.target.slots == 3


def test_one_replica_is_one_placement_group_of_coordinator_target_and_drafts():
    deployment = built()
    coordinator, target, draft = deployment._replica_config.placement_group_bundles
    assert coordinator.keys() == {"memory"}
    assert target == draft == {"CPU": 1.0}
    assert deployment._replica_config.ray_actor_options["memory"] <= coordinator["memory"]


def test_tags_of_the_cluster_are_asked_for(monkeypatch):
    monkeypatch.setattr(deployments, "_tags", lambda: frozenset({"draft_cpu"}))
    _, target, draft = built()._replica_config.placement_group_bundles
    assert target == {"CPU": 1.0}
    assert draft == {"CPU": 1.0, "draft_cpu": 1.0}


def test_as_many_requests_may_wait_while_no_replica_is_ready_as_one_takes():
    deployment = built(**{"serving.queue": 3, "serving.retry_after_s": 7, "models.target.slots": 2})
    assert deployment.max_ongoing_requests > 2 + 3
    assert deployment.max_queued_requests == -1  # Serve's own limit, which would come first
    assert deployment._deployment_config.request_router_config.request_router_kwargs == {"queue": 5, "retry_after_s": 7}


def test_replicas_follow_the_load_between_their_bounds():
    deployment = built(**{"serving.replicas.min": 1, "serving.replicas.max": 3, "models.target.slots": 2})
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, 2)
    assert scaling.metrics_interval_s < scaling.look_back_period_s <= scaling.upscale_delay_s
    assert built().num_replicas == 1


def test_the_default_app_is_bound(monkeypatch):
    monkeypatch.setattr(deployments, "app", lambda arguments: arguments)
    assert deployments.default_app == Arguments()


def test_the_api_key_is_read_where_the_replica_runs(monkeypatch):
    config = load_config(None, {"serving.api_key": "env:DUO_RAY_TEST_KEY"})
    with pytest.raises(ConfigError, match="no variable DUO_RAY_TEST_KEY"):
        _with_api_key(config)
    monkeypatch.setenv("DUO_RAY_TEST_KEY", "sesame")
    assert _with_api_key(config).serving.api_key == "sesame"
    assert _with_api_key(load_config(None, {"serving.api_key": "plain"})).serving.api_key == "plain"


def test_the_serve_file_of_the_project_is_one_that_serve_and_the_builder_take():
    file = yaml.safe_load((Path(__file__).parents[2] / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = ServeDeploySchema.model_validate(file).applications
    assert application.import_path == "deployments:app"
    assert Arguments.model_validate(application.args).load().serving.replicas.max == 1
