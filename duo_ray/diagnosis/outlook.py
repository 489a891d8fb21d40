"""What speculation would bring at the measured times and acceptance: by gamma, by sequences, by batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from duo_ray.core.gamma import Policy
from duo_ray.planning import Curve, Hardware, Simulated, Text, Traffic, simulate

GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
SEQUENCES = (1, 2, 4)
BATCHES = (1, 2, 4, 8, 16, 32)

PAYS = 1.02
"""Speed-up from which speculation is said to pay: less may be the luck of a simulation."""

_FASTER = 0.5
"""T_draft of the supposed faster draft, as a share of the measured one."""

_ANSWER_TOKENS = 256
_TOKENS = 1536
"""Simulated tokens behind each figure: the luck of the draw is then worth about 3%, and the same for all of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """So many requests at once, simulated; speeds as multiples of the target's alone at the same batch size."""

    size: int
    auto: float
    """The controller decides, and may decide to draft nothing."""
    always: float
    """Drafting whenever it can be done in time."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Simulated with the measured times and the acceptance that the distributions predict: speed-ups, that is, tokens
    per second as multiples of the target's alone."""

    auto: float
    """One request at a time, everything left to the controller."""
    auto_gamma: float
    """Median of the gammas it chooses; 0: it drafts nothing."""
    auto_lead: float
    """Median of the leads."""
    gammas: Mapping[int, float]
    """By fixed gamma, the controller's fallback off."""
    sequences: Mapping[int, float]
    """By the number of sequences a block may hold, gamma automatic."""
    batches: tuple[Batch, ...]
    faster: float
    """If the draft took half its time."""
    better: float
    """If half of the draft's misses were hits."""
    ratio: float
    """T_target(1) / T_draft(1)."""

    @property
    def best_gamma(self) -> int:
        return max(self.gammas, key=lambda gamma: self.gammas[gamma])

    @property
    def best_sequences(self) -> int:
        """The fewest that are within 1% of the fastest."""
        fastest = max(self.sequences.values())
        return min(count for count, speed in self.sequences.items() if speed >= 0.99 * fastest)

    @property
    def stops_at(self) -> int | None:
        """The smallest simulated batch from which on nothing pays; None: the largest one still pays."""
        stop = None
        for batch in reversed(self.batches):
            if max(batch.auto, batch.always) >= PAYS:
                break
            stop = batch.size
        return stop

    def as_dict(self) -> dict[str, Any]:
        return {
            "speedup": self.auto,
            "gamma": self.auto_gamma,
            "lead": self.auto_lead,
            "by_gamma": {str(gamma): speed for gamma, speed in self.gammas.items()},
            "best_gamma": self.best_gamma,
            "by_sequences": {str(count): speed for count, speed in self.sequences.items()},
            "best_sequences": self.best_sequences,
            "by_batch": [asdict(batch) for batch in self.batches],
            "stops_paying_at_batch": self.stops_at,
            "with_a_draft_twice_as_fast": self.faster,
            "with_half_the_misses": self.better,
            "t_target_over_t_draft": self.ratio,
        }


def look_ahead(
    costs: Mapping[str, Any],
    *,
    acceptance: float,
    decided: float,
    prompt_tokens: int,
    draft_actors: int,
    progress: Callable[[str, float], None],
) -> Outlook:
    """Simulate one pipeline.

    Args:
        costs: measured seconds, as `core.costs.Costs.as_dict` gives them. Passes wider than any measured one are taken
            to grow as the widest measured ones do.
        acceptance: chance that the draft's best guess is the target's token.
        decided: see `planning.Text`.

    Raises:
        InvalidScenario: the costs lack times of the target or of the draft.
    """
    hardware = Hardware.from_costs(costs, draft_actors=draft_actors)
    text = Text(min(max(acceptance, 0.01), 1.0), prompt_tokens, _ANSWER_TOKENS, decided)
    done, total = 0, len(GAMMAS) + len(SEQUENCES) + len(BATCHES) + 3

    def step(what: str) -> None:
        nonlocal done
        progress(f"simulating {what}", done / total)
        done += 1

    step("the target alone")
    alone = _speed(_one_by_one(hardware, text, draft=False))
    gammas, sequences, batches = {}, {}, []
    for gamma in GAMMAS:
        step(f"gamma {gamma}")
        gammas[gamma] = _speed(_one_by_one(hardware, text, Policy(draft_budget=gamma, fallback=False))) / alone
    simulated: dict[int, Simulated] = {}
    for count in SEQUENCES:
        step(f"{count} sequences")
        simulated[count] = _one_by_one(hardware, text, sequences=count)
        sequences[count] = _speed(simulated[count]) / alone
    for size in BATCHES:
        step(f"{size} requests at once")
        batches.append(_batch(replace(hardware, slots=max(size, hardware.slots)), text, size))
    step("a faster draft")
    draft = Curve({width: _FASTER * seconds for width, seconds in hardware.draft.points.items()})
    faster = _speed(_one_by_one(replace(hardware, draft=draft), text)) / alone
    step("a better draft")
    better = _speed(_one_by_one(hardware, replace(text, acceptance=(1.0 + text.acceptance) / 2.0))) / alone
    plans = simulated[max(SEQUENCES)].plans
    return Outlook(
        auto=sequences[max(SEQUENCES)],
        auto_gamma=float(median([plan.gamma for plan in plans if plan.gamma] or [0])),
        auto_lead=float(median([plan.lead for plan in plans if plan.lead] or [0])),
        gammas=gammas,
        sequences=sequences,
        batches=tuple(batches),
        faster=faster,
        better=better,
        ratio=hardware.target(1) / hardware.draft(1),
    )


def _one_by_one(
    hardware: Hardware, text: Text, policy: Policy | None = None, *, sequences: int = 4, draft: bool = True
) -> Simulated:
    traffic = Traffic(_TOKENS // text.answer_tokens)
    return simulate(hardware, text, policy, max_sequences=sequences, draft=draft, traffic=traffic)


def _batch(hardware: Hardware, text: Text, size: int) -> Batch:
    traffic = Traffic(max(_TOKENS // text.answer_tokens, 2 * size), size)
    text = replace(text, answer_tokens=max(64, text.answer_tokens // size))  # many requests have tokens enough
    alone = _speed(simulate(hardware, text, draft=False, traffic=traffic))
    policies = (Policy(), Policy(fallback=False))
    auto, always = (_speed(simulate(hardware, text, policy, traffic=traffic)) / alone for policy in policies)
    return Batch(size, auto, always)


def _speed(simulated: Simulated) -> float:
    return simulated.tokens_per_second
