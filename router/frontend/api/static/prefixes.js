// The prefix map as a picture: every cached chain of pages from left to right, as wide as it is long.

import { $, h, s, showTip, hideTip, text } from "./dom.js";
import { count, extent, icicle } from "./format.js";

const TIERS = { GPU: "device", CPU: "host", DISK: "disk" };
const AXIS = 18;

export class PrefixMap {
  constructor() {
    this.svg = s("svg", { role: "img" });
    this.empty = h("p", { class: "empty" }, "No page is cached yet.");
    $("prefix-map").append(this.svg, this.empty);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", hideTip);
    new ResizeObserver(() => this.draw()).observe($("prefix-map"));
  }

  show(view, pageSize, known) {
    if (view === this.view) return;
    const drawn = JSON.stringify([view, pageSize, known]);
    [this.view, this.pageSize, this.known] = [view, pageSize, known];
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.draw();
  }

  draw() {
    const { view } = this;
    const any = Boolean(view?.nodes.length);
    this.empty.hidden = any;
    this.svg.toggleAttribute("hidden", !any);
    text($("prefixes-note"), view ? `${count(this.known)} pages, ${count(view.runs)} runs` : "");
    if (!any) {
      text(this.empty, view ? "No page is cached yet." : "Looking at the map …");
      return;
    }
    const { width, height } = $("prefix-map").getBoundingClientRect();
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const boxes = icicle(view.nodes);
    const parts = boxes.filter((box) => box.width > 0).map((box) => {
      const holding = view.holdings[box.node[5]];
      const copies = Object.keys(holding.holders).length;
      const [w, t] = [Math.max(1, box.width * width - 1), box.height * (height - AXIS)];
      return s("rect", {
        x: (box.x * width).toFixed(1), y: (box.y * (height - AXIS)).toFixed(1),
        width: w.toFixed(1), height: Math.max(0.6, t - (t > 4 ? 1 : 0)).toFixed(2), rx: Math.min(3, t / 3, w / 3).toFixed(1),
        class: `prefix${box.node[6] ? " merged" : ""}`, "data-tier": holding.fastest ?? "none", "data-copies": Math.min(3, copies),
        "data-index": box.index,
      });
    });
    const deepest = extent(view.nodes);
    const longest = Math.max(...view.nodes.map((node) => node[1] + node[2]));
    const step = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048].find((pages) => deepest / pages <= width / 90) ?? 4096;
    for (let at = 0; at <= deepest; at += step) {
      const x = (at / deepest) * width;
      const last = x > width - 60;
      parts.push(s("text", { class: "tick", x: Math.min(x, width), y: height - 4, "text-anchor": at ? (last ? "end" : "middle") : "start" }, at ? count(at * this.pageSize) : "0 tokens"));
      if (last) break;
    }
    this.svg.replaceChildren(...parts);
    const chains = view.nodes.filter((node) => node[0] < 0).reduce((sum, node) => sum + node[3], 0);
    const shared = view.nodes.filter((node) => node[3] > 1).length;
    this.svg.setAttribute("aria-label", `${count(chains)} cached chains of pages; ${count(shared)} stretches are shared by more than one; the longest has ${count(longest * this.pageSize)} tokens`);
  }

  point(event) {
    const index = event.target.dataset?.index;
    if (index === undefined) {
      hideTip();
      return;
    }
    const [, depth, length, chains, pages, holding, merged] = this.view.nodes[index];
    const held = Object.entries(this.view.holdings[holding].holders);
    const size = this.pageSize;
    showTip(event.clientX, event.clientY, [
      merged ? `${count(merged)} small branches, together` : `Tokens ${count(depth * size)} to ${count((depth + length) * size)}`,
      ["chains through here", count(chains)],
      ["pages here and below", count(pages)],
      ...held.slice(0, 6).map(([name, tiers]) => [name, tiers.map((tier) => TIERS[tier]).join(", ")]),
      ...(held.length > 6 ? [`and ${held.length - 6} more holders`] : held.length ? [] : ["its holders have gone"]),
    ]);
  }
}
