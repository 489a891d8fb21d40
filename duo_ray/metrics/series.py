"""Every metric that is exported, once: name, kind, meaning, labels.

Names are those of the glossary. Four are vLLM's own, so that its dashboards work; Ray's agents refuse their colon, so
there they are `ray_vllm_...`, as vLLM's are when it runs under Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from duo_ray.metrics.history import RECENT_S
from duo_ray.types import FinishReason

Labels = tuple[str, ...]
"""Names of labels, or their values."""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Ended(StrEnum):
    """How a request ended: as its stream said, or before that."""

    STOP = FinishReason.STOP.value
    LENGTH = FinishReason.LENGTH.value
    CANCELLED = "cancelled"
    ERROR = "error"
    REFUSED = "refused"
    """For want of a place; it has not begun."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric. Prometheus shows a counter's samples with `_total` behind the name."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the last, infinite one."""


_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
PROPOSED_PER_POSITION = "duo_ray_proposed_tokens_per_pos"
WASTED_TOKENS = "duo_ray_wasted_tokens"
PROMPT_TOKENS = "duo_ray_prompt_tokens"
GENERATED_TOKENS = "duo_ray_generated_tokens"
TARGET_STEPS = "duo_ray_target_steps"
PLAIN_STEPS = "duo_ray_plain_steps"
REQUESTS = "duo_ray_requests"
RESTARTS = "duo_ray_actor_restarts"
BUSY_SECONDS = "duo_ray_busy_seconds"
ACTIVE_SECONDS = "duo_ray_active_seconds"
RUNNING = "duo_ray_running"
QUEUED = "duo_ray_queued"
GAMMA = "duo_ray_gamma"
SEQUENCES = "duo_ray_sequences"
T_TARGET = "duo_ray_t_target_seconds"
T_DRAFT = "duo_ray_t_draft_seconds"
IDLE_SHARE = "duo_ray_idle_share"
SPEEDUP = "duo_ray_speedup_estimate"
TTFT = "duo_ray_time_to_first_token_seconds"
INTER_TOKEN = "duo_ray_inter_token_seconds"
OVERHEAD = "duo_ray_round_overhead_seconds"
QUANT_REQUESTS = "duo_ray_draft_quant_requests"
QUANT_IN_USE = "duo_ray_draft_quant_in_use"
QUANT_T_DRAFT = "duo_ray_draft_quant_t_draft_seconds"
QUANT_ACCEPTANCE = "duo_ray_draft_quant_acceptance"
QUANT_RATE = "duo_ray_draft_quant_expected_tokens_per_second"

SERIES: tuple[Series, ...] = (
    Series(DRAFTS, Kind.COUNTER, "Drafted blocks that a target pass judged."),
    Series(DRAFT_TOKENS, Kind.COUNTER, "Tokens the drafts wrote, over all sequences, heads included."),
    Series(ACCEPTED_TOKENS, Kind.COUNTER, "Drafted tokens the target kept, heads that won their bet included."),
    Series(ACCEPTED_PER_POSITION, Kind.COUNTER, "Kept tokens by their position in the judged block.", ("position",)),
    Series(PROPOSED_PER_POSITION, Kind.COUNTER, "Judged tokens by their position in the block.", ("position",)),
    Series(WASTED_TOKENS, Kind.COUNTER, "Drafted tokens that were not kept."),
    Series(PROMPT_TOKENS, Kind.COUNTER, "Prompt tokens of requests that got their first token."),
    Series(GENERATED_TOKENS, Kind.COUNTER, "Committed tokens."),
    Series(TARGET_STEPS, Kind.COUNTER, "Steps, summed over the requests; one target pass serves those of several."),
    Series(PLAIN_STEPS, Kind.COUNTER, "Steps for which nothing was drafted, by reason.", ("reason",)),
    Series(REQUESTS, Kind.COUNTER, "Requests that ended, by outcome.", ("outcome",)),
    Series(RESTARTS, Kind.COUNTER, "Times an actor was lost and came back.", ("actor",)),
    Series(BUSY_SECONDS, Kind.COUNTER, "Seconds of model work, by actor.", ("actor",)),
    Series(ACTIVE_SECONDS, Kind.COUNTER, "Seconds with at least one running request."),
    Series(RUNNING, Kind.GAUGE, "Requests that hold a slot."),
    Series(QUEUED, Kind.GAUGE, "Requests that wait for a slot."),
    Series(GAMMA, Kind.GAUGE, f"Tokens asked of the draft per step; mean of {RECENT_S} s."),
    Series(SEQUENCES, Kind.GAUGE, f"Sequences per drafted block; mean of {RECENT_S} s."),
    Series(T_TARGET, Kind.GAUGE, f"T_target: seconds of the target pass behind a decode step; mean of {RECENT_S} s."),
    Series(T_DRAFT, Kind.GAUGE, f"T_draft: seconds per drafted token; mean of {RECENT_S} s."),
    Series(
        IDLE_SHARE, Kind.GAUGE, f"Share of the active time an actor did not work; mean of {RECENT_S} s.", ("actor",)
    ),
    Series(
        SPEEDUP,
        Kind.GAUGE,
        "ESTIMATE: plain passes (from T_target) the committed tokens would have taken, over the real time.",
    ),
    Series(
        QUANT_REQUESTS, Kind.COUNTER, "Requests that ended, by the quantisation of the draft they used.", ("quant",)
    ),
    Series(
        QUANT_IN_USE, Kind.GAUGE, "1 for the quantisation of the draft that requests use, 0 for others.", ("quant",)
    ),
    Series(QUANT_T_DRAFT, Kind.GAUGE, "Estimate of T_draft, by quantisation of the draft.", ("quant",)),
    Series(QUANT_ACCEPTANCE, Kind.GAUGE, "Estimated chance that a drafted token is kept, by quantisation.", ("quant",)),
    Series(QUANT_RATE, Kind.GAUGE, "Expected tokens per second of a request alone, by quantisation.", ("quant",)),
    Series(TTFT, Kind.HISTOGRAM, "Seconds from arrival to the first token, queueing included.", bounds=_SECONDS),
    Series(
        INTER_TOKEN,
        Kind.HISTOGRAM,
        "Seconds between outputs of a stream (the tokens of a step, or of plain ones taken together).",
        bounds=_SECONDS,
    ),
    Series(OVERHEAD, Kind.HISTOGRAM, "Wall time of a step minus the models' own work.", bounds=_SECONDS),
)


def ray_name(name: str) -> str:
    """A series' name as given to Ray, whose agents refuse a colon; they export it with `ray_` before it."""
    return name.replace(":", "_")
