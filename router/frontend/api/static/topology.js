// The cluster as a picture: processes in the order in which a request's pages pass them, and the pages on their way.

import { $, colour, h, keyed, s, text, withTip } from "./dom.js";
import { bytes, count, durationText, percent, rate } from "./format.js";

const MOST_CARDS = 24; // of one column
const ROLES = ["router", "prefill", "store", "decode"];
const TIER_NAMES = { GPU: "device", CPU: "host", DISK: "disk" };
const EMPTY = {
  prefill: "none: decode workers compute prompts themselves",
  store: "none has joined",
  decode: "none has joined: no request can be served",
};

export class Topology {
  constructor() {
    this.rates = new Map(); // by process name: smoothed pages per second
    this.before = null;
    this.paths = [];
    this.particles = new Particles($("particles"));
    new ResizeObserver(() => this.connect()).observe($("stage"));
  }

  /** `finished`: requests per second. */
  show(snapshot, sample, finished) {
    this.measure(snapshot);
    this.snapshot = snapshot; // before the cards: their tooltips read it
    this.sample = sample;
    const columns = { prefill: [], store: [], decode: [] };
    for (const process of snapshot.processes) columns[process.role]?.push(process);
    const nodes = new Set(snapshot.processes.map((process) => process.node));
    $("stage").classList.toggle("one-node", nodes.size < 2);
    this.showRouter(snapshot, finished);
    for (const [role, found] of Object.entries(columns)) {
      const column = $(`col-${role}`);
      const gone = (process) => !["live", "draining"].includes(process.state);
      const sorted = [...found].sort((a, b) => gone(a) - gone(b) || a.name.localeCompare(b.name, "en", { numeric: true }));
      const shown = sorted.slice(0, MOST_CARDS);
      column.classList.toggle("many", found.length > 5);
      keyed(column, shown, (process) => process.name, (process) => this.card(process), (element, process) => this.update(element, process));
      let rest = column.parentElement.querySelector(".rest");
      const missing = found.length - shown.length;
      const words = missing ? `and ${missing} more` : found.length ? "" : EMPTY[role];
      if (!rest) column.parentElement.append((rest = h("p", { class: "rest" })));
      text(rest, words);
      rest.hidden = !words;
    }
    const { page_bytes: size, page_size: tokens } = snapshot.router;
    text($("topology-note"), size ? `a page is ${tokens} tokens, ${bytes(size)}` : "");
    this.connect();
  }

  /** Rates of the counts that only grow, smoothed over a few seconds. */
  measure(snapshot) {
    const seconds = this.before ? (snapshot.at_ms - this.before.at_ms) / 1_000 : 0;
    const same = this.before?.router.incarnation === snapshot.router.incarnation;
    const old = new Map((this.before?.processes ?? []).map((process) => [process.name, process.moved]));
    for (const { name, moved } of snapshot.processes) {
      const then = old.get(name);
      if (!same || !then || seconds <= 0) continue;
      const kept = this.rates.get(name) ?? {};
      const share = Math.min(1, seconds / 2);
      for (const kind of Object.keys(moved)) {
        const now = Math.max(0, moved[kind] - then[kind]) / seconds;
        kept[kind] = (kept[kind] ?? 0) * (1 - share) + now * share;
      }
      this.rates.set(name, kept);
    }
    if (seconds > 0 || !same) this.before = snapshot;
  }

  showRouter(snapshot, finished) {
    const { router, totals, unready } = snapshot;
    const process = {
      name: router.name, role: "router", node: router.node, state: unready ? "idle" : "live",
      load: { running: totals.running, waiting: totals.queued },
    };
    const note = `${rate(finished)} requests/s`;
    keyed($("col-router"), [process], (one) => one.name, (one) => this.card(one), (element, one) => this.update(element, one, note));
  }

  card(process) {
    const element = h(
      "article",
      { class: "proc", tabindex: "0" },
      h("header", {}, h("span", { class: "lamp", "aria-hidden": "true" }), h("b", { class: "name" }), h("span", { class: "node" })),
      meter(),
      h("p", { class: "doing" }),
      h("p", { class: "flow" }),
    );
    withTip(element, () => element.facts ?? [process.name]);
    return element;
  }

  update(element, process, note = "") {
    element.dataset.state = process.state;
    element.dataset.role = process.role;
    text(element.querySelector(".name"), process.name);
    text(element.querySelector(".node"), process.node);
    const gone = !["live", "draining", "idle"].includes(process.state);
    const load = process.load;
    const used = load.pages_total ? 1 - load.pages_free / load.pages_total : 0;
    const bar = element.querySelector(".meter");
    bar.hidden = !load.pages_total || gone;
    fillMeter(bar, used, cachedShare(process));
    text(element.querySelector(".doing"), gone ? `gone: ${process.state}` : this.doing(process, used));
    const moved = this.rates.get(process.name) ?? {};
    const flow = { prefill: moved.stored, decode: moved.fetched }[process.role];
    const verb = process.role === "prefill" ? "stored" : "fetched";
    text(element.querySelector(".flow"), note || (flow >= 0.05 && !gone ? `${rate(flow)} pages/s ${verb}` : ""));
    element.facts = this.facts(process, used, gone);
  }

  doing(process, used) {
    if (process.state === "draining") return process.becoming ? `drains, then ${process.becoming}` : `drains: ${process.attempts} left`;
    if (process.role === "store") return process.pages ? `${count(process.pages.CPU ?? 0)} pages cached` : `${percent(used)}% held`;
    const waits = process.load.waiting ? ` · ${count(process.load.waiting)} ${process.role === "router" ? "queued" : "waiting"}` : "";
    return `${count(process.load.running)} running${waits}`;
  }

  facts(process, used, gone, load = process.load) {
    const lines = [`${process.name} on node ${process.node}`, ["state", process.state]];
    if (process.role === "router") return [...lines, ...this.queueFacts()];
    lines.push(["process id", String(process.pid)], ["last heard of", `${durationText(process.heartbeat_age_ms)} ago`]);
    if (gone) return lines;
    if (load.pages_total) lines.push(["pages held", `${count(load.pages_total - load.pages_free)} of ${count(load.pages_total)}`]);
    if (load.prefill_rate) lines.push(["prefill", `${count(load.prefill_rate)} tokens/s`]);
    if (load.tokens_queued) lines.push(["prompt tokens to compute", count(load.tokens_queued)]);
    if (load.steps.length) lines.push(["last step", durationText(load.steps.at(-1)[4] * 1_000)]);
    if (process.pages)
      for (const [tier, held] of Object.entries(process.pages)) lines.push([`cached, ${TIER_NAMES[tier]}`, `${count(held)} pages`]);
    return lines;
  }

  queueFacts() {
    const { waiting, bottleneck } = this.snapshot;
    const lines = Object.entries(waiting).map(([level, requests]) => [`queued with priority ${level}`, count(requests)]);
    if (!bottleneck) return lines;
    lines.push(["use of prefill workers", `${percent(bottleneck.prefill)}%`], ["use of decode workers", `${percent(bottleneck.decode)}%`]);
    if (bottleneck.advised) lines.push(["role of one more worker", bottleneck.advised]);
    return lines;
  }

  // --- the ways of the pages ---

  connect() {
    if (!this.snapshot) return;
    const stage = $("stage");
    const box = stage.getBoundingClientRect();
    const vertical = getComputedStyle(stage).getPropertyValue("--vertical").trim() === "1";
    const cards = new Map();
    for (const element of stage.querySelectorAll(".proc")) {
      const at = element.getBoundingClientRect();
      cards.set(element.dataset.key, {
        left: at.left - box.left, right: at.right - box.left, top: at.top - box.top, bottom: at.bottom - box.top,
        x: at.left - box.left + at.width / 2, y: at.top - box.top + at.height / 2,
      });
    }
    const live = this.snapshot.processes.filter((one) => ["live", "draining"].includes(one.state) && cards.has(one.name));
    const stores = new Map(live.filter((one) => one.role === "store").map((one) => [one.node, one]));
    const ways = [];
    const add = (from, to, kind, flow) => {
      const [a, b] = [cards.get(from), cards.get(to)];
      if (a && b) ways.push({ d: route(a, b, vertical), kind, flow: flow ?? 0, title: `${from} to ${to}` });
    };
    const router = this.snapshot.router.name;
    for (const one of live) {
      const moved = this.rates.get(one.name) ?? {};
      const store = stores.get(one.node);
      if (one.role === "prefill") {
        add(router, one.name, "order", 0);
        if (store) add(one.name, store.name, "prefill", moved.stored);
      }
      if (one.role === "decode" && store) {
        add(store.name, one.name, "decode", moved.fetched);
        for (const other of stores.values())
          if (other !== store && moved.fetched_across > 0.05)
            add(other.name, one.name, "across", moved.fetched_across / Math.max(1, stores.size - 1));
      }
    }
    const decoders = live.filter((one) => one.role === "decode");
    if (cards.has(router) && decoders.length) {
      const d = rail(cards.get(router), decoders.map((one) => cards.get(one.name)), box, vertical);
      ways.push({ d, kind: "tokens", flow: (this.sample?.generated_tokens ?? 0) / 8 });
    }
    const links = $("links");
    links.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    keyed(links, ways, (way) => `${way.kind} ${way.title ?? ""}`, () => s("path"), (path, way) => {
      path.setAttribute("d", way.d);
      path.setAttribute("class", `way ${way.kind}${way.flow > 0.05 ? " busy" : ""}`);
      way.path = path;
    });
    this.particles.follow(ways, box);
  }
}

/** A bar of two parts: what is in use, and what is only cached. */
export function meter() {
  return h("div", { class: "meter", "aria-hidden": "true" }, h("i", { class: "cached" }), h("i"));
}

export function fillMeter(bar, used, cached) {
  const width = (share) => `${(Math.max(0, Math.min(1, share)) * 100).toFixed(1)}%`;
  bar.children[0].style.width = width(Math.max(used, cached));
  bar.children[1].style.width = width(used);
}

/** Which share of its own pages a process has cached, as far as the router knows. */
export function cachedShare(process) {
  const held = process.pages?.[process.role === "store" ? "CPU" : "GPU"] ?? 0;
  return process.load.pages_total ? held / process.load.pages_total : 0;
}

/** A smooth way from one card to another: to the right, or downwards on a narrow screen. */
function route(a, b, vertical) {
  if (Math.abs(a.x - b.x) < 4 && !vertical) return `M${a.x} ${a.bottom}L${b.x} ${b.top}`;
  if (vertical) {
    const reach = Math.max(14, (b.top - a.bottom) / 2);
    return `M${a.x} ${a.bottom}C${a.x} ${a.bottom + reach} ${b.x} ${b.top - reach} ${b.x} ${b.top}`;
  }
  const reach = Math.max(18, (b.left - a.right) / 2);
  return `M${a.right} ${a.y}C${a.right + reach} ${a.y} ${b.left - reach} ${b.y} ${b.left} ${b.y}`;
}

/** The way of the tokens, from the decode workers back to the router, around everything else. */
function rail(router, decoders, box, vertical) {
  if (vertical) {
    const x = box.width - 6;
    const last = decoders.at(-1);
    return `M${last.right} ${last.y}L${x - 8} ${last.y}Q${x} ${last.y} ${x} ${last.y - 8}L${x} ${router.y + 8}Q${x} ${router.y} ${x - 8} ${router.y}L${router.right} ${router.y}`;
  }
  const y = box.height - 8;
  const lowest = decoders.reduce((a, b) => (b.bottom > a.bottom ? b : a));
  return `M${lowest.x} ${lowest.bottom}L${lowest.x} ${y - 10}Q${lowest.x} ${y} ${lowest.x - 10} ${y}L${router.x + 10} ${y}Q${router.x} ${y} ${router.x} ${y - 10}L${router.x} ${router.bottom}`;
}

const FRAME = 1_000 / 30;
const TRAVEL = 1_100; // milliseconds from one end of a way to the other
const POINTS = 32;
const HUES = { prefill: "--prefill", decode: "--decode", across: "--store", tokens: "--muted" };

/** Dots that move along the ways, more of them where more pages flow. Nothing is drawn where nothing flows. */
export class Particles {
  constructor(canvas) {
    this.canvas = canvas;
    this.ways = [];
    this.dots = [];
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.frame = 0;
    document.addEventListener("visibilitychange", () => this.start());
    this.still.addEventListener("change", () => this.start());
  }

  follow(ways, box) {
    const ratio = Math.min(2, devicePixelRatio || 1);
    const [width, height] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    const resized = this.canvas.width !== width || this.canvas.height !== height;
    if (resized) [this.canvas.width, this.canvas.height] = [width, height];
    this.ratio = ratio;
    const due = new Map(this.ways.map((way) => [way.name, way.due]));
    const most = Math.max(...ways.map((way) => (way.kind === "tokens" ? 0 : way.flow)), 1);
    this.ways = ways
      .filter((way) => way.flow > 0.05 && HUES[way.kind])
      .map((way) => {
        const length = way.path.getTotalLength();
        const points = Array.from({ length: POINTS + 1 }, (_, at) => way.path.getPointAtLength((at / POINTS) * length));
        const perSecond = way.kind === "tokens" ? Math.min(6, 1 + way.flow / 8) : Math.max(0.8, Math.min(way.flow, 14 * Math.sqrt(way.flow / most)));
        const name = `${way.kind} ${way.title ?? ""}`;
        return { name, points, every: 1_000 / perSecond, due: due.get(name) ?? 0, hue: colour(HUES[way.kind]), size: way.kind === "tokens" ? 1.6 : 2.6, travel: Math.max(TRAVEL, length * 3) };
      });
    // Dots go on along the way as it lies now. Where nothing flows any more they end theirs, unless that has moved.
    const found = new Map(this.ways.map((way) => [way.name, way]));
    this.dots = this.dots.map((dot) => ({ ...dot, way: found.get(dot.way.name) ?? dot.way })).filter(({ way }) => !resized || found.has(way.name));
    this.start();
  }

  start() {
    if (this.frame) return;
    if (document.hidden || this.still.matches) {
      this.clear();
      return;
    }
    if (this.ways.length || this.dots.length) this.frame = requestAnimationFrame((now) => this.draw(now));
  }

  clear() {
    this.dots = [];
    this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
  }

  draw(now) {
    this.frame = 0;
    if (now - (this.drawn ?? 0) < FRAME - 4) {
      this.start();
      return;
    }
    this.drawn = now;
    for (const way of this.ways) {
      if (way.due < now - 1_000) way.due = now + Math.random() * way.every;
      while (way.due <= now) {
        this.dots.push({ way, since: way.due });
        way.due += way.every * (0.7 + 0.6 * Math.random());
      }
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.dots = this.dots.filter(({ way, since }) => now - since < way.travel);
    for (const { way, since } of this.dots) {
      const along = ((now - since) / way.travel) * POINTS;
      const [a, b] = [way.points[Math.floor(along)], way.points[Math.min(POINTS, Math.floor(along) + 1)]];
      const part = along % 1;
      context.fillStyle = way.hue;
      context.globalAlpha = Math.min(1, along / 3, (POINTS - along) / 3);
      context.beginPath();
      context.arc(a.x + (b.x - a.x) * part, a.y + (b.y - a.y) * part, way.size, 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
    if (this.ways.length || this.dots.length) this.start();
  }
}
