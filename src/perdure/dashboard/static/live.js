// Refetches the page when the server says that something on it has changed.

import { clock, refresh } from "./page.js";

const POLL = 5000;
const SHORTEST = 1000;
let source, timer, isBusy = false, isDue = false;

const main = () => document.querySelector(".frame > main");

function show(state, text) {
  const live = document.getElementById("live");
  live.dataset.state = state;
  if (live.textContent !== text) live.textContent = text;
}

// A person who selects, types or has a menu open does not want the page to change.
function isHeld() {
  const selection = getSelection();
  return Boolean(
    main().querySelector("input[type=checkbox]:checked, details.more[open]") ||
    (selection && !selection.isCollapsed && main().contains(selection.anchorNode)) ||
    main().contains(document.activeElement?.closest("form input:not([type=checkbox]), textarea, select")),
  );
}

async function update() {
  if (isHeld()) {
    isDue = true;
    show("paused", "Updates paused while you select");
    return;
  }
  if (isBusy) { isDue = true; return; }
  isBusy = true;
  isDue = false;
  const begun = performance.now();
  await refresh();
  // A page that is slow to render is fetched less often.
  setTimeout(() => { isBusy = false; if (isDue) update(); }, Math.max(SHORTEST, 4 * (performance.now() - begun)));
}

function poll() {
  clearInterval(timer);
  timer = setInterval(() => { if (!document.hidden) update(); }, POLL);
  show("live", "Live");
}

function close() {
  source?.close();
  source = undefined;
  clearInterval(timer);
}

export function listen() {
  close();
  const topics = main().dataset.topics.split(" ").filter(Boolean);
  if (!topics.length || document.hidden) return;
  if (main().dataset.live === "poll") return poll();
  const url = new URL(`${document.documentElement.dataset.base}/live`, location.href);
  for (const topic of topics) url.searchParams.append("topic", decodeURIComponent(topic));
  source = new EventSource(url);
  source.onopen = () => show("live", "Live");
  source.onmessage = update;
  source.onerror = () => {
    // The server closes a stream for good, with 204, if this browser has enough of them.
    if (source?.readyState === EventSource.CLOSED) poll();
    else show("offline", `Offline since ${clock(new Date())}`);
  };
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) close();
  else { listen(); if (main().dataset.topics) update(); }
});
document.addEventListener("change", () => { if (isDue && !isHeld()) { show("live", "Live"); update(); } });
