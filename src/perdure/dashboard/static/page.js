// Fetches the content of a page and puts it in place, with history.

import { morph } from "./morph.js";

const etags = new Map();
let shownAt = new Date();

const main = () => document.querySelector(".frame > main");

export async function fetchPart(url, isConditional) {
  const headers = { "X-Perdure-Part": "main" };
  if (isConditional && etags.has(url)) headers["If-None-Match"] = etags.get(url);
  const response = await fetch(url, { headers, credentials: "same-origin" });
  if (response.status === 304) return null;
  if (response.redirected || !response.headers.get("content-type")?.startsWith("text/html")) {
    throw new Error("the page cannot be shown in place");
  }
  if (response.status >= 500) throw new Error(`the server answered ${response.status}`);
  etags.set(url, response.headers.get("etag"));
  const parsed = new DOMParser().parseFromString(await response.text(), "text/html");
  const part = parsed.querySelector("main");
  if (!part) throw new Error("the answer is not a page of the dashboard");
  return part;
}

// New rows above the ones that a person is reading are offered, not inserted.
function holdBack(part) {
  const [old, next] = [main(), part].map((each) => each.querySelector("[data-offer]"));
  if (!old || !next || !old.rows.length) return;
  const known = new Set([...old.rows].map((row) => row.dataset.key));
  const newer = [...next.rows].filter((row) => !known.has(row.dataset.key));
  if (!newer.length) return;
  const rows = new Map([...next.rows].map((row) => [row.dataset.key, row]));
  next.replaceChildren(...[...old.rows].map((row) => rows.get(row.dataset.key) ?? row.cloneNode(true)));
  const offer = document.createElement("button");
  offer.type = "button";
  offer.className = "newer";
  offer.id = "newer";
  offer.textContent = newer.length === 1 ? "1 newer run" : `${newer.length} newer runs`;
  next.closest("table").before(offer);
}

export function apply(part, isOffered) {
  if (isOffered) holdBack(part);
  document.title = `${part.dataset.title} · perdure`;
  morph(main(), part);
  shownAt = new Date();
  setStale("");
  tick();
}

export async function refresh({ isOffered = true } = {}) {
  try {
    const part = await fetchPart(location.href, isOffered);
    if (part) apply(part, isOffered);
    else setStale("");
  } catch (error) {
    setStale(`Could not read from the server: ${error.message}. Showing data from ${clock(shownAt)}.`);
  }
}

export async function visit(url, isNew = true) {
  try {
    const part = await fetchPart(url, false);
    if (isNew) history.pushState(null, "", url);
    apply(part, false);
    dispatchEvent(new CustomEvent("perdure:visit"));
  } catch {
    location.href = url;
  }
}

export const clock = (time) => `${time.toISOString().slice(11, 19)} UTC`;

function setStale(text) {
  const note = document.getElementById("stale");
  if (note.textContent !== text) note.textContent = text;
  note.hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
}

// Ages count on between fetches; the words are those of formatting.py.
function age(seconds) {
  const span = Math.abs(seconds);
  const [size, unit] = span >= 86400 ? [86400, "day"] : span >= 3600 ? [3600, "h"] : span >= 60 ? [60, "min"] : [1, "s"];
  const count = Math.floor(span / size);
  const text = `${count.toLocaleString("en")} ${unit}${unit === "day" && count > 1 ? "s" : ""}`;
  return seconds < 0 ? `in ${text}` : `${text} ago`;
}

export function tick() {
  for (const each of document.querySelectorAll("time[data-age]")) {
    const text = age((Date.now() - Date.parse(each.dateTime)) / 1000);
    if (each.textContent !== text) each.textContent = text;
  }
}

export const say = (text) => { document.getElementById("announce").textContent = text; };
