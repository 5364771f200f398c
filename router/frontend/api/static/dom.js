// The page is built with these. Text goes in as text: nothing that comes from elsewhere is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** An element: h("p", { class: "note", style: { width: "50%" } }, "text", child, …). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [property, set] of Object.entries(value)) element.style.setProperty(property, set);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Set an element's text if it differs: what does not change costs no layout. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/**
 * Make `parent` have one child for each item, in order. `make(item)` returns a new element and `update(element, item)`
 * changes one; the elements of items that stay are kept, with their focus.
 */
export function keyed(parent, items, key, make, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let element = before.get(name);
    if (element === undefined) {
      element = make(item);
      element.dataset.key = name;
    }
    before.delete(name);
    update(element, item);
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
  for (const element of before.values()) element.remove();
}

/** The resolved colour of a custom property, for a canvas. */
export function colour(property) {
  const probe = h("i", { style: { color: `var(${property})`, display: "none" } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const tip = $("tip");

/** Show the tooltip near a point of the window. `lines` are strings or [label, value]. */
export function showTip(x, y, lines) {
  tip.replaceChildren(
    ...lines.map((line, index) =>
      Array.isArray(line)
        ? h("p", { class: "pair" }, h("span", {}, line[0]), h("b", {}, line[1]))
        : h("p", { class: index ? "" : "head" }, line),
    ),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
  const top = y + 18 + height > innerHeight ? y - height - 12 : y + 18;
  tip.style.transform = `translate(${left}px, ${Math.max(8, top)}px)`;
}

export function hideTip() {
  tip.hidden = true;
}

/** Have an element show a tooltip while it is pointed at or has the focus. `lines()` is asked each time. */
export function withTip(element, lines) {
  element.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, lines()));
  element.addEventListener("pointerleave", hideTip);
  element.addEventListener("focus", () => {
    if (!element.matches(":focus-visible")) return;
    const box = element.getBoundingClientRect();
    showTip(box.left + box.width / 2, box.bottom - 10, lines());
  });
  element.addEventListener("blur", hideTip);
  return element;
}
