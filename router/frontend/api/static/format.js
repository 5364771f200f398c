// Numbers and times as people read them. Pure: nothing here knows the document.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** A count: 950, 1,284, 12.3K. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) < 10_000 ? whole.format(value) : compact.format(value);
}

/** A rate per second, with one digit after the point where it is small. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

/** Milliseconds as [number, unit]: 0.42 ms, 18 ms, 1.8 s, 3.1 min. */
export function duration(ms) {
  if (ms === null || ms === undefined) return ["–", ""];
  if (ms < 9.95) return [ms.toFixed(ms < 0.995 ? 2 : 1), "ms"];
  if (ms < 1_000) return [ms.toFixed(0), "ms"];
  if (ms < 60_000) return [(ms / 1_000).toFixed(ms < 10_000 ? 2 : 1), "s"];
  return [(ms / 60_000).toFixed(1), "min"];
}

export function durationText(ms) {
  const [number, unit] = duration(ms);
  return unit ? `${number} ${unit}` : number;
}

/** How long ago: 3 s, 5 min, 2 h. */
export function age(ms) {
  if (ms < 1_000) return "now";
  if (ms < 60_000) return `${Math.floor(ms / 1_000)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min`;
  return `${Math.floor(ms / 3_600_000)} h`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1_024 && unit < units.length - 1) {
    value /= 1_024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}`;
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

/** The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `value`. */
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= value * (1 - 1e-9));
  return step * power;
}

/** The numbers of an axis, all with as many digits after the point as the finest of them needs. */
export function ticksText(ticks) {
  const digits = [0, 1, 2, 3].find((many) => ticks.every((one) => Math.abs(one - Number(one.toFixed(many))) < 1e-9)) ?? 3;
  return ticks.map((one) => (digits ? one.toFixed(digits) : count(one)));
}

/** The hops of a request up to its first token, in order: [{hop, from, to, title}], milliseconds from its receipt. */
export function hops(times) {
  const found = [];
  const add = (hop, from, to, title) => {
    if (from !== undefined && to !== undefined && to >= from) found.push({ hop, from, to, title });
  };
  const { placed, accepted, prefilled, started, first_token: first } = times;
  add("queue", 0, placed, "in the router’s queue");
  add("offer", placed, accepted, "offered to the decode worker");
  const apart = prefilled !== undefined && (started === undefined || prefilled <= started);
  if (apart) {
    add("prefill", accepted, prefilled, "prefill");
    add("handoff", prefilled, started, "hand-off to the decode worker");
  } else {
    add("prefill", accepted, started, prefilled === undefined ? "prefill on the decode worker" : "prefill and hand-off");
  }
  add("step", started, first, "first step");
  return found;
}

/**
 * How many pages wide the picture is: so that 97 of 100 chains fit, and a few very long ones do not squeeze the others.
 * `nodes` are [parent, depth, length, chains, pages, holding, merged], parents first.
 */
export function extent(nodes) {
  const ending = nodes.map((node) => node[3]); // chains that end in each node
  for (const [parent, , , chains] of nodes) if (parent >= 0) ending[parent] -= chains;
  const ends = nodes.map(([, depth, length], index) => [depth + length, Math.max(0, ending[index])]);
  ends.sort((a, b) => a[0] - b[0]);
  const total = ends.reduce((sum, [, chains]) => sum + chains, 0);
  let seen = 0;
  const most = ends.find(([, chains]) => (seen += chains) >= 0.97 * total)?.[0] ?? 1;
  return Math.max(1, Math.min(ends.at(-1)?.[0] ?? 1, Math.ceil(1.15 * most)));
}

/** Rectangles of the prefix picture within 0 to 1: x and width by depth in pages, y and height by chains. */
export function icicle(nodes) {
  const deepest = extent(nodes);
  const roots = nodes.filter(([parent]) => parent < 0);
  const total = roots.reduce((sum, node) => sum + node[3], 0) || 1;
  const next = new Map([[-1, 0]]);
  const scale = new Map([[-1, 1 / total]]);
  return nodes.map((node, index) => {
    const [parent, depth, length, chains] = node;
    const y = next.get(parent) ?? 0;
    const height = chains * (scale.get(parent) ?? 0);
    next.set(parent, y + height);
    next.set(index, y);
    scale.set(index, height / chains);
    const x = Math.min(1, depth / deepest);
    return { index, x, width: Math.min(1, (depth + length) / deepest) - x, y, height, node };
  });
}
