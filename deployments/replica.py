"""One replica is one pipeline: the coordinator in the replica's process, target and drafts in its placement group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util.placement_group import get_current_placement_group

from deployments.callers import Caller, Callers
from deployments.openai_api import create_api
from deployments.runner import HEALTH
from duo_ray.actors.coordinator import Coordinator
from duo_ray.actors.launch import plain_error, start_models
from duo_ray.actors.prepare import prepare
from duo_ray.config import Config, ConfigError
from duo_ray.metrics import Figures, Meter
from duo_ray.metrics.series import Ended
from duo_ray.session import Prompt, build_request, collect, unpacked
from duo_ray.types import Delta, Finished, InvalidRequest, Overloaded, Request

logger = logging.getLogger("ray.serve")

FIGURES_LIMIT_S = 3.0
"""How long the figures of the other replicas are waited for."""


class Replica:
    """An `Engine` for the HTTP side, and methods for other Serve applications.

    From another application, or any process of the cluster:

        handle = serve.get_app_handle("default")
        answer = await handle.generate.remote("Explain gravity to a child.", max_tokens=64)
        async for item in handle.options(stream=True).stream.remote("Explain gravity to a child."): ...

    Options are those of `duo_ray.session.build_request`.
    """

    def __init__(self, config: Config) -> None:
        self.config = _with_api_key(config)
        self.model_name = config.model_name
        context = serve.get_replica_context()
        self._meter = Meter(model=self.model_name, replica=context.replica_id.unique_id)
        self._replicas = serve.get_deployment_handle(context.deployment, context.app_name)
        self._streams = 0
        self.last_token = 0.0

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once, before the replica counts as ready."""
        await self._start()
        return create_api(self)

    async def _start(self) -> None:
        """Start the models and wait until they are warm.

        Raises:
            DuoRayError: what cannot work, in one line.
        """
        prepared = await asyncio.to_thread(prepare, self.config, progress=_Progress())
        group = get_current_placement_group()
        target, drafts = await asyncio.to_thread(start_models, prepared.settings, group, group.bundle_specs)
        self._coordinator = Coordinator(prepared.settings.coordinator, target, drafts, self._meter)
        try:
            info = await self._coordinator.start()
        except RayError as error:
            raise plain_error(error) from error
        self._callers = Callers(self._coordinator.cancel)
        prepared.keep_calibration(info)
        for match in dict.fromkeys(draft.vocabulary for draft in info.drafts):
            if not match.report.same:
                logger.warning("%s", match.describe())
        self.tokenizer = prepared.tokenizer
        self.max_context = info.target.max_context
        self._slots = info.target.slots

    async def stream(
        self, prompt: Prompt | Request, *, caller: Caller | None = None, **options: Any
    ) -> AsyncGenerator[Delta | Finished, None]:
        """Tokens of one answer as they become certain, then `Finished`; see `Engine.stream`.

        Args:
            caller: who waits for it, which the router puts in; the stream ends with that process.
        """
        request = self._request(prompt, options)
        if self._streams >= self._slots + self.config.serving.queue:
            if not request.request_id.startswith(HEALTH):
                self._meter.tally.ended(Ended.REFUSED, 0)
            raise Overloaded(self._streams - self._slots, self.config.serving.retry_after_s)
        self._streams += 1
        try:
            with contextlib.nullcontext() if caller is None else self._callers.waiting(request.request_id, caller):
                async with contextlib.aclosing(self._coordinator.generate(request)) as items:
                    async for item in items:
                        self.last_token = time.monotonic()
                        yield item
        except RayError as error:
            raise plain_error(error) from error
        finally:
            self._streams -= 1

    async def generate(self, prompt: Prompt | Request, **options: Any) -> dict[str, object]:
        """The whole answer, as `Answer.as_dict` shows it."""
        async with contextlib.aclosing(self.stream(prompt, **options)) as items:
            return collect([each async for item in items for each in unpacked(item)]).as_dict()

    async def describe(self) -> dict[str, object]:
        """What is running: the model's name, its context, every actor's process, node, cores and measured times."""
        return {
            "model": self.model_name,
            "max_context": self.max_context,
            "slots": self._slots,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "pipeline": asdict(self._coordinator.describe()),
        }

    async def check_health(self) -> None:
        """Serve replaces the replica when this fails: the target will not come back."""
        self._coordinator.check()

    async def figures(self) -> list[Figures]:
        """Those of all replicas, this one's first. One that dies, or does not answer in time, is left out."""
        own = self._meter.figures()
        if self.config.serving.replicas.max == 1:
            return [own]
        try:
            asked = self._replicas.broadcast("own_figures")
            answers = await asked.results_async(timeout_s=FIGURES_LIMIT_S, return_exceptions=True)
        except (TimeoutError, RayServeException) as error:
            logger.warning("figures of this replica only: %s", error)
            return [own]
        others = [each for each in answers if isinstance(each, Figures) and each.replica != own.replica]
        return [own, *others]

    async def own_figures(self) -> Figures:
        """Those of this replica, for the others."""
        return self._meter.figures()

    def _request(self, prompt: Prompt | Request, options: dict[str, Any]) -> Request:
        if not isinstance(prompt, Request):
            return build_request(self.config, self.tokenizer, prompt, **options)
        if options:
            raise InvalidRequest(f"{', '.join(options)}: options belong into the Request")
        return prompt


class _Progress:
    """Start-up in the replica's log, one line for each new thing that it is busy with."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, text: str, _share: float | None) -> None:
        if text != self._shown:
            self._shown = text
            logger.info("starting: %s", text)


def _with_api_key(config: Config) -> Config:
    """Read the key here, where it is needed: Serve shows an application's arguments to whoever asks."""
    key = config.serving.api_key
    if key is None or not key.startswith("env:"):
        return config
    name = key.removeprefix("env:")
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"serving.api_key is {key}, but where the replica runs there is no variable {name}")
    return config.model_copy(update={"serving": config.serving.model_copy(update={"api_key": value})})
