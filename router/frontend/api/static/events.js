// Faults and changes as they happen, newest first.

import { $, h, keyed, text } from "./dom.js";
import { clock, count } from "./format.js";

const SIGNS = { error: "✕", warning: "▲", info: "●" };

export class Events {
  show(notices, at) {
    keyed($("events"), notices, (one) => one.number, (one) => this.make(one, at), (element, one) => {
      const more = one.more ? ` and ${count(one.more)} more like it` : "";
      text(element.querySelector(".more"), more);
    });
    const bad = notices.filter((one) => one.level !== "info" && one.age_ms < 300_000).length;
    text($("events-note"), bad ? `${bad} in five minutes` : "");
    let empty = $("events").nextElementSibling;
    if (!empty) $("events").after((empty = h("p", { class: "empty" }, "Nothing has happened since this router started.")));
    empty.hidden = notices.length > 0;
  }

  make(one, at) {
    const sign = h("span", { class: "sign", "aria-label": one.level }, SIGNS[one.level] ?? "●");
    const when = h("time", {}, clock(at - one.age_ms));
    return h("li", { data: { level: one.level } }, sign, h("p", {}, one.text, h("span", { class: "more" })), when);
  }
}
