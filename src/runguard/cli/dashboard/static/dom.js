// Building and updating the page. Data becomes text, never markup.

export const find = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Only what has changed is written: a selection, the focus and a screen reader's place stay where they are.
export function say(element, text) {
  const words = text === null || text === undefined ? "" : String(text);
  if (element.textContent !== words) element.textContent = words;
}

// Names may be of any length: a long one is cut on the page, and whole when pointed at.
const LONG = 80;

export function name(element, text) {
  say(element, text);
  const words = element.textContent;
  const whole = words.length > LONG ? words : "";
  if (element.title === whole) return;
  element.classList.toggle("long", Boolean(whole));
  if (whole) element.title = whole;
  else element.removeAttribute("title");
}

export function show(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}

export function note(id, text) {
  say(find(id), text);
  show(find(id), Boolean(text));
}

// Children of a container, one for each item, kept by key.
export function keep(container, items, keyOf, create, update) {
  const known = new Map([...container.children].map((child) => [child.dataset.key, child]));
  let place = container.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    known.delete(key);
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else container.insertBefore(child, place);
  }
  for (const gone of known.values()) gone.remove();
}

// A table whose columns are {title, text(row), link(row)?, mark(row)?, swatch(row)?, right?, wide?}. Roles are written out: on a narrow screen each row becomes a block,
// and a browser would then forget that it is a table.
export function table(container, caption, columns, rows, keyOf) {
  let body = container.querySelector("tbody");
  const heads = columns.map((column) => column.title).join("\n");
  if (body === null || container.dataset.heads !== heads) {
    const cells = columns.map((column) => make("th", { scope: "col", role: "columnheader", class: place(column) }, heading(column.title)));
    body = make("tbody", { role: "rowgroup" });
    const made = make("table", { role: "table" }, make("caption", { class: "unseen" }, caption));
    made.append(make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...cells)), body);
    container.replaceChildren(made);
    container.dataset.heads = heads;
  }
  keep(
    body,
    rows,
    keyOf,
    () => make("tr", { role: "row" }, ...columns.map((column) => cell(column))),
    (line, row) => columns.forEach((column, position) => fill(line.children[position], column, row)),
  );
}

function heading(title) {
  const made = make("span");
  name(made, title);
  return made;
}

const place = (column) => (column.right ? "right" : column.wide ? "wide" : null);

function cell(column) {
  const made = make("td", { role: "cell", "data-label": column.title, class: place(column) });
  if (column.swatch) made.append(make("span", { class: "swatch", "aria-hidden": "true" }));
  made.append(column.link ? make("a") : make("span"));
  if (column.mark) made.append(make("span", { class: "badge" }));
  return made;
}

function fill(made, column, row) {
  const words = made.querySelector("a, span:not(.swatch):not(.badge)");
  name(words, column.text(row));
  if (column.link && words.getAttribute("href") !== column.link(row)) words.setAttribute("href", column.link(row));
  if (column.swatch) made.querySelector(".swatch").dataset.tone = column.swatch(row);
  if (column.mark) {
    const badge = made.querySelector(".badge");
    const [text, kind] = column.mark(row) || ["", ""];
    say(badge, text);
    badge.className = `badge ${kind}`;
    show(badge, Boolean(text));
  }
}
