"""The metrics of the running service."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.ray, pytest.mark.models]


def test_the_metrics_of_the_running_service_count_what_it_answered(service):
    def figures() -> dict[str, float]:
        text = httpx.get(f"{service.url}/metrics", timeout=60).text
        found = {}
        for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
            labels = [sample.labels[label] for label in ("outcome", "reason") if label in sample.labels]
            found[" ".join([sample.name, *labels])] = sample.value
        return found

    name = httpx.get(f"{service.url}/v1/models", timeout=60).json()["data"][0]["id"]
    messages = [{"role": "user", "content": "Count to ten."}]
    body = {"model": name, "messages": messages, "max_tokens": 12, "temperature": 0}
    before = figures()
    plain = httpx.post(f"{service.url}/v1/chat/completions", json=body | {"duo": {"draft": False}}, timeout=300).json()
    drafted = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=300).json()
    after = figures()
    more = {name: value - before.get(name, 0.0) for name, value in after.items()}
    usages = [answer["usage"] for answer in (plain, drafted)]
    assert more["duo_ray_generated_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert more["duo_ray_prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert more["vllm:spec_decode_num_draft_tokens_total"] == drafted["timings"]["draft_n"] > 0
    assert more["vllm:spec_decode_num_accepted_tokens_total"] == drafted["timings"]["draft_n_accepted"]
    assert more["duo_ray_requests_total length"] == 2
    assert more["duo_ray_plain_steps_total no draft"] >= plain["usage"]["completion_tokens"]
    assert (after["duo_ray_running"], after["duo_ray_queued"]) == (0, 0)
