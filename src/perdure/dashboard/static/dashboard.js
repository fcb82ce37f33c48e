// Enhances pages, which also work without scripts.

import { listen } from "./live.js";
import { fetchPart, main, refresh, tick, visit } from "./page.js";

const dialog = document.getElementById("dialog");
const { keys } = document.documentElement.dataset;
const entry = (key) => document.querySelector(`nav [data-go="${CSS.escape(key)}"]`);

async function openDialog(url) {
  try {
    const part = await fetchPart(url);
    part.removeAttribute("id");
    dialog.replaceChildren(part);
    dialog.showModal();
    dialog.querySelector("input:not([type=hidden]), textarea, button")?.focus();
  } catch {
    location.href = url;
  }
}

const show = (url, isNew) => visit(url, isNew).then(listen);

document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll(":is(.more, .menu)[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
  const link = event.target.closest("a, button");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (link.id === "newer") refresh(false);
  else if (link.matches("dialog [data-close]")) dialog.close();
  else if (link.matches("[data-dialog]") && innerWidth >= 640) openDialog(link.href);
  else if (link.matches("[data-region]")) show(link.href);
  else return;
  event.preventDefault();
  link.closest(".more")?.removeAttribute("open");
});

addEventListener("popstate", () => show(location.href, false));
setInterval(tick, 1000);

const search = document.getElementById("q");
let turns = 0;
search.addEventListener("input", async () => {
  const turn = ++turns;
  const query = new URLSearchParams({ q: search.value });
  const response = await fetch(`${search.dataset.complete}?${query}`);
  if (!response.ok || turn !== turns) return;
  const words = await response.json();
  search.list.replaceChildren(...words.map(({ value, hint }) => new Option(hint, value)));
});

const rows = () => [...main().querySelectorAll("tr[data-key], a.row")];
const isSelected = (row) => row.getAttribute("aria-selected") === "true";
let isGoing = false;

function move(step) {
  const all = rows();
  const next = all[Math.max(all.findIndex(isSelected) + step, 0)] ?? all.at(-1);
  all.forEach((row) => row.removeAttribute("aria-selected"));
  next?.setAttribute("aria-selected", "true");
  (next?.matches("a") ? next : next?.querySelector("a"))?.focus();
}

const KEYS = {
  "/": () => search.focus(),
  j: () => move(1),
  k: () => move(-1),
  x: () => rows().find(isSelected)?.querySelector("input")?.click(),
  ".": () => main().querySelector(".run-actions summary, .actions a")?.focus(),
  g: () => { isGoing = true; },
  "?": () => entry("?").click(),
};

document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (keys === "off" || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  if (target.closest("input:not([type=checkbox]), textarea, select")) {
    if (key === "Escape") target.blur();
    return;
  }
  const page = isGoing && entry(key);
  const act = page ? () => page.click() : KEYS[key];
  isGoing = false;
  if (!act) return;
  event.preventDefault();
  act();
});

listen();
