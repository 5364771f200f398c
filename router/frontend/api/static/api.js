// What the page asks its router for. The key is kept for this tab alone.

const KEY = "baton-operator-key";
const PATIENCE = 5_000; // milliseconds for one answer
const VIEWER = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // Storage may be forbidden; then the key lives as long as this page.
}

const source = {}; // whose data is shown: a router's, and of which of its models; none: of the one that answers, the first

export const setSource = (change) => Object.assign(source, change);

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value.trim();
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

/** An answer that is no data. `status` is 0 where there was none at all. */
export class Refused extends Error {
  constructor(status, message, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // milliseconds
  }
}

/** Return the JSON at that path of the dashboard's API. Raises Refused. */
export async function read(path) {
  const headers = { "x-baton-viewer": VIEWER };
  if (key) headers.authorization = `Bearer ${key}`;
  let answer;
  try {
    const url = new URL(`dashboard/api/${path}`, document.baseURI);
    for (const [kind, name] of Object.entries(source)) if (name) url.searchParams.set(kind, name);
    answer = await fetch(url, {
      headers,
      cache: "no-store",
      credentials: "omit",
      signal: AbortSignal.timeout(PATIENCE),
    });
    if (answer.ok) return await answer.json();
  } catch (error) {
    throw new Refused(0, error.name === "TimeoutError" ? "no answer within 5 s" : "no answer");
  }
  let message = `status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // A proxy's error page, perhaps: the status says enough.
  }
  throw new Refused(answer.status, message, Number(answer.headers.get("retry-after-ms")) || 0);
}
