"""Requests to the API, and what must come back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx

USER = [{"role": "user", "content": "Greet."}]
CHAT = {"model": "scripted", "messages": USER}
TEXT = {"model": "scripted", "prompt": "Greet.<|answer|>"}
ENDLESS = {"ignore_eos": True, "max_tokens": 100_000}


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json=CHAT | body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=TEXT | body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(http: httpx.Client, body: dict[str, Any], path: str = "/v1/chat/completions", status: int = 400) -> Any:
    """The error of a request that must be refused."""
    # httpx itself cannot send half a surrogate pair.
    response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    return SimpleNamespace(**response.json()["error"])
