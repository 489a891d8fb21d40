"""Requests made up from the API's own description: whatever comes, an answer or a refusal as described, in time."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.deployments.scripted import ScriptedEngine, served

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(
    ("path", "examples"), [("/v1/chat/completions", 60), ("/v1/completions", 60), ("/v1/models/{name}", 10)]
)
def test_every_request_is_answered_as_described(path: str, examples: int, mode: GenerationMode) -> None:
    engine = ScriptedEngine(settings={"serving.limits.tokens": 8, "sampling.max_tokens": 8})
    statuses: set[int] = set()
    with served(engine) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        (operation,) = schema[path].values()

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def fuzz(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "scripted"  # another one is as good as any: not found
            response = case.call_and_validate(timeout=60, checks=CHECKS)
            statuses.add(response.status_code)

        fuzz()
        assert not engine.running
    if mode == GenerationMode.POSITIVE and path != "/v1/models/{name}":
        assert {200, 400} <= statuses  # some of what the schema allows is beyond this server's limits
