// Line charts of the last five minutes, and the small ones of the tiles.

import { h, s, showTip, hideTip, text } from "./dom.js";
import { clock, niceCeiling, ticksText } from "./format.js";

const SPAN = 300_000; // milliseconds
const LEFT = 44;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

/** The path of a line through [x, y], with a gap wherever y is null. */
function line(points) {
  let path = "";
  let pen = "M";
  for (const [x, y] of points) {
    if (y === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  }
  return path;
}

export class Chart {
  /**
   * `series`: [{column, title, className, area}]; `format(value)` says a value with its unit, and `axis` one of the axis.
   * `now(samples)` is what stands beside the title: the last value of the first series, unless it says otherwise.
   */
  constructor(section, { title, series, format, axis, empty, now, log = false }) {
    this.told = now ?? ((samples) => format(samples.at(-1)[series[0].column]));
    this.series = series;
    this.log = log; // a scale by powers of ten, for what varies that much
    this.format = format;
    this.axis = axis;
    this.empty = empty;
    this.samples = [];
    this.faults = [];
    this.svg = s("svg", { class: "plot", role: "img" });
    this.now = h("p", { class: "note now" });
    const id = `${section.id}-title`;
    section.setAttribute("aria-labelledby", id);
    section.append(
      h("div", { class: "title" }, h("h2", { id }, title), this.now),
      h("div", { class: "plot-box" }, this.svg),
      h(
        "ul",
        { class: "legend" },
        ...series.map((one) => h("li", { class: one.className }, one.title)),
      ),
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => {
      this.cursor?.remove();
      hideTip();
    });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /** `samples`: objects by column. `faults`: instants at which a process went, milliseconds. */
  show(samples, at, faults) {
    [this.samples, this.at, this.faults] = [samples, at, faults];
    this.draw();
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width || this.at === undefined) return;
    const x = (ms) => LEFT + ((ms - this.at + SPAN) / SPAN) * (width - LEFT - RIGHT);
    const { ticks, share } = this.scale();
    const y = (value) => TOP + (1 - share(value)) * (height - TOP - BOTTOM);
    this.x = x;
    const parts = [];
    const words = this.axis ? ticks.map(this.axis) : ticksText(ticks);
    for (const [index, tick] of ticks.entries()) {
      const at = y(tick);
      parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      parts.push(s("text", { class: "tick", x: LEFT - 7, y: at + 4, "text-anchor": "end" }, words[index]));
    }
    for (const minutes of width > 420 ? [5, 4, 3, 2, 1, 0] : [4, 2, 0]) {
      const at = x(this.at - minutes * 60_000);
      const anchor = minutes === 5 ? "start" : minutes ? "middle" : "end";
      const label = minutes ? `−${minutes} min` : "now";
      parts.push(s("text", { class: "tick", x: at, y: height - 5, "text-anchor": anchor }, label));
    }
    for (const fault of this.faults) {
      const at = x(fault);
      if (at > LEFT) parts.push(s("line", { class: "fault", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }));
    }
    const shown = this.samples.filter((sample) => sample.at_ms > this.at - SPAN);
    for (const one of [...this.series].reverse()) {
      const points = shown.map((sample) => {
        const value = sample[one.column];
        return [x(sample.at_ms), value === null || value === undefined ? null : y(value)];
      });
      if (one.area && points.length > 1) {
        const solid = points.map(([at, value]) => [at, value ?? y(0)]);
        const base = `L${solid.at(-1)[0].toFixed(1)} ${y(0)}L${solid[0][0].toFixed(1)} ${y(0)}Z`;
        parts.push(s("path", { class: `area ${one.className}`, d: line(solid) + base }));
      }
      parts.push(s("path", { class: `line ${one.className}`, d: line(points) }));
    }
    const any = shown.some((sample) => this.series.some((one) => sample[one.column]));
    if (!any)
      parts.push(
        s("text", { class: "nothing", x: (LEFT + width) / 2, y: height / 2, "text-anchor": "middle" }, this.empty),
      );
    this.svg.replaceChildren(...parts);
    const last = shown.at(-1);
    const told = last ? this.series.map((one) => `${one.title} ${this.format(last[one.column])}`).join(", ") : this.empty;
    this.svg.setAttribute("aria-label", `The last five minutes; now ${told}`);
    text(this.now, last ? this.told(shown) : "");
  }

  /** Where the grid's lines are, and which share of the height a value has. */
  scale() {
    const values = this.samples.flatMap((sample) => this.series.map((one) => sample[one.column] ?? 0)).filter(Boolean);
    if (!this.log) {
      const most = niceCeiling(Math.max(...values, this.series[0].least ?? 0));
      return { ticks: [0, most / 2, most], share: (value) => value / most };
    }
    const low = Math.floor(Math.log10(Math.min(...values, 1e3)));
    const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values, 1e-2))));
    const step = high - low > 4 ? 2 : 1;
    const ticks = [];
    for (let power = low; power <= high; power += step) ticks.push(10 ** power);
    return { ticks, share: (value) => Math.max(0, (Math.log10(value) - low) / (high - low)) };
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const at = event.clientX - box.left;
    let nearest = null;
    for (const sample of this.samples) {
      const far = Math.abs(this.x(sample.at_ms) - at);
      if (nearest === null || far < nearest.far) nearest = { far, sample };
    }
    if (nearest === null || nearest.far > 12) {
      this.cursor?.remove();
      hideTip();
      return;
    }
    const x = this.x(nearest.sample.at_ms);
    this.cursor?.remove();
    this.cursor = s("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: box.height - BOTTOM });
    this.svg.append(this.cursor);
    showTip(event.clientX, event.clientY, [
      clock(nearest.sample.at_ms),
      ...this.series.map((one) => [one.title, this.format(nearest.sample[one.column])]),
    ]);
  }
}

/** One key figure: a number, what stands below it, and its last two minutes as a line. */
export class Tile {
  constructor(title, className) {
    this.number = h("span", { class: "number" }, "–");
    this.unit = h("span", { class: "unit" });
    this.note = h("p", { class: "note" }, " ");
    this.path = s("path", { class: "spark" });
    this.svg = s("svg", { class: "sparkline", viewBox: "0 0 120 36", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.svg.append(this.path);
    this.element = h(
      "article",
      { class: `panel tile ${className}` },
      h("h2", {}, title),
      h("p", { class: "figure" }, this.number, this.unit),
      this.note,
      this.svg,
    );
  }

  show(number, unit, note, values) {
    text(this.number, number);
    text(this.unit, unit);
    text(this.note, note || " ");
    const most = Math.max(...values.map((value) => value ?? 0), 1e-9);
    const step = 120 / Math.max(1, values.length - 1);
    const points = values.map((value, index) => [index * step, value === null ? null : 34 - (value / most) * 32]);
    this.path.setAttribute("d", values.some(Boolean) ? line(points) : "");
  }
}
