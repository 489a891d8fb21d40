// The chat. All text, the reader's and the model's, enters the page as text nodes, never as markup.

import { bar } from "./charts.js";
import { watch } from "./figures.js";
import { ChatError, complete, refusal } from "./stream.js";

const at = (id) => document.getElementById(id);
const ORIGINS = {
  accepted: "accepted draft", correction: "correction by the target", bonus: "bonus from the target", plain: "plain, the target alone",
};

let turns = [];      // {question, answers: [{text, draft, ...}], element}
let running = null;  // the AbortController of the answer in flight
let model = null;
let key = sessionStorage.getItem("duo_ray-key") ?? "";
const speeds = { with: null, without: null };

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  Object.assign(element, attributes);
  element.append(...children);
  return element;
}

// --- asking

function history(turn) {
  const messages = [];
  for (const each of turns.slice(0, turns.indexOf(turn))) {
    const last = each.answers.findLast((answer) => answer.text);
    // A question that got no answer is left out: many templates want the roles to alternate.
    if (last) messages.push({ role: "user", content: each.question }, { role: "assistant", content: last.text });
  }
  return [...messages, { role: "user", content: turn.question }];
}

async function servedModel() {
  let response;
  try {
    response = await fetch("v1/models", { headers: headers() });
  } catch {
    throw new ChatError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data[0].id;
}

async function ask(turn, draft) {
  const answer = addAnswer(turn, draft);
  running = new AbortController();
  showRunning();
  const began = performance.now();
  try {
    model ??= await servedModel();
    at("model").textContent = model;
    const body = {
      model, messages: history(turn), stream: true, stream_options: { include_usage: true },
      temperature: at("temperature").valueAsNumber, max_tokens: at("max-tokens").valueAsNumber, duo: { draft, trace: true },
    };
    for await (const event of complete(body, headers(), running.signal)) {
      receive(answer, event, performance.now() - began);
    }
    finish(answer);
  } catch (error) {
    const stopped = error.name === "AbortError";
    finish(answer, stopped ? "stopped" : "");
    if (stopped) return;
    if (!(error instanceof ChatError)) throw error;
    fail(answer, error);
  } finally {
    running = null;
    showRunning();
  }
}

function addAnswer(turn, draft) {
  const text = make("div", { className: "text", tabIndex: 0, role: "group" });
  text.setAttribute("aria-busy", "true");
  text.setAttribute("aria-label", `Answer ${draft ? "with" : "without"} draft; arrow keys go from token to token`);
  const under = make("p", { className: "under" });
  const element = make("article", { className: "answer" }, make("h3", { textContent: draft ? "With draft" : "Without draft" }), text, under);
  turn.element.querySelector(".answers").append(element);
  const answer = { turn, draft, text: "", element, box: text, under, tokens: 0, drafted: 0, first: null, timings: null, reason: null };
  turn.answers.push(answer);
  text.answer = answer;
  keepAtEnd(true);
  return answer;
}

function receive(answer, event, elapsed) {
  const choice = event.choices?.[0];
  if (choice?.delta?.content) answer.text += choice.delta.content;
  if (choice?.finish_reason) answer.reason = choice.finish_reason;
  if (event.timings) answer.timings = event.timings;
  const follow = nearEnd();
  // Without a trace (another server behind this page) the text still shows.
  const tokens = event.duo?.tokens ?? (choice?.delta?.content ? [{ text: choice.delta.content, origin: "plain", step: null }] : []);
  for (const token of tokens) {
    answer.tokens += 1;
    answer.first ??= elapsed;
    if (!token.text) continue;  // bytes that complete a later token's character
    const span = make("span", { className: `token ${token.origin in ORIGINS ? token.origin : "plain"}`, textContent: token.text });
    span.dataset.step = token.step ?? "";
    answer.box.append(span);
  }
  if (answer.first !== null && elapsed > answer.first) {
    answer.under.textContent = `${answer.tokens} tokens, ${((answer.tokens - 1) / (elapsed - answer.first) * 1000).toFixed(1)} tokens/s`;
  }
  if (follow) keepAtEnd();
}

function finish(answer, note = "") {
  answer.box.setAttribute("aria-busy", "false");
  const t = answer.timings, parts = [];
  if (t) {
    parts.push(`${t.predicted_n} tokens`, `${t.predicted_per_second.toFixed(1)} tokens/s`);
    if (t.draft_n) parts.push(`${t.draft_n_accepted} of ${t.draft_n} drafted tokens kept`);
    speeds[answer.draft ? "with" : "without"] = t.predicted_per_second;
    compare();
  } else if (answer.tokens) {
    parts.push(`${answer.tokens} tokens`);
  }
  if (answer.first !== null) parts.push(`first after ${Math.round(answer.first)} ms`);
  if (answer.reason === "length") parts.push("cut at the limit of tokens");
  if (note) parts.push(note);
  answer.under.replaceChildren(...parts.map((part) => make("span", { textContent: part })));
  document.querySelectorAll(".again").forEach((button) => button.remove());
  const again = make("button", { type: "button", className: "again", textContent: `Ask again ${answer.draft ? "without" : "with"} draft` });
  again.addEventListener("click", () => { if (!running) ask(answer.turn, !answer.draft); });
  answer.under.append(again);
  keepAtEnd();
}

function fail(answer, error) {
  answer.element.append(make("p", { className: "error", role: "alert", textContent: error.message }));
  if (error.status === 401) wantKey();
  if (error.status === 404) model = null;  // another model is served now
  keepAtEnd(true);
}

function compare() {
  const best = Math.max(speeds.with ?? 0, speeds.without ?? 0);
  for (const which of ["with", "without"]) {
    const row = at(`compare-${which}`), speed = speeds[which];
    bar(row.firstElementChild, speed === null ? 0 : speed / best);
    row.lastElementChild.textContent = speed === null ? "not asked yet" : `${speed.toFixed(1)} tokens/s`;
  }
  at("compare-ratio").textContent = speeds.with && speeds.without ? `${(speeds.with / speeds.without).toFixed(2)} times as fast` : "";
  at("compare").hidden = false;
}

function wantKey() {
  if (!at("key-form").hidden) return;  // asked already: whoever types elsewhere is left alone
  at("key-form").hidden = false;
  const idle = document.activeElement === document.body || (document.activeElement === at("prompt") && !at("prompt").value);
  if (idle) at("key").focus();
}

// --- the log

const nearEnd = () => at("log").scrollHeight - at("log").scrollTop - at("log").clientHeight < 60;

function keepAtEnd(always = false) {
  if (always || nearEnd()) at("log").scrollTop = at("log").scrollHeight;
}

function showRunning() {
  const focused = [at("send"), at("stop")].includes(document.activeElement);
  at("send").hidden = running !== null;
  at("stop").hidden = running === null;
  at("new-chat").disabled = running !== null;
  document.querySelectorAll(".again").forEach((button) => { button.disabled = running !== null; });
  if (focused) at(running ? "stop" : "prompt").focus();
}

function send() {
  const question = at("prompt").value.trim();
  const wrong = ["temperature", "max-tokens"].find((id) => !at(id).reportValidity() || Number.isNaN(at(id).valueAsNumber));
  if (!question || running || wrong) return;
  at("prompt").value = "";
  at("welcome").hidden = true;
  const element = make("div", { className: "turn" }, make("p", { className: "question", textContent: question }), make("div", { className: "answers" }));
  const turn = { question, answers: [], element };
  at("log").append(element);
  turns.push(turn);
  ask(turn, at("draft").checked);
}

// --- which step a token came from: by pointer, or with the arrow keys from a focused answer

let shown = null;

function showToken(span) {
  if (shown === span) return;
  shown?.parentElement?.querySelectorAll(".here, .same-step").forEach((each) => each.classList.remove("here", "same-step"));
  shown = span;
  const tip = at("tip");
  tip.hidden = span === null;
  if (span === null) return;
  const step = span.dataset.step, origin = [...span.classList].find((name) => name in ORIGINS);
  const same = step === "" ? [span] : [...span.parentElement.children].filter((each) => each.dataset.step === step);
  same.forEach((each) => each.classList.add("same-step"));
  span.classList.add("here");
  tip.textContent = step === "" ? ORIGINS[origin] : `Step ${step}: ${ORIGINS[origin]}; ${same.length} ${same.length === 1 ? "token" : "tokens"} in this step`;
  const place = span.getClientRects()[0] ?? span.getBoundingClientRect(), size = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${place.top > size.height + 12 ? place.top - size.height - 6 : place.bottom + 6}px`;
}

at("log").addEventListener("pointerover", (event) => showToken(event.target.closest(".token")));
at("log").addEventListener("pointerleave", () => showToken(null));
at("log").addEventListener("scroll", () => showToken(null));
at("log").addEventListener("focusin", (event) => {
  if (event.target.matches(".text")) showToken(event.target.firstElementChild);
});
at("log").addEventListener("focusout", () => showToken(null));
at("log").addEventListener("keydown", (event) => {
  const box = event.target.closest(".text"), move = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!box || !move) return;
  event.preventDefault();
  const next = shown?.parentElement === box ? shown[move] : box.firstElementChild;
  if (next) { next.scrollIntoView({ block: "nearest" }); showToken(next); }
});

// --- controls

at("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
addEventListener("keydown", (event) => { if (event.key === "Escape") { showToken(null); running?.abort(); } });
at("stop").addEventListener("click", () => running?.abort());
at("new-chat").addEventListener("click", () => {
  turns.forEach((turn) => turn.element.remove());
  turns = [];
  at("welcome").hidden = false;
  at("prompt").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  sessionStorage.setItem("duo_ray-key", key);
  at("key").value = "";
  at("key-form").hidden = true;
  const last = turns.at(-1), answer = last?.answers.at(-1);
  if (answer?.element.querySelector(".error") && !answer.text && !running) {
    answer.element.remove();
    last.answers.pop();
    ask(last, answer.draft);  // the question that was refused
  }
  at("prompt").focus();
});

const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  const isDark = (theme ?? (dark.matches ? "dark" : "light")) === "dark";
  at("theme").textContent = isDark ? "Light" : "Dark";
  at("theme").setAttribute("aria-label", `Switch to ${isDark ? "light" : "dark"} colours`);
}

at("theme").addEventListener("click", () => {
  const next = (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
  localStorage.setItem("duo_ray-theme", next);
  setTheme(next);
});
dark.addEventListener("change", () => setTheme(localStorage.getItem("duo_ray-theme")));
setTheme(localStorage.getItem("duo_ray-theme"));

const narrow = matchMedia("(max-width: 900px)");
const fold = () => { at("figures").open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();

servedModel().then((name) => { model = name; at("model").textContent = name; }, (error) => { if (error.status === 401) wantKey(); });
watch(headers, wantKey);
