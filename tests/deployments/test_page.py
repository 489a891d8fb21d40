"""The page in a real browser, over the real API and scripted models."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from duo_ray.core.stats import RequestStats, StepTimes
from duo_ray.metrics import snapshot
from duo_ray.types import Delta, DuoRayError, Finished, Origin, Overloaded, Request
from tests.deployments.scripted import ScriptedEngine, says, served

ANSWER = "Things fall down.\n\nWhy? The Earth pulls them: it is heavy, and near, and it does so day and night."
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_MS = 60_000
KEY = "a key of letters"

pytestmark = pytest.mark.browser
expect.set_options(timeout=PATIENCE_MS)


class MeteredEngine(ScriptedEngine):
    """Scripted models whose steps feed the figures, and that can be told to fail."""

    def __init__(self, answer: str = ANSWER, **options: object) -> None:
        super().__init__(says(answer, peak=25.0), **options)  # the page samples: no slips of the tongue
        for actor in ("target", "draft-0"):
            self.meter.tally.actor(actor)
        self.failure: DuoRayError | None = None
        self.fails_after = 0

    async def stream(self, request: Request) -> AsyncIterator[Delta | Finished]:
        stats = RequestStats(started=time.time())
        with self.meter.request() as meter:
            meter.admitted()
            self._fail(0)
            async for steps, item in _numbered(super().stream(request)):
                if isinstance(item, Finished):
                    meter.finished(item.reason)
                else:
                    self._fail(steps)
                    stats.completion_tokens += len(item.tokens)
                    if request.draft:
                        stats.gamma_history.append(6)
                        stats.sequences_history.append(2)
                        stats.verified(4, sum(token.origin is Origin.ACCEPTED for token in item.tokens[:4]))
                        stats.draft_tokens += 6
                        stats.drafted_seconds += 0.06
                    self.meter.tally.busy("target", 0.002)
                    meter.step(stats, StepTimes(target=0.08, overhead=0.0, plain=0.08))
                yield item

    def _fail(self, steps: int) -> None:
        if self.failure is not None and steps == self.fails_after:
            raise self.failure


async def _numbered(items: AsyncIterator[Delta | Finished]) -> AsyncIterator[tuple[int, Delta | Finished]]:
    count = 0
    async for item in items:
        count += 1
        yield count, item


def chromium() -> str:
    """The browser: CHROMIUM names it, or it is on the path."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail("no browser: install Chromium (apt-get install chromium), or name one in CHROMIUM", pytrace=False)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start for root, which is what containers run as.
        running = playwright.chromium.launch(executable_path=chromium(), chromium_sandbox=False)
        yield running
        running.close()


@contextmanager
def opened(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """The page, watched: whatever it does, it logs no error and asks nobody but its own server."""
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints: list[str] = []
    addresses: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(url)
    try:
        yield page
        # The browser itself reports every response from 400 on; the page tells the reader in words.
        assert [each for each in complaints if "Failed to load resource" not in each] == []
        assert [each for each in addresses if not each.startswith(url)] == []
        assert page.title() == "duo_ray"
    finally:
        context.close()


@pytest.fixture(scope="module")
def engine() -> MeteredEngine:
    return MeteredEngine()


@pytest.fixture(scope="module")
def url(engine: MeteredEngine) -> Iterator[str]:
    with served(engine) as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with opened(browser, url) as page:
        yield page


def ask(page: Page, text: str = "Why do things fall?", *, answers: int = 1) -> None:
    """Send a message and wait for the end of the answer."""
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    expect(page.locator(".text[aria-busy=false]")).to_have_count(answers)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.01)


# --- the chat


def test_an_answer_is_streamed_and_every_token_tinted_by_its_origin(page, url):
    ask(page)
    assert page.locator(".text").text_content() == ANSWER
    traced = httpx.post(
        f"{url}/v1/chat/completions",
        json={
            "model": "scripted",
            "messages": [{"role": "user", "content": "Why do things fall?"}],
            "temperature": 0.7,
            "duo": {"trace": True},
        },
        timeout=60,
    ).json()["duo"]["tokens"]
    shown = page.locator(".text .token").evaluate_all(
        "tokens => tokens.map(t => ({text: t.textContent, origin: t.classList[1], step: +t.dataset.step}))"
    )
    assert "".join(token["text"] for token in traced) == ANSWER
    assert {token["origin"] for token in shown} >= {"accepted", "correction"}
    assert {token["step"] for token in shown} == set(range(max(token["step"] for token in shown) + 1))


def test_origins_differ_by_underline_not_by_colour_alone(page):
    lines = page.locator("#legend .token").evaluate_all(
        "tokens => tokens.map(token => getComputedStyle(token)).map(s => s.textDecorationLine + s.textDecorationStyle)"
    )
    assert len(set(lines)) == len(Origin)
    assert page.locator("#legend .token").evaluate_all("tokens => tokens.map(token => token.textContent)") == [
        str(origin) for origin in Origin
    ]


def test_what_reader_and_model_write_is_shown_as_text_never_as_markup(browser):
    with served(MeteredEngine(HOSTILE)) as url, opened(browser, url) as page:
        ask(page, HOSTILE)
        assert page.locator(".text").text_content() == HOSTILE
        assert page.locator(".question").text_content() == HOSTILE
        assert page.locator("#log :is(img, script)").count() == 0


def test_pointing_at_a_token_shows_its_step(page):
    ask(page)
    token = page.locator(".text .token.accepted").first
    token.hover()
    step = token.get_attribute("data-step")
    expect(page.locator("#tip")).to_contain_text(f"Step {step}: accepted draft")
    same = page.locator(f'.text .token[data-step="{step}"]').count()
    expect(page.locator(".token.same-step")).to_have_count(same)


def test_the_arrow_keys_go_from_token_to_token_in_a_focused_answer(page):
    ask(page)
    page.locator(".text").focus()
    first = page.locator("#tip").text_content()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert page.locator(".text .token").nth(8).evaluate("token => token.classList.contains('here')")
    assert page.locator("#tip").text_content() != first
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def test_the_next_question_carries_the_conversation(page, engine):
    ask(page)
    ask(page, "And up?", answers=2)
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt)
    assert "Why do things fall?" in prompt
    assert ANSWER in prompt
    page.click("#new-chat")
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Anew.")
    assert "Why do things fall?" not in engine.tokenizer.decode(engine.requests[-1].prompt)


def test_temperature_and_max_tokens_are_sent_and_a_cut_answer_says_so(page, engine):
    page.fill("#temperature", "0.3")
    page.fill("#max-tokens", "7")
    ask(page)
    assert engine.requests[-1].sampling.temperature == 0.3
    assert engine.requests[-1].max_tokens == 7
    expect(page.locator(".under")).to_contain_text("cut at the limit")


def test_without_the_draft_all_is_plain_and_both_speeds_stand_side_by_side(page, engine):
    ask(page)
    assert engine.requests[-1].draft
    page.click("#draft")
    ask(page, "Again.", answers=2)
    assert not engine.requests[-1].draft
    second = page.locator(".text").nth(1)
    assert second.locator(".token:not(.plain)").count() == 0
    assert second.locator(".token.plain").count() > 10
    for which in ("with", "without"):
        expect(page.locator(f"#compare-{which}")).to_have_text(re.compile(r"[\d.]+ tokens/s"))
    expect(page.locator("#compare-ratio")).to_have_text(re.compile(r"[\d.]+ times as fast"))


def test_the_same_question_can_be_asked_again_the_other_way(page, engine):
    ask(page)
    page.click(".again")
    expect(page.locator(".turn .answer")).to_have_count(2)
    expect(page.locator(".text[aria-busy=false]")).to_have_count(2)
    assert not engine.requests[-1].draft
    assert engine.requests[-1].prompt == engine.requests[-2].prompt


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping_ends_the_work_on_the_server(browser, how):
    engine = MeteredEngine("word " * 300, pause=lambda: 0.05)
    with served(engine) as url, opened(browser, url) as page:
        page.fill("#prompt", "Go on and on.")
        page.keyboard.press("Enter")
        page.locator(".text .token").first.wait_for()
        if how == "button":
            page.click("#stop")
        else:
            page.keyboard.press("Escape")
        expect(page.locator(".under")).to_contain_text("stopped")
        eventually(lambda: not engine.running)
        expect(page.locator("#send")).to_be_visible()
        eventually(lambda: snapshot([engine.meter.figures()])["totals"]["requests"]["cancelled"] == 1)


# --- what can go wrong


def test_a_server_that_wants_a_key_gets_it_and_answers_the_question(browser):
    with served(MeteredEngine(settings={"serving.api_key": KEY})) as url, opened(browser, url) as page:
        expect(page.locator("#key-form")).to_be_visible()  # it takes the focus from an empty prompt
        page.fill("#prompt", "Why do things fall?")
        page.keyboard.press("Enter")
        expect(page.locator(".error")).to_contain_text("API key")
        expect(page.locator("#state-text")).to_have_text("wants a key")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(page.locator(".text[aria-busy=false]")).to_have_count(1)
        assert page.locator(".text").text_content() == ANSWER
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#state-text")).to_have_text("running")


def test_a_wrong_key_is_refused_in_words_and_asked_for_again(browser):
    with served(MeteredEngine(settings={"serving.api_key": KEY})) as url, opened(browser, url) as page:
        page.fill("#key", "another")
        page.click("#key-form button")
        page.fill("#prompt", "Hi")
        page.keyboard.press("Enter")
        expect(page.locator(".error")).to_contain_text("API key")
        expect(page.locator("#key-form")).to_be_visible()


@pytest.mark.parametrize(
    ("failure", "after", "words"),
    [
        (Overloaded(7, retry_after_s=3), 0, "The server is busy: 7 requests wait already: try again in 3 s"),
        (DuoRayError("the target is gone for good"), 0, "the target is gone for good"),
        (DuoRayError("the target is gone for good"), 3, "the target is gone for good"),
    ],
    ids=["busy", "at once", "in mid-stream"],
)
def test_an_error_is_told_in_words_and_what_came_before_stays(browser, failure, after, words):
    engine = MeteredEngine()
    engine.failure, engine.fails_after = failure, after
    with served(engine) as url, opened(browser, url) as page:
        ask(page)
        expect(page.locator(".error")).to_contain_text(words)
        assert bool(page.locator(".text .token").count()) == bool(after)
        engine.failure = None
        ask(page, "Once more.", answers=2)
        assert page.locator(".text").nth(1).text_content() == ANSWER
        prompt = engine.tokenizer.decode(engine.requests[-1].prompt)
        assert ("Why do things fall?" in prompt) == bool(after)  # roles alternate: no question without its answer


def test_a_prompt_over_the_context_is_refused_with_both_lengths(browser):
    with served(MeteredEngine(max_context=64)) as url, opened(browser, url) as page:
        ask(page, "long " * 60)
        expect(page.locator(".error")).to_have_text(re.compile(r"64 tokens.*prompt has \d+"))


def test_a_server_that_is_gone_is_told_in_words(browser):
    with served(MeteredEngine()) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#state")).to_contain_text("running")
    page.fill("#prompt", "Anybody there?")
    page.keyboard.press("Enter")
    expect(page.locator(".error")).to_contain_text("cannot be reached")
    expect(page.locator("#state")).to_contain_text("not reachable")
    context.close()


# --- the figures


def test_the_figures_show_the_running_system(page):
    ask(page)
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[1-9][\d.]*$"))
    expect(page.locator("#speedup")).to_have_text(re.compile(r"^[\d.]+×$"))
    expect(page.locator("#gamma")).to_have_text("6.0")
    expect(page.locator("#rate-chart path.line")).to_have_count(1)
    expect(page.locator("#gamma-chart path.line")).to_have_count(1)
    expect(page.locator("#acceptance-chart rect.bar")).to_have_count(4)
    expect(page.locator("#acceptance-chart")).to_have_attribute("aria-label", re.compile(r"position 1: \d+%"))
    expect(page.locator("#times")).to_contain_text("80.0 ms")
    expect(page.locator("#times")).to_contain_text("10.0 ms")
    expect(page.locator("#ratio")).to_have_text("ratio 8.0")
    expect(page.locator("#idle .value").first).to_have_text(re.compile(r"\d+%"))
    expect(page.locator("#sequences")).to_contain_text("100%")
    expect(page.locator("#totals")).to_contain_text("stop")
    expect(page.locator("#model")).to_have_text("scripted")


def test_a_request_in_work_is_counted_as_active(browser):
    engine = MeteredEngine("word " * 300, pause=lambda: 0.05)
    with served(engine) as url, opened(browser, url) as page:
        expect(page.locator("#running")).to_have_text("0")
        page.fill("#prompt", "Go on and on.")
        page.keyboard.press("Enter")
        expect(page.locator("#running")).to_have_text("1")
        page.keyboard.press("Escape")
        expect(page.locator("#running")).to_have_text("0")


# --- keyboard, screens, colours


def test_everything_can_be_done_with_the_keyboard_alone(page, engine):
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    page.keyboard.type("Why do things fall?")
    page.keyboard.press("Enter")
    expect(page.locator(".text[aria-busy=false]")).to_have_count(1)
    reached = []
    page.locator("body").press("Tab")
    for _ in range(20):
        reached.append(page.evaluate("() => document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert {"theme", "new-chat", "text", "again", "prompt", "send", "draft", "temperature", "max-tokens"} <= set(
        reached
    )
    page.locator("#draft").focus()
    page.keyboard.press("Space")
    assert not page.locator("#draft").is_checked()
    outline = page.locator("#draft").evaluate("element => getComputedStyle(element).outlineStyle")
    assert outline != "none"


def test_the_conversation_is_announced_when_an_answer_is_whole(page):
    ask(page)
    assert page.locator("#log").get_attribute("aria-live") == "polite"
    assert page.locator("#log").get_attribute("role") == "log"


@pytest.mark.parametrize("figures", [False, True], ids=["folded", "open"])
def test_a_phone_scrolls_in_one_direction_only(browser, url, figures):
    with opened(browser, url, viewport={"width": 360, "height": 740}) as page:
        ask(page)
        page.click(".again")
        expect(page.locator(".text[aria-busy=false]")).to_have_count(2)
        if figures:
            page.click("#figures summary")
        wide = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide == [360, 360]
        overflowing = page.evaluate(
            "() => [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 361).length"
        )
        assert overflowing == 0
        expect(page.locator("#max-tokens")).to_be_in_viewport(ratio=1)
        expect(page.locator("#send")).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize(("wish", "other"), [("light", "dark"), ("dark", "light")])
def test_colours_follow_the_system_until_the_button_says_otherwise(browser, url, wish, other):
    def scheme(page: Page) -> str:
        paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return "dark" if sum(map(int, re.findall(r"\d+", paper)[:3])) < 380 else "light"

    with opened(browser, url, color_scheme=wish) as page:
        assert scheme(page) == wish
        page.click("#theme")
        assert scheme(page) == other
        page.reload()
        assert scheme(page) == other


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere(url):
    for path in ("/", "/page/page.js", "/page/page.css"):
        response = httpx.get(url + path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "http" not in policy
    html = httpx.get(url + "/").text
    assert not re.search(r"https?://|style=|\son\w+=|<script>", html)


def test_a_part_that_is_not_there_is_a_404_and_no_way_out_of_the_folder(url):
    for name in ("nothing.js", "..%2f__init__.py", "__init__.py"):
        assert httpx.get(f"{url}/page/{name}").status_code == 404


# --- real models


@pytest.mark.ray
@pytest.mark.models
def test_the_page_of_the_running_service_shows_its_answer_and_its_figures(browser, service):
    with opened(browser, service.url) as page:
        page.fill("#temperature", "0")
        page.fill("#max-tokens", "40")
        ask(page, "Count from one to thirty in words.")
        assert page.locator(".text .token.accepted").count() > 5
        page.click(".again")
        expect(page.locator(".text[aria-busy=false]")).to_have_count(2)
        assert page.locator(".text").nth(1).text_content() == page.locator(".text").nth(0).text_content()
        assert page.locator(".text").nth(1).locator(".token:not(.plain)").count() == 0
        expect(page.locator("#compare-ratio")).to_have_text(re.compile(r"[\d.]+ times as fast"))
        for figure in ("#rate", "#speedup", "#gamma", "#times .value >> nth=0", "#times .value >> nth=1"):
            expect(page.locator(figure)).to_have_text(re.compile(r"[1-9]"))
        expect(page.locator("#acceptance-chart rect.bar").first).to_be_visible()
