// How full each tier is, how fast the lower ones are, and where prompt pages came from.

import { $, h, keyed, text } from "./dom.js";
import { bytes, count, durationText, percent } from "./format.js";
import { cachedShare, fillMeter, meter } from "./topology.js";

const ROLES = { store: 0, decode: 1, prefill: 2 };

export class Tiers {
  show(snapshot, samples) {
    const size = snapshot.router.page_bytes;
    const rows = [];
    const live = snapshot.processes.filter((one) => ["live", "draining"].includes(one.state) && one.role in ROLES);
    live.sort((a, b) => ROLES[a.role] - ROLES[b.role] || a.name.localeCompare(b.name, "en", { numeric: true }));
    for (const one of live) {
      const { pages_free: free, pages_total: total, tiers } = one.load;
      const used = total ? 1 - free / total : 0;
      const tier = one.role === "store" ? "host" : "device";
      const cached = cachedShare(one);
      const full = Math.max(used, cached);
      rows.push({ key: `${one.name} ${tier}`, name: one.name, tier, used, cached, note: `${percent(full)}% of ${bytes(total * size)}` });
      if (one.role !== "store") continue;
      const disk = tiers.find((speed) => speed.tier === "disk");
      if (one.pages?.DISK || disk?.measured)
        rows.push({ key: `${one.name} disk`, name: one.name, tier: "disk", note: [`${count(one.pages?.DISK ?? 0)} pages`, speed(disk)].filter(Boolean).join(" · ") });
      const remote = tiers.find((found) => found.tier === "remote");
      if (remote?.measured) rows.push({ key: `${one.name} remote`, name: one.name, tier: "remote", note: `other nodes · ${speed(remote)}` });
    }
    keyed($("tiers"), rows, (row) => row.key, make, update);
    this.origins(samples);
  }

  origins(samples) {
    const sum = (column) => samples.slice(-60).reduce((total, sample) => total + (sample[column] ?? 0), 0);
    const parts = [
      ["device", "reused on a device", sum("pages_on_device")],
      ["host", "found in a store", sum("pages_found")],
      ["made", "computed and stored", sum("pages_stored")],
    ];
    const total = parts.reduce((all, [, , pages]) => all + pages, 0);
    const box = $("origins");
    if (!box.firstChild)
      box.append(
        h("h3", {}, "Prompt pages of the last minute"),
        h("div", { class: "stack", "aria-hidden": "true" }, ...parts.map(([kind]) => h("i", { data: { kind } }))),
        h("ul", { class: "legend" }, ...parts.map(([kind]) => h("li", { data: { kind } }))),
      );
    parts.forEach(([kind, title, pages], index) => {
      box.querySelector(".stack").children[index].style.width = `${total ? (100 * pages) / total : 0}%`;
      text(box.querySelector(".legend").children[index], `${title} ${total ? percent(pages / total) : 0}%`);
    });
  }
}

function speed(tier) {
  return tier?.measured ? `${bytes(tier.bytes_per_second)}/s after ${durationText(tier.latency * 1_000)}` : "";
}

function make() {
  return h("div", { class: "tier" }, h("p", {}, h("b", {}), h("span", { class: "kind" }), h("span", { class: "note" })), meter());
}

function update(element, row) {
  text(element.querySelector("b"), row.name);
  text(element.querySelector(".kind"), row.tier);
  text(element.querySelector(".note"), row.note);
  element.dataset.tier = row.tier;
  const bar = element.querySelector(".meter");
  bar.hidden = row.used === undefined;
  if (!bar.hidden) fillMeter(bar, row.used, row.cached);
}
