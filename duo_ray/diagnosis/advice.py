"""What to do about it: rules over the figures, each advice with the figure that caused it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from duo_ray.diagnosis.outlook import PAYS
from duo_ray.diagnosis.positions import Estimate

_WORTH = 0.1
"""Gain in speed-up from which a change is worth advising."""
_CLOSE = 0.05
"""Differences of shares below this are not worth a word."""
_POOR, _GOOD = 0.6, 0.8
_BUSY = 0.3
_SLOW_ROUND = 0.15
_ENOUGH_TOKENS = 200
_SHORT_OF = 0.85
_FEW_JUDGED = 10
_WARM = 1.15

_COARSE = ("IQ1", "IQ2", "IQ3", "TQ1", "TQ2", "Q2", "Q3")
"""Weight types whose loss shows in what a small model writes."""
_FINE = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0")
"""Weight types with something to gain in speed from a smaller one."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, and why."""

    what: str
    because: str
    """With the figure."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The figures that advice rests on. Speed-ups are multiples of the target alone, shares 0 to 1."""

    speedup: float
    """Measured, greedy, one request at a time."""
    tokens: int
    """That the measured one rests on."""
    simulated: float
    faster: float
    """Simulated with a draft twice as fast."""
    better: float
    """Simulated with half of the draft's misses turned into hits."""
    ratio: float
    """T_target(1) / T_draft(1)."""
    predicted: Estimate
    """Share of the greedy positions at which the draft's first guess is the target's token."""
    measured: Estimate | None
    """Acceptance of greedy requests in the pipeline; None: nothing was drafted."""
    weakest: tuple[str, float, int] | None
    """The frequent kind of token with the least agreement: (its name, agreement, count)."""
    temperature: float | None
    """Best multiple of the draft's temperature; None where the draft is not sampled from."""
    overlap: float
    best_overlap: float
    strategy: str
    other_strategy: tuple[str, Estimate] | None
    """Another strategy for the vocabularies, with its agreement."""
    other_template: Estimate | None
    """Agreement with the chat template that is not used now; None: there is no other, or no choice."""
    quant: str | None
    threads: int
    idle_cores: int
    """Cores that neither target nor drafts nor other pipelines use."""
    shared_cores: bool
    """Target and draft take turns on a core."""
    busy: float
    """Largest busy share of the pipeline's own cores, by others' work."""
    overhead_share: float
    """Round overhead as a share of T_target(1)."""
    auto_speedup: float
    best_gamma: tuple[int, float]
    """The fastest fixed gamma and its simulated speed-up."""
    best_sequences: tuple[int, float, float]
    """(how many, their simulated speed-up, that of the configured number)."""
    stops_at: int | None
    slots: int


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Advice in order of weight; at least one."""
    found = [advice for rule in _RULES for advice in rule(facts)]
    if not found:
        found = [
            Advice("leave everything as it is", f"{facts.speedup:.2f} times the target alone, and no figure stands out")
        ]
    return tuple(found)


def _does_not_pay(facts: Facts) -> Iterator[Advice]:
    if facts.speedup < PAYS and facts.simulated < PAYS:
        needs = "neither a faster nor a better draft would change that by itself"
        if max(facts.faster, facts.better) >= PAYS:
            needs = f"a draft twice as fast would give {facts.faster:.2f}, one with half the misses {facts.better:.2f}"
        yield Advice(
            "serve the target alone (--no-draft), unless you can change the draft",
            f"{facts.speedup:.2f} times the target alone measured, {facts.simulated:.2f} simulated; {needs}",
        )


def _cores(facts: Facts) -> Iterator[Advice]:
    if facts.shared_cores:
        yield Advice(
            "give target and draft cores of their own (hardware.cpu_affinity, hardware.cpu_cores)",
            "both take turns on the same core: nothing runs at the same time",
        )
    if facts.busy > _BUSY:
        yield Advice(
            "stop the other work, or move the pipeline to idle cores (hardware.cpu_affinity)",
            f"a core of the pipeline was {facts.busy:.0%} busy while the pipeline was idle",
        )
    elif facts.overhead_share > _SLOW_ROUND:
        yield Advice(
            "keep other processes off the pipeline's cores (hardware.cpu_affinity)",
            f"the round overhead is {facts.overhead_share:.0%} of a target pass: processes wait for a core",
        )


def _in_each_others_way(facts: Facts) -> Iterator[Advice]:
    if facts.tokens >= _ENOUGH_TOKENS and facts.speedup < _SHORT_OF * facts.simulated:
        yield Advice(
            "look at what the two models share (duo-ray doctor): cores, hyper-threads, memory, other programs",
            f"{facts.speedup:.2f} times the target alone measured, {facts.simulated:.2f} simulated with the same times",
        )


def _speed_of_draft(facts: Facts) -> Iterator[Advice]:
    gain = facts.faster - facts.simulated
    if gain < _WORTH:
        return
    because = (
        f"T_target / T_draft is {facts.ratio:.1f}; a draft twice as fast would give {facts.faster:.2f} in place of "
        f"{facts.simulated:.2f}"
    )
    if facts.idle_cores:
        yield Advice(
            f"more draft threads: --set models.draft.threads={facts.threads + facts.idle_cores}",
            f"{facts.idle_cores} cores are idle, the draft has {facts.threads}; {because}",
        )
    if facts.quant is not None and facts.quant in _FINE:
        yield Advice("a smaller quantisation: --set models.draft.quant=Q4_0", f"the draft is {facts.quant}; {because}")
    elif not facts.idle_cores and facts.predicted.value >= _GOOD:
        yield Advice("a smaller draft model", f"{facts.predicted.value:.0%} of its guesses are right; {because}")


def _quality_of_draft(facts: Facts) -> Iterator[Advice]:
    gain = facts.better - facts.simulated
    if gain < _WORTH or facts.predicted.value >= 0.9:
        return
    because = (
        f"{facts.predicted.value:.0%} of its first guesses are the target's; half the misses would give "
        f"{facts.better:.2f} in place of {facts.simulated:.2f}"
    )
    if facts.quant is not None and facts.quant.startswith(_COARSE):
        yield Advice(
            "a finer quantisation of the draft, from its original file: Q4_K_M or Q8_0",
            f"the draft is {facts.quant}; {because}",
        )
    elif facts.predicted.value < _POOR:
        yield Advice("another draft, nearest to the target's family and training", because)
    yield Advice("make a draft for this target from prompts like yours: `duo-ray distill`", because)
    if facts.weakest is not None and facts.weakest[1] < facts.predicted.value - 0.15:
        kind, agreement, count = facts.weakest
        yield Advice(
            f"look at tokens of kind {kind!r} first (prompts of that sort in the training set)",
            f"only {agreement:.0%} of {count} agree there, {facts.predicted.value:.0%} over all",
        )


def _way_of_use(facts: Facts) -> Iterator[Advice]:
    if facts.other_template is not None and facts.other_template.value > facts.predicted.value + _CLOSE:
        yield Advice(
            "let the draft read its own chat template: --set models.draft.vocabulary=intersection",
            f"{facts.other_template.value:.0%} of its guesses are right so, {facts.predicted.value:.0%} as now",
        )
    if facts.other_strategy is not None:
        name, agreement = facts.other_strategy
        if agreement.value > facts.predicted.value + _CLOSE:
            yield Advice(
                f"match the vocabularies the other way: --set models.draft.vocabulary={name}",
                f"{agreement.value:.0%} of the guesses are right so, {facts.predicted.value:.0%} by {facts.strategy}",
            )
    warm = facts.temperature
    if warm is not None and not 1.0 / _WARM < warm < _WARM and facts.best_overlap > facts.overlap + 0.02:
        how = "too sure of itself" if warm > 1.0 else "not sure enough"
        yield Advice(
            "for sampled requests, another draft or a distilled one",
            f"the draft is {how}: at {warm:.2f} times its temperature {facts.best_overlap:.0%} of its tokens would be "
            f"kept in place of {facts.overlap:.0%}",
        )


def _settings(facts: Facts) -> Iterator[Advice]:
    gamma, speed = facts.best_gamma
    if speed > facts.auto_speedup + _WORTH / 2.0:
        yield Advice(
            f"a fixed budget: --set optimization.draft_budget={gamma}",
            f"simulated {speed:.2f} times the target alone, {facts.auto_speedup:.2f} with the automatic one",
        )
    count, speed, configured = facts.best_sequences
    if speed > configured + _WORTH / 4.0:
        yield Advice(
            f"--set optimization.max_sequences={count}",
            f"simulated {speed:.2f} times the target alone, {configured:.2f} as configured",
        )
    if facts.stops_at is not None and 1 < facts.stops_at <= facts.slots:
        yield Advice(
            "leave optimization.fallback on, and scale by replicas rather than by larger batches",
            f"from {facts.stops_at} requests at once drafting costs more than it gains, by simulation; "
            f"models.target.slots is {facts.slots}",
        )


def _prediction(facts: Facts) -> Iterator[Advice]:
    measured, predicted = facts.measured, facts.predicted
    if measured is None or measured.count < _FEW_JUDGED:
        yield Advice(
            "diagnose again with --set optimization.fallback=false, to see the draft at work",
            f"the controller gave up on it: only {0 if measured is None else measured.count} tokens were judged",
        )
    elif measured.value < predicted.value - _CLOSE and measured.differs_from(predicted):
        yield Advice(
            "run duo-ray check on these prompts: the draft does not see the text that it should",
            f"{measured.value:.0%} of {measured.count} judged tokens were kept, the distributions predict "
            f"{predicted.value:.0%}",
        )


_RULES: tuple[Callable[[Facts], Iterator[Advice]], ...] = (
    _does_not_pay,
    _cores,
    _in_each_others_way,
    _way_of_use,
    _speed_of_draft,
    _quality_of_draft,
    _settings,
    _prediction,
)
