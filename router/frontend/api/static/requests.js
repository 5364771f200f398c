// Recent requests with their hops, and the drawer that explains one of them.

import { $, h, keyed, text, withTip } from "./dom.js";
import { age, count, durationText, hops } from "./format.js";
import { read } from "./api.js";

const SHOWN = { newest: 24, slowest: 12, troubled: 12 };
const NONE = {
  newest: "No request has come yet. The first one appears here within a second.",
  slowest: "No request has had its first token yet.",
  troubled: "None of the last 1,000 requests failed, was cancelled, or needed a second attempt.",
};

const ttft = (row) => row.hops.first_token;

export class Requests {
  constructor() {
    this.filter = "newest";
    for (const input of $("filter").querySelectorAll("input"))
      input.addEventListener("change", () => {
        this.filter = input.value;
        this.draw(true);
      });
    this.pointed = false;
    const body = $("rows");
    body.addEventListener("pointerenter", () => (this.pointed = true));
    body.addEventListener("pointerleave", () => (this.pointed = false));
    $("hold").addEventListener("change", () => this.draw());
    this.drawer = new Drawer();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  /** Rows stay where they are while one is pointed at, has the focus, or the reader says so. */
  get held() {
    const focused = $("rows").contains(document.activeElement) && document.activeElement.matches(":focus-visible");
    return $("hold").checked || this.pointed || focused;
  }

  draw(anyway = false) {
    if (!this.rows || (this.held && !anyway)) return;
    let rows = this.rows.filter((row) => row.tags.includes(this.filter));
    if (this.filter === "slowest") rows.sort((a, b) => (ttft(b) ?? 0) - (ttft(a) ?? 0));
    rows = rows.slice(0, SHOWN[this.filter]);
    const spans = rows.map((row) => Math.max(ttft(row) ?? 0, row.predicted_ttft_ms ?? 0)).sort((a, b) => a - b);
    const scale = (spans[Math.ceil(spans.length * 0.9) - 1] || 1) * 1.05;
    keyed($("rows"), rows, (row) => row.name, (row) => this.make(row), (element, row) => this.update(element, row, scale));
    const empty = $("rows-empty");
    text(empty, rows.length ? "" : NONE[this.filter]);
    empty.hidden = rows.length > 0;
  }

  make(row) {
    const element = h(
      "tr",
      {},
      h("th", { scope: "row" }, h("button", { class: "open", "aria-haspopup": "dialog" }), h("span", { class: "tenant" })),
      h("td", {}, h("span", { class: "badge" })),
      h("td", { class: "num prompt" }),
      h("td", { class: "num output" }),
      h("td", { class: "wide" }, h("div", { class: "ttft" }, h("div", { class: "track" }), h("b", { class: "num" }))),
      h("td", { class: "num tpot" }),
      h("td", { class: "by" }),
      h("td", { class: "num age" }),
    );
    element.querySelector("button").addEventListener("click", () => this.drawer.open(row.name));
    withTip(element.querySelector(".track"), () => element.facts ?? [row.request_id]);
    return element;
  }

  update(element, row, scale) {
    const put = (query, value) => text(element.querySelector(query), value);
    put(".open", row.request_id);
    put(".tenant", row.tenant);
    put(".badge", row.state + (row.attempts > 1 ? ` · ${row.attempts} attempts` : ""));
    element.querySelector(".badge").dataset.state = row.state;
    element.querySelector(".badge").title = row.outcome || row.waits_because;
    put(".prompt", count(row.prompt_tokens) + (row.cached_tokens ? ` (${Math.round((100 * row.cached_tokens) / row.prompt_tokens)}% cached)` : ""));
    put(".output", count(row.completion_tokens));
    put(".tpot", row.tpot_ms === undefined ? "–" : durationText(row.tpot_ms));
    put(".by", row.decode_worker ? (row.prefill_worker ? `${row.prefill_worker} → ${row.decode_worker}` : row.decode_worker) : row.waits_because);
    put(".age", age(row.age_ms));
    put(".ttft b", ttft(row) === undefined ? "–" : durationText(ttft(row)));
    const parts = hops(row.hops);
    element.querySelector(".track").replaceChildren(...track(parts, scale, row.predicted_ttft_ms));
    element.facts = [
      row.request_id,
      ...parts.map((part) => [part.title, durationText(part.to - part.from)]),
      ...(row.predicted_ttft_ms === undefined ? [] : [["predicted to the first token", durationText(row.predicted_ttft_ms)]]),
    ];
  }
}

/** Hops to scale, and where the first token was predicted. */
function track(parts, scale, predicted) {
  const share = (ms) => `${Math.min(100, (100 * ms) / scale).toFixed(2)}%`;
  const found = parts.map((part) =>
    h("i", { data: { hop: part.hop }, style: { left: share(part.from), width: share(Math.max(0, Math.min(part.to, scale) - part.from)) } }),
  );
  if (predicted !== undefined) found.push(h("i", { data: { hop: "predicted" }, style: { left: share(predicted) } }));
  return found;
}

const TERMS = [["queue_ms", "queue"], ["load_ms", "load"], ["compute_ms", "compute"], ["transfer_ms", "transfer"], ["wait_ms", "wait"], ["step_ms", "step"], ["delay_ms", "delay"]];
const OUTLOOK = [["cached_tokens", "Cached tokens", count], ["ttft_ms", "Time to first token", durationText], ["start_ms", "Placed to first token", durationText], ["tpot_ms", "Per further token", durationText]];

class Drawer {
  constructor() {
    this.dialog = $("explain");
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // the backdrop
    });
  }

  async open(name) {
    this.name = name;
    this.fill(h("p", { class: "empty" }, "Asking the router …"));
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const found = await read(`request?name=${encodeURIComponent(name)}`);
      if (this.name === name) this.explain(found);
    } catch (error) {
      if (this.name === name) this.fill(h("p", { class: "wrong" }, error.message));
    }
  }

  fill(...content) {
    const close = h("button", { class: "quiet", onclick: () => this.dialog.close() }, "Close");
    const again = h("button", { class: "quiet", onclick: () => this.open(this.name) }, "Ask again");
    this.dialog.replaceChildren(h("div", { class: "drawer-bar" }, h("h2", { id: "explain-title" }, this.title ?? "Request"), again, close), ...content.filter(Boolean));
  }

  explain(found) {
    const one = found.request;
    this.title = one.request_id;
    this.fill(
      h("p", { class: "lead" }, h("span", { class: "badge", data: { state: one.state } }, one.state), one.outcome ? ` ${one.outcome}` : ""),
      h("p", { class: "note" }, `In logs: ${one.name}`),
      one.waits_because ? h("p", { class: "wrong" }, `It waits: ${one.waits_because}`) : null,
      facts([
        ["Prompt", `${count(one.prompt_tokens)} tokens`], ["Cached", one.cached_tokens === undefined ? "–" : `${count(one.cached_tokens)} tokens`],
        ["Output", `${count(one.completion_tokens)} tokens`], ["First token", durationText(one.ttft_ms)],
        ["Per further token", durationText(one.tpot_ms)], ["In all", durationText(one.e2e_ms)],
        ["Priority", String(one.priority)], ["Tenant", one.tenant || "–"], ["Not cached", one.not_cached ? `${one.not_cached.reason}, from page ${one.not_cached.page}` : "–"],
      ]),
      found.candidates.length ? candidates(found) : null,
      ...(found.attempts_omitted ? [h("p", { class: "note" }, `${found.attempts_omitted} earlier attempts are not kept.`)] : []),
      ...found.attempts.map(attempt),
    );
  }
}

function facts(pairs) {
  return h("dl", { class: "facts" }, ...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function attempt(one) {
  const served = one.prefill_worker ? `${one.prefill_worker} → ${one.decode_worker}` : one.decode_worker;
  const parts = hops(one.hops);
  const ended = one.hops.ended ?? Math.max(0, ...parts.map((part) => part.to));
  const first = one.hops.first_token;
  const bars = [...parts, ...(first !== undefined && ended > first ? [{ hop: "decode", from: first, to: ended, title: "further tokens" }] : [])];
  return h(
    "section",
    { class: "attempt" },
    h("h3", {}, `Attempt ${one.number} on ${served}`),
    one.why ? h("p", { class: "why" }, `Chosen: ${one.why}.`) : null,
    one.ended_because ? h("p", { class: "wrong" }, `It ended because ${one.ended_because}.`) : null,
    bars.length
      ? h("ol", { class: "hop-list" }, ...bars.map((bar) =>
          h("li", {}, h("span", {}, bar.title), h("div", { class: "track" }, ...track([bar], ended)), h("b", { class: "num" }, durationText(bar.to - bar.from)))))
      : null,
    h(
      "table",
      { class: "outlook" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), h("th", { scope: "col", class: "num" }, "Predicted"), h("th", { scope: "col", class: "num" }, "Actual"))),
      h("tbody", {}, ...OUTLOOK.filter(([field]) => one.predicted?.[field] !== undefined || one.actual?.[field] !== undefined).map(([field, title, form]) =>
        h("tr", {}, h("th", { scope: "row" }, title), h("td", { class: "num" }, form(one.predicted?.[field])), h("td", { class: "num" }, form(one.actual?.[field]))))),
    ),
    one.candidates.length ? candidates(one) : null,
    one.notes.length ? h("ul", { class: "notes" }, ...one.notes.map((note) => h("li", {}, note))) : null,
  );
}

function candidates(found) {
  const terms = TERMS.filter(([field]) => found.candidates.some((one) => one.cost?.[field] > 0.005));
  const row = (one) =>
    h(
      "tr",
      { class: one.chosen ? "chosen" : one.infeasible ? "infeasible" : "" },
      h("th", { scope: "row" }, one.chosen ? "✓ " : "", one.prefill_worker ? `${one.prefill_worker} → ${one.decode_worker}` : `${one.decode_worker} alone`),
      h("td", { class: "num" }, count(one.cached_tokens)),
      ...terms.map(([field]) => h("td", { class: "num" }, (one.cost?.[field] ?? 0).toFixed(1))),
      h("td", { class: "num" }, h("b", {}, (one.cost?.total_ms ?? 0).toFixed(1))),
      one.infeasible ? h("td", { class: "why-not" }, one.infeasible) : h("td", {}),
    );
  return h(
    "div",
    { class: "table-box" },
    h(
      "table",
      { class: "candidates" },
      h("caption", {}, "What placement weighed: predicted milliseconds to the first token"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Candidate"), h("th", { scope: "col", class: "num" }, "cached"), ...terms.map(([, title]) => h("th", { scope: "col", class: "num" }, title)), h("th", { scope: "col", class: "num" }, "total"), h("th", {}))),
      h("tbody", {}, ...found.candidates.map(row)),
    ),
    found.candidates_omitted ? h("p", { class: "note" }, `and ${count(found.candidates_omitted)} more`) : null,
  );
}
