"""Everything that was found out about a pair of models on a machine, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from duo_ray.actors.prepare import Prepared
from duo_ray.diagnosis.advice import Advice, Facts, advise
from duo_ray.diagnosis.measuring import Observed, Progress
from duo_ray.diagnosis.outlook import PAYS, Outlook, look_ahead
from duo_ray.diagnosis.positions import Estimate, Group, by_kind, by_place, by_position, group, spread
from duo_ray.diagnosis.scoring import Scores, score
from duo_ray.models.vocabulary import Strategy

_FREQUENT = 20
"""Tokens of a kind, at least, for its agreement to be worth a word."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Chance that a drafted token is kept: by the distributions, and as the pipeline had it."""

    predicted: Estimate | None
    measured: Estimate | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `duo-ray diagnose`."""

    target: str
    draft: str
    texts: int
    overall: Group
    kinds: tuple[Group, ...]
    places: tuple[Group, ...]
    greedy: Acceptance
    sampled: Acceptance
    sampling_temperature: float
    observed: Observed
    scores: Scores
    outlook: Outlook
    advice: tuple[Advice, ...]

    @property
    def verdict(self) -> str:
        """Whether speculation pays here, in one sentence."""
        measured, simulated = self.observed.speedup, self.outlook.auto
        pays = "pays" if measured >= PAYS else "does not pay"
        stop = self.outlook.stops_at
        if stop == 1:
            batches = "by simulation it pays at no batch size"
        elif stop is None:
            batches = f"by simulation it still pays with {self.outlook.batches[-1].size} requests at once"
        else:
            batches = f"by simulation it stops paying at {stop} requests at once"
        return (
            f"speculation {pays} on this machine: {measured:.2f} times the target alone, measured, one request at a "
            f"time ({simulated:.2f} simulated); {batches}"
        )

    def as_dict(self) -> dict[str, Any]:
        """What `duo-ray diagnose --json` prints. Times in seconds, divergences in nats."""
        observed, scores = self.observed, self.scores
        return {
            "verdict": self.verdict,
            "target": self.target,
            "draft": self.draft,
            "draft_quantisation": scores.quant,
            "texts": self.texts,
            "vocabulary": observed.match.as_dict(),
            "target_probability_on_common_tokens": scores.shared_mass,
            "distributions": {
                "all": _named(self.overall),
                "by_kind": [_named(each) for each in self.kinds],
                "by_place": [_named(each) for each in self.places],
                "by_position": [_named(each) for each in by_position(self.scores.positions)],
            },
            "acceptance": {
                "greedy": asdict(self.greedy),
                "sampled": {"temperature": self.sampling_temperature, **asdict(self.sampled)},
            },
            "temperature": None if scores.temperature is None else asdict(scores.temperature),
            "templates": {
                **asdict(scores.templates),
                "differ": scores.templates.differ,
                "finding": scores.templates.describe(),
            },
            "ways_to_use_the_draft": [asdict(view) for view in scores.views],
            "costs": observed.costs,
            "speed": {
                "alone_tokens_per_s": observed.alone.per_second,
                "drafted_tokens_per_s": observed.drafted.per_second,
                "speedup": observed.speedup,
                "tokens": observed.drafted.tokens,
                "overhead_share": observed.overhead_share,
            },
            "simulated": self.outlook.as_dict(),
            "advice": [asdict(each) for each in self.advice],
        }


def _named(each: Group) -> dict[str, Any]:
    return {
        "name": each.name,
        "tokens": each.count,
        "kl_nats": each.divergence,
        "total_variation": each.variation,
        "agreement": each.agreement,
        "sampled_acceptance": each.overlap,
    }


def conclude(prepared: Prepared, observed: Observed, progress: Progress) -> Diagnosis:
    """Run both models along what a pipeline, now closed, has written, simulate, and advise.

    Raises:
        DuoRayError: a model cannot be loaded on this machine.
    """
    scores = score(prepared, observed, lambda text, share: progress(text, 0.8 * share))
    positions = scores.positions
    predicted = scores.used.agreement
    outlook = look_ahead(
        observed.costs,
        acceptance=predicted.value,
        decided=spread([each.confidence for each in positions]),
        prompt_tokens=round(fmean(len(text.prompt) for text in observed.written)),
        draft_actors=len(prepared.settings.drafts),
        progress=lambda text, share: progress(text, 0.8 + 0.2 * share),
    )
    kinds = by_kind(positions)
    return Diagnosis(
        target=prepared.files.source,
        draft=str(prepared.draft_path),
        texts=len(observed.written),
        overall=group("all", positions),
        kinds=kinds,
        places=by_place(positions),
        greedy=Acceptance(predicted, observed.greedy.acceptance),
        sampled=Acceptance(scores.sampled, observed.sampled.acceptance),
        sampling_temperature=observed.sampling.temperature,
        observed=observed,
        scores=scores,
        outlook=outlook,
        advice=advise(_facts(prepared, observed, scores, outlook, kinds)),
    )


def _facts(prepared: Prepared, observed: Observed, scores: Scores, outlook: Outlook, kinds: Sequence[Group]) -> Facts:
    used, temperature = scores.used, scores.temperature
    frequent = [each for each in kinds if each.count >= _FREQUENT]
    weakest = min(frequent, key=lambda each: each.agreement, default=None)
    sampled = used.strategy != Strategy.STRING
    configured = prepared.settings.coordinator.max_sequences
    known = [count for count in outlook.sequences if count <= configured] or [1]
    cores, own = prepared.machine.cores, _own_cores(prepared)
    other_strategy = next(
        (
            view
            for view in scores.views
            if view.strategy not in (used.strategy, Strategy.SAME) and view.template != "target's"
        ),
        None,
    )
    exchangeable = used.strategy == Strategy.SAME
    other_template = next(
        (view for view in scores.views if exchangeable and view.strategy == Strategy.INTERSECTION), None
    )
    draft = prepared.settings.drafts[0]
    loads = zip(prepared.machine.present, observed.idle_load, strict=False)
    return Facts(
        speedup=observed.speedup,
        tokens=observed.drafted.tokens,
        simulated=outlook.auto,
        faster=outlook.faster,
        better=outlook.better,
        ratio=outlook.ratio,
        predicted=used.agreement,
        measured=observed.greedy.acceptance,
        weakest=None if weakest is None else (weakest.name, weakest.agreement, weakest.count),
        temperature=temperature.best if temperature is not None and sampled else None,
        overlap=temperature.overlap if temperature is not None else 0.0,
        best_overlap=temperature.best_overlap if temperature is not None else 0.0,
        strategy=used.strategy,
        other_strategy=None
        if exchangeable or other_strategy is None
        else (other_strategy.strategy, other_strategy.agreement),
        other_template=None if other_template is None else other_template.agreement,
        quant=scores.quant,
        threads=draft.threads,
        idle_cores=len(set(cores) - own - prepared.machine.claimed) if own else 0,
        shared_cores=_shares_cores(prepared),
        busy=max((load for core, load in loads if core in own), default=0.0),
        overhead_share=observed.overhead_share,
        auto_speedup=outlook.auto,
        best_gamma=(outlook.best_gamma, outlook.gammas[outlook.best_gamma]),
        best_sequences=(
            outlook.best_sequences, outlook.sequences[outlook.best_sequences], outlook.sequences[max(known)]
        ),
        stops_at=outlook.stops_at,
        slots=prepared.settings.target.slots,
    )  # fmt: skip


def _own_cores(prepared: Prepared) -> set[int]:
    plan = prepared.plan
    return {*plan.target.cores, *(core for draft in plan.drafts for core in draft.cores)}


def _shares_cores(prepared: Prepared) -> bool:
    plan = prepared.plan
    return plan.device == "cpu" and any(core in plan.target.cores for draft in plan.drafts for core in draft.cores)
