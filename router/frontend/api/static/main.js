// The page's loop: it asks its router once a second and shows what comes back.

import { hasKey, read, setKey, setSource } from "./api.js";
import { Chart, Tile } from "./charts.js";
import { $, text } from "./dom.js";
import { Events } from "./events.js";
import { age, count, duration, durationText, percent, rate } from "./format.js";
import { PrefixMap } from "./prefixes.js";
import { Requests } from "./requests.js";
import { Tiers } from "./tiers.js";
import { Topology } from "./topology.js";

const PERIOD = 1_000;
const KEPT = 300; // samples
const WINDOW = 10; // samples, of which every rate that stands as a number is the mean
const WAITS = [1_000, 2_000, 4_000, 5_000]; // after an error, milliseconds

const latency = (title, prefix) => ({
  title,
  format: durationText,
  axis: (value) => (value >= 1_000 ? `${value / 1_000} s` : `${Number(value.toPrecision(1))} ms`),
  log: true,
  empty: "no request in the last five minutes",
  series: [
    { column: `${prefix}_p50`, title: "p50", className: "p50" },
    { column: `${prefix}_p95`, title: "p95", className: "p95" },
    { column: `${prefix}_p99`, title: "p99", className: "p99" },
  ],
});

const mean = (samples, column) => {
  const last = samples.slice(-WINDOW);
  return last.reduce((all, sample) => all + (sample[column] ?? 0), 0) / Math.max(1, last.length);
};

class Dashboard {
  constructor() {
    this.samples = [];
    this.tiles = {
      rate: new Tile("Requests", "decode"),
      tokens: new Tile("Tokens", "decode"),
      ttft: new Tile("First token", "prefill"),
      itl: new Tile("Token gap", "decode"),
      cached: new Tile("Prompt from cache", "store"),
      failed: new Tile("Failed", "bad"),
    };
    $("tiles").append(...Object.values(this.tiles).map((tile) => tile.element));
    this.charts = [
      new Chart($("chart-ttft"), latency("Time to first token", "ttft")),
      new Chart($("chart-itl"), latency("Gap between tokens", "itl")),
      new Chart($("chart-rate"), {
        title: "Requests per second",
        format: rate,
        now: (samples) => rate(mean(samples, "finished")),
        empty: "no request in the last five minutes",
        series: [
          { column: "finished", title: "finished", className: "finished", area: true, least: 1 },
          { column: "failed", title: "failed", className: "failed" },
          { column: "cancelled", title: "cancelled", className: "cancelled" },
        ],
      }),
      new Chart($("chart-queue"), {
        title: "In the router",
        format: count,
        empty: "nothing ran or waited",
        series: [
          { column: "running", title: "running", className: "running", area: true, least: 4 },
          { column: "queued", title: "queued", className: "queued", area: true },
        ],
      }),
    ];
    this.topology = new Topology();
    this.events = new Events();
    this.prefixes = new PrefixMap();
    this.tiers = new Tiers();
    this.requests = new Requests();
  }

  /** Take a snapshot. False: samples are missing, and the history must be read. */
  take(snapshot) {
    const last = this.samples.at(-1)?.sequence ?? 0;
    const source = `${snapshot.router.incarnation} ${snapshot.router.model}`;
    const restarted = this.source !== undefined && this.source !== source;
    this.source = source;
    if (restarted) this.samples = [];
    const fresh = rowsOf(snapshot);
    this.add(fresh);
    this.show(snapshot);
    return !restarted && (fresh.length === 0 || last >= fresh[0].sequence - 1) && last > 0;
  }

  add(samples) {
    const last = this.samples.at(-1)?.sequence ?? 0;
    this.samples.push(...samples.filter((sample) => sample.sequence > last));
    this.samples.splice(0, this.samples.length - KEPT);
  }

  replace(history) {
    this.samples = rowsOf(history);
  }

  show(snapshot) {
    const { router, totals, notices } = snapshot;
    const { samples, tiles } = this;
    const now = samples.at(-1);
    const column = (name) => samples.slice(-120).map((sample) => sample[name]);
    const sum = (name, seconds) => samples.slice(-seconds).reduce((all, sample) => all + (sample[name] ?? 0), 0);
    const finished = mean(samples, "finished");
    tiles.rate.show(rate(finished), "/s", `${count(totals.running)} running · ${count(totals.queued)} queued`, column("finished"));
    tiles.tokens.show(count(Math.round(mean(samples, "generated_tokens"))), "/s", `${count(totals.generated_tokens)} since the start`, column("generated_tokens"));
    for (const [tile, name] of [[tiles.ttft, "ttft"], [tiles.itl, "itl"]])
      tile.show(...duration(now?.[`${name}_p50`]), now?.[`${name}_p95`] == null ? "p50" : `p50 · p95 ${durationText(now[`${name}_p95`])}`, column(`${name}_p50`));
    const asked = sum("prompt_tokens", 60);
    const shares = samples.slice(-120).map((sample) => (sample.prompt_tokens ? sample.cached_tokens / sample.prompt_tokens : null));
    tiles.cached.show(asked ? percent(sum("cached_tokens", 60) / asked) : "–", asked ? "%" : "", "of prompt tokens, 1 min", shares);
    const failed = Math.round(sum("failed", 300));
    tiles.failed.show(count(failed), "", failed ? "in five minutes" : "none in five minutes", column("failed"));
    tiles.failed.element.classList.toggle("calm", !failed);

    text($("cluster"), router.cluster);
    text($("model"), router.model);
    document.title = `${router.cluster} · Baton`;
    const faults = notices.filter((one) => one.level === "error" && one.kind === "gone").map((one) => snapshot.at_ms - one.age_ms);
    for (const chart of this.charts) chart.show(samples, snapshot.at_ms, faults);
    this.topology.show(snapshot, now, finished);
    this.events.show(notices, snapshot.at_ms);
    this.prefixes.show(snapshot.prefixes, router.page_size, totals.pages_known);
    this.tiers.show(snapshot, samples);
    this.requests.show(snapshot.requests);
    this.status(snapshot);
  }

  status({ unready, router, processes }) {
    const draining = processes.filter((one) => one.state === "draining").length;
    const nothing = processes.length === 0;
    const state = unready ? "unready" : draining ? "draining" : "serving";
    const words = { unready: nothing ? "No worker has joined" : "Not serving", draining: `Serving · ${draining} draining`, serving: "Serving" };
    tell(state, words[state]);
    const what = nothing
      ? "No worker has joined this router yet. Workers that start now appear by themselves."
      : unready ? `No request can be served: ${unready}.` : "";
    banner(what);
    text($("clock"), `${router.name} · up ${age(router.uptime_s * 1_000)}`);
    follow("router", router.name, router.routers);
    follow("model", router.model, router.models);
  }
}

function rowsOf({ columns, samples }) {
  return samples.map((sample) => Object.fromEntries(columns.map((name, index) => [name, sample[index]])));
}

function tell(state, words) {
  document.body.dataset.state = state;
  text($("status-text"), words);
}

function banner(words) {
  text($("banner"), words);
  $("banner").hidden = !words;
}

// --- the key ---

function askForKey(message) {
  $("board").hidden = true;
  $("door").hidden = false;
  banner("");
  tell("locked", "Locked");
  text($("key-error"), message);
  $("key").value = "";
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("key").value.trim();
  if (!/^[\x21-\x7e]{1,200}$/.test(given)) {
    text($("key-error"), "This is no API key: a key has no spaces and only plain characters.");
    return;
  }
  setKey(given);
  wake();
});

$("forget-key").addEventListener("click", () => {
  setKey("");
  location.reload();
});

// --- the colours ---

for (const input of $("theme").querySelectorAll("input")) {
  input.checked = input.value === (document.documentElement.dataset.theme ?? "auto");
  input.addEventListener("change", () => {
    if (input.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = input.value;
    try {
      localStorage.setItem("baton-theme", input.value);
    } catch {
      // The choice lasts as long as this page.
    }
  });
}

// --- the routers and models ---

/** Go on with this router, whichever of them takes the page's next connection, or model, until another one is chosen. */
function follow(kind, name, all) {
  setSource({ [kind]: name });
  const choice = $(`${kind}s`);
  choice.hidden = all.length < 2;
  if (choice.options.length !== all.length) choice.replaceChildren(...all.map((one) => new Option(one)));
  choice.value = name;
}

for (const kind of ["router", "model"])
  $(`${kind}s`).addEventListener("change", (event) => {
    setSource({ [kind]: event.target.value });
    wake();
  });

// --- the loop ---

let wake = () => {};

/** Wait so long, or until `wake` is called. */
function rest(ms) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) wake();
});

async function run() {
  const dashboard = new Dashboard();
  let errors = 0;
  let heard = null;
  for (;;) {
    const began = performance.now();
    let pause = PERIOD;
    try {
      const snapshot = await read("snapshot");
      if ($("board").hidden) {
        $("door").hidden = true;
        $("board").hidden = false;
      }
      $("forget-key").hidden = !hasKey();
      if (!dashboard.take(snapshot)) {
        dashboard.replace(await read("history"));
        dashboard.show(snapshot);
      }
      document.body.dataset.sequence = snapshot.sequence;
      heard = Date.now();
      errors = 0;
      pause = Math.max(100, PERIOD - (performance.now() - began));
    } catch (error) {
      if (error.status === undefined) throw error; // a mistake of ours, which the console shows
      if (error.status === 401 || error.status === 403) {
        askForKey(hasKey() ? error.message : "");
        setKey("");
        await rest(2 ** 30);
        continue;
      }
      setSource({ router: "", model: "" }); // another one may answer
      pause = Math.max(error.retryAfter, WAITS[Math.min(errors, WAITS.length - 1)]);
      errors += 1;
      tell("lost", error.status === 429 ? "Too many viewers" : "Connection lost");
      const since = heard === null ? "" : ` What is shown is ${age(Date.now() - heard)} old.`;
      banner(error.status === 429 ? error.message : `The router does not answer (${error.message}).${since} Trying again.`);
    }
    await rest(document.hidden ? 2 ** 30 : pause);
  }
}

run().catch((error) => {
  tell("lost", "The page has failed");
  banner("This page has made a mistake and stopped. Reload it; the browser’s console says more.");
  throw error;
});
