// Changes a part of the page into its new version, and keeps what a person is doing there: focus,
// scroll position, open folds, checked boxes and typed text.

const keyOf = (node) => node.nodeType === 1 ? node.dataset.key || node.id || "" : "";

const isSame = (a, b) =>
  a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

// Attributes that the browser or the person changes, and the server does not know about.
const isTheirs = (node, name) =>
  (name === "open" && node.nodeName === "DETAILS") || name === "aria-selected";

function copyAttributes(from, to) {
  for (const { name, value } of to.attributes) {
    if (!isTheirs(from, name) && from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && !isTheirs(from, name)) from.removeAttribute(name);
  }
}

export function morph(from, to) {
  if (from.nodeType !== 1) {
    if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
    return;
  }
  if (from.isEqualNode(to)) return;
  copyAttributes(from, to);
  if (from.matches("input, textarea, select")) return;
  morphChildren(from, to);
}

function morphChildren(from, to) {
  const keyed = new Map();
  for (const child of from.children) if (keyOf(child)) keyed.set(keyOf(child), child);
  const wanted = new Set([...to.children].map(keyOf));
  let at = from.firstChild;
  for (const next of [...to.childNodes]) {
    // An old row that is not wanted any more must not be turned into another row.
    while (at && keyOf(at) && !wanted.has(keyOf(at))) {
      const gone = at;
      at = at.nextSibling;
      gone.remove();
    }
    const known = keyOf(next) && keyed.get(keyOf(next));
    if (known) {
      if (known === at) at = at.nextSibling;
      else from.insertBefore(known, at);
      morph(known, next);
    } else if (at && isSame(at, next)) {
      morph(at, next);
      at = at.nextSibling;
    } else {
      from.insertBefore(document.importNode(next, true), at);
    }
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}
