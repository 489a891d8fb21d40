// The figures of the running system, read once a second.

import { bar, columns, line } from "./charts.js";
import { refusal } from "./stream.js";

const SHOWN_S = 120;
const at = (id) => document.getElementById(id);
const known = {};  // the last value of each figure: between requests the page keeps showing it

function number(value, digits = 1) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

function setBars(list, rows) {
  if (list.children.length !== rows.length * 2) {
    list.replaceChildren(...rows.flatMap(() => {
      const row = document.createElement("dd"), value = document.createElement("span");
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("aria-hidden", "true");
      value.className = "value";
      row.append(svg, value);
      return [document.createElement("dt"), row];
    }));
  }
  rows.forEach(([name, share, text], i) => {
    list.children[2 * i].textContent = name;
    bar(list.children[2 * i + 1].firstChild, share);
    list.children[2 * i + 1].lastChild.textContent = text;
  });
}

function counts(record) {
  return Object.entries(record).filter(([, count]) => count > 0).map(([name, count]) => `${count} ${name}`).join(", ");
}

function show(stats) {
  for (const [name, value] of Object.entries(stats.now)) {
    const empty = value === null || (typeof value === "object" && Object.keys(value).length === 0);
    if (!empty || !(name in known)) known[name] = value;
  }
  const recent = (name) => stats.history[name].slice(-SHOWN_S);
  const rate = number(stats.now.tokens_per_s), speedup = known.speedup_estimate === null ? "–" : `${number(known.speedup_estimate, 2)}×`;
  at("rate").textContent = rate;
  line(at("rate-chart"), recent("tokens_per_s"), `Tokens per second over the last two minutes, now ${rate}`, { area: true });
  at("speedup").textContent = speedup;
  at("running").textContent = stats.running;
  at("queued").textContent = stats.queued;
  at("summary").textContent = `${rate} tokens/s · ${speedup} (estimate) · ${stats.running} active`;
  at("gamma").textContent = number(known.gamma);
  line(at("gamma-chart"), recent("gamma"), `Gamma over the last two minutes, now ${number(known.gamma)}`);

  const acceptance = known.acceptance_per_position;
  const words = acceptance.map((share, i) => `position ${i + 1}: ${Math.round(share * 100)}%`).join(", ");
  columns(at("acceptance-chart"), acceptance, words || "No block was judged lately");
  at("acceptance-axis").replaceChildren(...acceptance.map((share, i) => {
    const label = document.createElement("span");
    label.textContent = acceptance.length <= 8 ? `${i + 1}: ${Math.round(share * 100)}%` : i + 1;
    return label;
  }));

  const target = known.t_target_ms, draft = known.t_draft_ms, longest = Math.max(target ?? 0, draft ?? 0, 1e-9);
  setBars(at("times"), [
    ["Target pass", (target ?? 0) / longest, `${number(target)} ms`],
    ["Draft token", (draft ?? 0) / longest, `${number(draft)} ms`],
  ]);
  at("ratio").textContent = target && draft ? `ratio ${number(target / draft)}` : "";
  setBars(at("idle"), [["Target", known.target_idle], ["Draft", known.draft_idle]].map(([name, share]) => [
    name, share ?? 0, share === null ? "–" : `${Math.round(share * 100)}%`,
  ]));
  const blocks = Object.entries(known.sequences_per_block), all = blocks.reduce((sum, [, count]) => sum + count, 0);
  setBars(at("sequences"), blocks.map(([name, count]) => [name, count / all, `${Math.round((100 * count) / all)}%`]));

  const { requests, generated_tokens: tokens, wasted_tokens: wasted, restarts } = stats.totals;
  at("totals").textContent = [
    stats.replicas.length > 1 && `${stats.replicas.length} replicas`, `Since the start: ${tokens} tokens`, counts(requests) && `requests: ${counts(requests)}`,
    `${wasted} drafted tokens wasted`, counts(restarts) && `restarts: ${counts(restarts)}`,
  ].filter(Boolean).join("; ") + ".";
}

function state(name, text) {
  at("state").dataset.state = name;
  if (at("state-text").textContent !== text) at("state-text").textContent = text;
}

/** Reads and shows the figures for as long as the page is open. `refused` is told when the server wants a key. */
export async function watch(headers, refused) {
  for (;;) {
    let pause = 1000;
    if (!document.hidden) {
      try {
        const sent = headers(), response = await fetch("stats", { headers: sent });
        if (response.ok) {
          show(await response.json());
          state("ok", "running");
        } else {
          const error = await refusal(response);
          state("away", response.status === 401 ? "wants a key" : `status ${response.status}`);
          if (response.status === 401 && sent.Authorization === headers().Authorization) refused(error);
          pause = 3000;
        }
      } catch {
        state("away", "not reachable");
        pause = 3000;
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, pause); });
  }
}
