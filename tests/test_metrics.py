"""What is counted, what is shown, and that nobody who reads it can hold a step up."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from duo_ray.core.precision import Estimate
from duo_ray.core.stats import RequestStats, StepTimes
from duo_ray.metrics import Meter, RequestMeter, prometheus, snapshot
from duo_ray.metrics.exposition import RayPublisher
from duo_ray.metrics.history import HISTORY_S
from duo_ray.metrics.series import SERIES, Kind, ray_name
from duo_ray.metrics.tally import PENDING_LIMIT, Tally
from duo_ray.types import DraftBlock, DraftSequence, FinishReason, Span

TIMES = StepTimes(target=0.08, overhead=0.004, plain=0.07)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tally(clock):
    tally = Tally(clock)
    for actor in ("target", "draft-0", "draft-1"):
        tally.actor(actor)
    return tally


def advance(stats, *, proposed=0, kept=0, tokens=1, sequences=(), asked=0, plain=None, seconds=0.01):
    """One step, as `core.step` notes it in the stats."""
    stats.verified(proposed, kept)
    stats.completion_tokens += tokens
    if asked:
        stats.gamma_history.append(asked)
    if sequences:
        block = DraftBlock(
            "r", 0, tuple(DraftSequence(None, (0,) * n, 1.0) for n in sequences), Span(0, 1), ((1, seconds),)
        )
        stats.drafted(block)
    if plain is not None:
        stats.reasons[plain] += 1


def totals(tally):
    return {name: value for (name, labels), value in tally.counters().items() if not labels}


def shown(*tallies):
    return snapshot([tally.figures(replica=f"replica-{i}") for i, tally in enumerate(tallies)])


def labelled(tally, name):
    return {labels[0]: value for (each, labels), value in tally.counters().items() if each == name and value}


# --- counting


def test_counters_add_up_what_the_steps_of_all_requests_brought(tally):
    for _ in range(2):
        stats = RequestStats(started=0.0, prompt_tokens=7)
        with RequestMeter(tally) as meter:
            meter.admitted()
            advance(stats, asked=4, sequences=(3, 1))
            meter.step(stats)
            advance(stats, proposed=3, kept=2, tokens=3, asked=5, sequences=(5,))
            meter.step(stats, TIMES)
            advance(stats, tokens=1, plain="does not pay")
            meter.step(stats, TIMES)
    assert totals(tally) | {"duo_ray_active_seconds": 0.0} == {
        "vllm:spec_decode_num_drafts": 2,
        "vllm:spec_decode_num_draft_tokens": 18,
        "vllm:spec_decode_num_accepted_tokens": 4,
        "duo_ray_wasted_tokens": 14,
        "duo_ray_prompt_tokens": 14,
        "duo_ray_generated_tokens": 10,
        "duo_ray_target_steps": 6,
        "duo_ray_active_seconds": 0.0,
    }
    assert labelled(tally, "vllm:spec_decode_num_accepted_tokens_per_pos") == {"0": 2, "1": 2}
    assert labelled(tally, "duo_ray_proposed_tokens_per_pos") == {"0": 2, "1": 2, "2": 2}
    assert labelled(tally, "duo_ray_plain_steps") == {"does not pay": 2}


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (None, "cancelled"),
        (GeneratorExit(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
        (RuntimeError("broken"), "error"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("admitted", [False, True])
def test_running_and_queued_return_to_zero_whatever_ends_a_request(tally, end, outcome, admitted):
    """Case 19."""

    def serve():
        with RequestMeter(tally) as meter:
            assert shown(tally)["queued"] == 1
            if admitted:
                meter.admitted()
                assert (shown(tally)["running"], shown(tally)["queued"]) == (1, 0)
            if end is not None:
                raise end

    if end is None:
        serve()
    else:
        with pytest.raises(type(end)):
            serve()
    assert (shown(tally)["running"], shown(tally)["queued"]) == (0, 0)
    assert labelled(tally, "duo_ray_requests") == {outcome: 1}


@pytest.mark.parametrize("reason", FinishReason)
def test_a_request_that_finished_is_counted_by_its_reason_even_if_its_reader_left_before_the_end(tally, reason):
    def serve():
        with RequestMeter(tally) as meter:
            meter.admitted()
            meter.finished(reason)
            raise GeneratorExit

    with pytest.raises(GeneratorExit):
        serve()
    assert labelled(tally, "duo_ray_requests") == {str(reason): 1}


def test_what_is_expected_of_each_quantisation_is_shown(tally):
    assert shown(tally)["replicas"][0]["draft_quants"] == []
    estimates = (Estimate("Q8_0", False, 0.03, 0.9, 0.8, 14.0), Estimate("Q4_0", True, 0.02, 0.8, 0.7, 16.5))
    tally.quantised("Q4_0", estimates)
    tally.quantised("Q4_0", estimates)
    assert labelled(tally, "duo_ray_draft_quant_requests") == {"Q4_0": 2}
    gauges = tally.gauges()
    assert [gauges["duo_ray_draft_quant_in_use", (quant,)] for quant in ("Q8_0", "Q4_0")] == [0.0, 1.0]
    assert gauges["duo_ray_draft_quant_t_draft_seconds", ("Q4_0",)] == 0.02
    assert gauges["duo_ray_draft_quant_acceptance", ("Q8_0",)] == 0.9
    assert gauges["duo_ray_draft_quant_expected_tokens_per_second", ("Q8_0",)] == 14.0
    assert shown(tally)["replicas"][0]["draft_quants"][1] == {
        "quant": "Q4_0", "in_use": True, "t_draft_ms": 20.0, "acceptance": 0.8, "expected_tokens_per_s": 16.5,
    }  # fmt: skip


def test_restarts_are_counted_by_actor(tally):
    tally.restarted("draft-1")
    tally.restarted("draft-1")
    tally.restarted("target")
    assert shown(tally)["totals"]["restarts"] == {"target": 1, "draft-0": 0, "draft-1": 2}


def test_time_to_first_token_counts_from_arrival_and_gaps_only_between_outputs(tally, clock):
    stats = RequestStats(started=0.0)
    with RequestMeter(tally) as meter:
        clock.now += 3.0  # in the queue
        meter.admitted()
        clock.now += 0.25
        stats.first_token = clock.now
        advance(stats)
        meter.step(stats)
        clock.now += 0.5
        advance(stats, tokens=0)
        meter.step(stats, TIMES)
        clock.now += 0.5
        advance(stats, tokens=4)
        meter.step(stats, TIMES)
    values = tally.take_values()
    assert values["duo_ray_time_to_first_token_seconds"] == [pytest.approx(3.25)]
    assert values["duo_ray_inter_token_seconds"] == [pytest.approx(1.0)]


def test_values_for_ray_do_not_pile_up_when_nobody_takes_them(tally):
    for _ in range(PENDING_LIMIT + 5):
        tally.first_token(1, 0.1)
    assert len(tally.take_values()["duo_ray_time_to_first_token_seconds"]) == PENDING_LIMIT
    counts, _ = tally.histograms()["duo_ray_time_to_first_token_seconds"]
    assert sum(counts) == PENDING_LIMIT + 5


# --- means over time


def test_idle_shares_are_of_the_time_with_a_running_request(tally, clock):
    with RequestMeter(tally) as meter:
        meter.admitted()
        clock.now += 4.0
        tally.busy("target", 3.0)
        tally.busy("draft-0", 2.0)
    clock.now += 1.0
    now = shown(tally)["now"]
    assert now["target_idle"] == pytest.approx(0.25)
    assert now["draft_idle"] == pytest.approx(0.75)  # draft-1 did nothing
    assert totals(tally)["duo_ray_active_seconds"] == pytest.approx(4.0)


def test_gamma_sequences_and_times_are_means_of_the_last_seconds(tally, clock):
    stats = RequestStats(started=0.0)
    with RequestMeter(tally) as meter:
        meter.admitted()
        for asked in (4, 8, 0):
            clock.now += 0.1
            advance(stats, asked=asked, sequences=(1,) * (asked // 4), seconds=0.03)
            meter.step(stats, TIMES)
    now = shown(tally)["now"]
    assert now["gamma"] == pytest.approx(4.0)
    assert now["sequences"] == pytest.approx(1.5)
    assert now["sequences_per_block"] == {"1": 1, "2": 1}
    assert now["t_target_ms"] == pytest.approx(80.0)
    assert now["t_draft_ms"] == pytest.approx(20.0)
    clock.now += 30
    assert shown(tally)["now"]["gamma"] is None
    assert shown(tally)["now"]["tokens_per_s"] == 0.0


def test_the_speed_up_estimate_is_plain_time_over_the_time_between_outputs(tally, clock):
    stats = RequestStats(started=0.0)
    with RequestMeter(tally) as meter:
        meter.admitted()
        advance(stats)
        meter.step(stats)
        for seconds, tokens in ((0.1, 3), (0.1, 0), (0.2, 2)):  # waiting for others' rounds included
            clock.now += seconds
            advance(stats, tokens=tokens)
            meter.step(stats, StepTimes(target=0.08, overhead=0.0, plain=0.06))
    assert shown(tally)["now"]["speedup_estimate"] == pytest.approx(5 * 0.06 / 0.4, abs=1e-3)


def test_acceptance_by_position_is_kept_out_of_judged(tally):
    stats = RequestStats(started=0.0)
    with RequestMeter(tally) as meter:
        meter.admitted()
        for kept in (0, 1, 3, 3):
            advance(stats, proposed=3, kept=kept)
            meter.step(stats, TIMES)
    assert shown(tally)["now"]["acceptance_per_position"] == [0.75, 0.5, 0.5]


def test_the_history_has_one_value_a_second_and_gaps_where_nothing_happened(tally, clock):
    stats = RequestStats(started=0.0)
    with RequestMeter(tally) as meter:
        meter.admitted()
        advance(stats, tokens=5, asked=6)
        meter.step(stats, TIMES)
        clock.now += 2.0
        advance(stats, tokens=2, asked=2)
        meter.step(stats, TIMES)
        clock.now += 1.0
        history = shown(tally)["history"]
    assert {len(values) for values in history.values()} == {HISTORY_S}
    assert history["tokens_per_s"][-4:] == [0, 5, 0, 2]
    assert history["gamma"][-4:] == [None, 6.0, None, 2.0]
    assert history["running"][-4:] == [0, 1, 1, 1]


def test_the_history_stays_bounded_over_a_day(tally, clock):
    stats = RequestStats(started=0.0)
    with RequestMeter(tally) as meter:
        meter.admitted()
        for _ in range(1000):
            clock.now += 86.4
            advance(stats)
            meter.step(stats, TIMES)
    assert len(tally._history) <= HISTORY_S + 1
    assert totals(tally)["duo_ray_active_seconds"] == pytest.approx(86400.0)


# --- several pipelines


def test_figures_of_several_pipelines_are_those_of_one_that_does_the_work_of_all(clock):
    tallies = [Tally(clock) for _ in range(2)]
    for tally, tokens, busy in zip(tallies, (6, 2), (1.5, 0.5), strict=True):
        for actor in ("target", "draft-0"):
            tally.actor(actor)
        stats = RequestStats(started=0.0, prompt_tokens=3)
        with RequestMeter(tally) as meter:
            meter.admitted()
            clock.now += 2.0
            tally.busy("target", busy)
            advance(stats, tokens=tokens, asked=tokens, proposed=1, kept=tokens // 6)
            meter.step(stats, TIMES)
            meter.finished(FinishReason.STOP)
        clock.now -= 2.0  # at the same time
    clock.now += 2.0
    both = shown(*tallies)
    assert both["now"]["tokens_per_s"] == pytest.approx(4.0)
    assert both["now"]["gamma"] == pytest.approx(4.0)
    assert both["now"]["target_idle"] == pytest.approx(0.5)
    assert both["now"]["draft_idle"] == 1.0
    assert both["now"]["acceptance_per_position"] == [0.5]
    assert both["totals"]["requests"]["stop"] == 2
    assert (both["totals"]["generated_tokens"], both["totals"]["prompt_tokens"]) == (8, 6)
    assert [each["generated_tokens"] for each in both["replicas"]] == [6, 2]
    assert both["history"]["running"][-1] == 2


def test_one_pipeline_shows_the_same_alone_as_beside_one_that_does_nothing(tally, clock):
    stats = RequestStats(started=0.0)
    with RequestMeter(tally) as meter:
        meter.admitted()
        for _ in range(3):
            clock.now += 0.7
            tally.busy("target", 0.4)
            advance(stats, asked=4, sequences=(2, 1), proposed=3, kept=2, tokens=3)
            meter.step(stats, TIMES)
    alone, beside = shown(tally), shown(tally, Tally(clock))
    del alone["replicas"], beside["replicas"]
    assert beside == alone


def test_every_pipeline_has_series_of_its_own_and_each_family_one_description():
    meters = [Meter(model="demo", replica=name) for name in ("a", "b")]
    for meter, tokens in zip(meters, (5, 7), strict=True):
        meter.tally.first_token(tokens, 0.3)
    text = prometheus([meter.figures() for meter in meters]).decode()
    prompts = {sample.labels["replica"]: sample.value for sample in samples(text, "duo_ray_prompt_tokens")}
    counts = {sample.labels["replica"]: sample.value for sample in samples(text, "duo_ray_time_to_first_token_seconds")}
    assert prompts == {"a": 5.0, "b": 7.0}
    assert counts == {"a": 0.3, "b": 0.3}  # the last sample of a histogram is its sum
    assert text.count("# TYPE duo_ray_prompt_tokens_total ") == 1


def samples(text, name):
    (family,) = (each for each in text_string_to_metric_families(text) if each.name == name)
    return family.samples


# --- exposition


def test_the_text_has_every_series_with_its_labels_and_vllms_names_unchanged():
    meter = Meter(model="demo", replica="a")
    meter.tally.actor("target")
    meter.tally.quantised("Q4_0", (Estimate("Q4_0", True, 0.02, 0.8, 0.7, 16.5),))
    stats = RequestStats(started=0.0)
    with meter.request() as request:
        request.admitted()
        advance(stats, proposed=2, kept=1, tokens=2, asked=2, sequences=(2,), plain="late")
        request.step(stats, TIMES)
        advance(stats)
        request.step(stats, TIMES)
        families = {each.name: each for each in text_string_to_metric_families(prometheus([meter.figures()]).decode())}
    assert (
        set(families)
        == {series.name for series in SERIES}
        >= {
            "vllm:spec_decode_num_drafts",
            "vllm:spec_decode_num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
        }
    )
    for series in SERIES:
        samples = families[series.name].samples
        assert samples, series.name
        for sample in samples:
            assert sample.labels["model_name"] == "demo"
            assert sample.labels["replica"] == "a"
            assert set(sample.labels) - {"le"} == {"model_name", "replica", *series.labels}
    (drafts,) = families["vllm:spec_decode_num_drafts"].samples
    assert (drafts.name, drafts.value) == ("vllm:spec_decode_num_drafts_total", 1.0)
    buckets = [each for each in families["duo_ray_inter_token_seconds"].samples if each.name.endswith("_bucket")]
    assert buckets[-1].labels["le"] == "+Inf"
    assert buckets[-1].value == 1.0


def test_label_values_from_outside_are_escaped():
    meter = Meter(model='a"b\\c\nd', replica="")
    (family, *_) = text_string_to_metric_families(prometheus([meter.figures()]).decode())
    assert family.samples[0].labels["model_name"] == 'a"b\\c\nd'


class FakeMetric:
    """Keeps what it is told, or hangs."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.told: list[tuple[float, dict[str, str]]] = []
        self._gate = gate

    def record(self, value, tags=None):
        if self._gate is not None:
            self._gate.wait()
        self.told.append((value, dict(tags or {})))

    inc = set = observe = record


def test_ray_is_told_what_is_new_since_the_last_time(tally):
    publisher = RayPublisher(tally, {"model_name": "demo", "replica": "a"})
    publisher._metrics = {series.name: FakeMetric() for series in SERIES}
    tally.restarted("target")
    publisher.publish()
    tally.restarted("target")
    tally.restarted("draft-0")
    tally.first_token(5, 0.25)
    publisher.publish()
    restarts = publisher._metrics["duo_ray_actor_restarts"].told
    assert restarts == [(1, {"actor": "target"}), (1, {"actor": "target"}), (1, {"actor": "draft-0"})]
    assert publisher._metrics["duo_ray_prompt_tokens"].told == [(5, {})]
    assert publisher._metrics["duo_ray_time_to_first_token_seconds"].told == [(0.25, {})]
    assert publisher._metrics["duo_ray_running"].told == [(0.0, {}), (0.0, {})]


def test_a_metrics_agent_that_hangs_holds_up_no_step_and_no_reader(tally):
    gate = threading.Event()
    publisher = RayPublisher(tally, {"model_name": "demo", "replica": "a"}, period=0.01)
    hanging = FakeMetric(gate)
    publisher._metrics = {series.name: hanging for series in SERIES}
    publisher.start()
    stats = RequestStats(started=0.0)
    try:
        with RequestMeter(tally) as meter:
            meter.admitted()
            for _ in range(100):
                advance(stats)
                meter.step(stats, TIMES)
            assert not hanging.told
            assert shown(tally)["totals"]["generated_tokens"] == 100
    finally:
        gate.set()
        publisher.close()


def test_a_metrics_agent_that_fails_is_reported_once_and_tried_again(tally, caplog):
    publisher = RayPublisher(tally, {"model_name": "demo", "replica": "a"}, period=0.001)
    calls = threading.Semaphore(0)

    class Broken(FakeMetric):
        def record(self, value, tags=None):
            calls.release()
            raise RuntimeError("agent is away")

        inc = set = observe = record

    publisher._metrics = {series.name: Broken() for series in SERIES}
    publisher.start()
    for _ in range(3):
        assert calls.acquire(timeout=30)
    publisher.close()
    assert [record.message for record in caplog.records] == ["Ray's metrics: agent is away; trying on"]


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_every_name_is_one_that_rays_agents_take(series):
    """They hand it to OpenTelemetry, which allows no colon; Ray itself only warns of it."""
    from opentelemetry.metrics._internal.instrument import _name_regex

    assert _name_regex.fullmatch(f"ray_{ray_name(series.name)}")
    assert not series.name.endswith("_total")
    assert (series.kind is Kind.HISTOGRAM) == bool(series.bounds)


# --- dashboard


def test_the_dashboard_asks_only_for_what_is_exported():
    dashboard = (Path(__file__).parents[1] / "deployments/grafana.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"\bray_(?:duo_ray|vllm)_\w+", dashboard))
    assert len(asked) > 20
    assert asked <= {name for series in SERIES for name in exported(series)}


def exported(series):
    """The names of a series' samples, as Ray's agents show them."""
    endings = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    return {f"ray_{ray_name(series.name)}{ending}" for ending in endings[series.kind]}
