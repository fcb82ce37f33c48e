// Fetches the content of a page and morphs the shown one into it, so that focus, scroll position,
// open folds, checked boxes and typed text stay.

const etags = new Map();
let shownAt = new Date();

export const main = () => document.querySelector(".frame > main");
const zone = { timeZone: document.documentElement.dataset.zone, timeZoneName: "short" };
export const clock = (time) => time.toLocaleTimeString("en-GB", zone);

const keyOf = (node) => node.dataset?.key || node.id || "";
const isSame = (a, b) => a.nodeName === b.nodeName && keyOf(a) === keyOf(b);
// Set by the person, and unknown to the server.
const isTheirs = (name) => name === "open" || name === "aria-selected";

function morph(from, to) {
  if (from.isEqualNode(to)) return;
  if (from.nodeType !== 1) return void (from.nodeValue = to.nodeValue);
  for (const { name, value } of to.attributes) if (!isTheirs(name)) from.setAttribute(name, value);
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && !isTheirs(name)) from.removeAttribute(name);
  }
  if (!from.matches("input, textarea, select")) morphChildren(from, to);
}

function morphChildren(from, to) {
  const keys = new Set([...to.children].map(keyOf));
  // A row that has disappeared must not become another one.
  for (const child of [...from.children]) if (!keys.has(keyOf(child))) child.remove();
  const nodes = new Map([...from.children].map((child) => [keyOf(child), child]));
  let at = from.firstChild;
  for (const next of [...to.childNodes]) {
    const old = keyOf(next) ? nodes.get(keyOf(next)) : at && isSame(at, next) ? at : undefined;
    if (old === at) at = at.nextSibling;
    else from.insertBefore(old ?? document.importNode(next, true), at);
    if (old) morph(old, next);
  }
  while (at) [at] = [at.nextSibling, at.remove()];
}

export async function fetchPart(url, isConditional) {
  const headers = { "X-Perdure-Part": "main" };
  if (isConditional && etags.has(url)) headers["If-None-Match"] = etags.get(url);
  main().ariaBusy = true;
  const response = await fetch(url, { headers }).finally(() => { main().ariaBusy = false; });
  if (response.status === 304) return null;
  if (response.status >= 500) throw new Error(`it answered ${response.status}`);
  const text = await response.text();
  const part = new DOMParser().parseFromString(text, "text/html").querySelector("main");
  if (!part || response.redirected) throw new Error("it answered with another page");
  etags.set(url, response.headers.get("etag"));
  return part;
}

// New rows above those that a person reads are offered, not inserted.
function holdBack(part) {
  const [old, next] = [main(), part].map((each) => each.querySelector("[data-offer]"));
  if (!old?.rows.length || !next) return;
  const fresh = new Map([...next.rows].map((row) => [keyOf(row), row]));
  const rows = [...old.rows].map((row) => fresh.get(keyOf(row)) ?? row.cloneNode(true));
  const count = [...next.rows].filter((row) => !rows.includes(row)).length;
  if (!count) return;
  next.replaceChildren(...rows);
  const offer = document.createElement("button");
  Object.assign(offer, { type: "button", className: "newer", id: "newer" });
  offer.textContent = `${count} newer ${count === 1 ? "run" : "runs"}`;
  next.closest(".scroll").before(offer);
}

function apply(part, isOffered) {
  if (isOffered) holdBack(part);
  document.title = `${part.dataset.title} · perdure`;
  morph(main(), part);
  shownAt = new Date();
  tick();
}

export async function refresh(isOffered = true) {
  let problem = "";
  try {
    const part = await fetchPart(location.href, isOffered);
    if (part) apply(part, isOffered);
  } catch (error) {
    problem = `Could not read from the server: ${error.message}. Showing data from ${clock(shownAt)}.`;
  }
  document.getElementById("stale").textContent = problem;
  return !problem;
}

export async function visit(url, isNew = true) {
  try {
    const part = await fetchPart(url);
    if (isNew) history.pushState(null, "", url);
    apply(part);
  } catch {
    location.href = url;
  }
}

// Updates ages between fetches, in the words of insights/words.py.
const UNITS = [[86400, "day"], [3600, "h"], [60, "min"], [1, "s"]];

export function tick() {
  for (const each of document.querySelectorAll("time[data-age]")) {
    const seconds = (Date.now() - Date.parse(each.dateTime)) / 1000;
    const [size, unit] = UNITS.find(([size]) => Math.abs(seconds) >= size) ?? UNITS[3];
    const count = Math.floor(Math.abs(seconds) / size);
    const span = `${count} ${unit}${unit === "day" && count > 1 ? "s" : ""}`;
    const text = seconds < 0 ? `in ${span}` : `${span} ago`;
    if (each.textContent !== text) each.textContent = text;
  }
}
