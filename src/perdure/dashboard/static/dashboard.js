// What the pages gain from a script: they work without it.

import { listen } from "./live.js";
import { fetchPart, refresh, say, tick, visit } from "./page.js";

const dialog = document.getElementById("dialog");
const root = document.documentElement;

async function openDialog(url) {
  try {
    const part = await fetchPart(url, false);
    part.removeAttribute("id");
    dialog.replaceChildren(document.importNode(part, true));
    dialog.showModal();
    dialog.querySelector("input:not([type=hidden]), textarea, button")?.focus();
  } catch {
    location.href = url;
  }
}

const isPlain = (event) =>
  event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;

document.addEventListener("click", (event) => {
  const link = event.target.closest("a, button");
  if (!link || !isPlain(event) || event.defaultPrevented) return;
  if (link.id === "newer") {
    refresh({ isOffered: false });
  } else if (link.matches("[data-close]") && dialog.contains(link)) {
    event.preventDefault();
    dialog.close();
  } else if (link.matches("a[data-dialog]") && innerWidth >= 640) {
    event.preventDefault();
    link.closest("details.more")?.removeAttribute("open");
    openDialog(link.href);
  } else if (link.matches("a[data-region]")) {
    event.preventDefault();
    visit(link.href);
  }
});

// Folded menus close when something else is clicked.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.more[open], details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});

addEventListener("popstate", () => visit(location.href, false));
addEventListener("perdure:visit", () => { say(document.title); listen(); });
setInterval(tick, 1000);

// Completion of the search box.
const search = document.getElementById("q");
const options = document.getElementById(search.getAttribute("list"));
let asked = 0;
search.addEventListener("input", async () => {
  const turn = ++asked;
  const response = await fetch(`${search.dataset.complete}?${new URLSearchParams({ q: search.value })}`);
  if (!response.ok || turn !== asked) return;
  const found = await response.json();
  options.replaceChildren(...found.map(({ value, hint }) => new Option(hint, value)));
});

// Keys.
const PAGES = { o: "/", r: "/runs", e: "/errors", a: "/agenda", w: "/workflows", q: "/queues", k: "/workers", t: "/acts", s: "/store" };
let isGoing = false;

const rows = () => [...document.querySelectorAll(".frame > main :is(tr[data-key], a.row)")];

function move(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.getAttribute("aria-selected") === "true");
  const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
  for (const row of all) row.removeAttribute("aria-selected");
  next.setAttribute("aria-selected", "true");
  (next.matches("a") ? next : next.querySelector("a"))?.focus();
  next.scrollIntoView({ block: "nearest" });
}

const selectedRow = () => rows().find((row) => row.getAttribute("aria-selected") === "true");

const KEYS = {
  "/": () => search.focus(),
  j: () => move(1),
  k: () => move(-1),
  x: () => selectedRow()?.querySelector("input[type=checkbox]")?.click(),
  ".": () => document.querySelector(".run-actions summary, .actions a")?.focus(),
  g: () => { isGoing = true; setTimeout(() => { isGoing = false; }, 1500); },
  "?": () => { location.href = `${root.dataset.base}/preferences`; },
};

document.addEventListener("keydown", (event) => {
  if (root.dataset.keys === "off" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select") || dialog.open) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = isGoing && PAGES[event.key]
    ? () => { location.href = root.dataset.base + PAGES[event.key]; }
    : KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  isGoing = false;
  act();
});

const zone = document.querySelector("[data-zone]");
if (zone?.value === "UTC") zone.placeholder = Intl.DateTimeFormat().resolvedOptions().timeZone;

listen();
