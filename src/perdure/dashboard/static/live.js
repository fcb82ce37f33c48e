// Fetches the page again when the server says that something on it has changed.

import { clock, main, refresh } from "./page.js";

const POLL = 5000;
let source, timer, isBusy = false, isDue = false;

function show(state, text) {
  const live = document.getElementById("live");
  // It says since when, so it stays.
  if (state === "offline" && live.dataset.state === state) return;
  live.dataset.state = state;
  live.textContent = text ?? `Offline since ${clock(new Date())}`;
}

// No update while a person selects, types or has a menu open.
function isHeld() {
  const selection = getSelection();
  const isSelecting = !selection.isCollapsed && main().contains(selection.anchorNode);
  return isSelecting || main().querySelector(
    "input[type=checkbox]:checked, .more[open], :is(input, textarea, select):focus:not([type=checkbox])",
  );
}

async function update() {
  isDue = true;
  if (isHeld()) show("paused", "Updates paused while you select");
  if (isBusy || isHeld()) return;
  isBusy = true;
  isDue = false;
  const start = performance.now();
  const isRead = await refresh();
  isDue ||= !isRead;
  if (!isRead) show("offline");
  else if (source || timer) show("live", "Live");
  // A page that is slow to render is fetched less often.
  const pause = Math.max(isRead ? 1000 : POLL, 4 * (performance.now() - start));
  setTimeout(() => { isBusy = false; if (isDue) update(); }, pause);
}

function poll() {
  timer = setInterval(update, POLL);
  show("live", "Live");
}

function close() {
  source?.close();
  clearInterval(timer);
  source = timer = undefined;
}

export function listen() {
  close();
  const { topics, live } = main().dataset;
  if (!topics || document.hidden) return;
  if (live === "poll") return poll();
  source = new EventSource(`${document.documentElement.dataset.base}/live?${topics}`);
  source.onopen = () => show("live", "Live");
  source.onmessage = update;
  source.onerror = ({ target }) => {
    // 204 ends the stream: this browser has enough of them.
    if (target.readyState === EventSource.CLOSED) poll();
    else show("offline");
  };
}

document.addEventListener("visibilitychange", () => {
  listen();
  if (!document.hidden && main().dataset.topics) update();
});
for (const kind of ["change", "selectionchange", "focusout"]) {
  document.addEventListener(kind, () => { if (isDue && !isHeld()) update(); });
}
