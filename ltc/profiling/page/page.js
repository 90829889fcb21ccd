"use strict";
/* Filters, sorting, keys, and the timeline of a step. Without it the tables can be read all the same. */
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);

/* --- light and dark ------------------------------------------------------------------------- */

const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = (isDark) => { document.documentElement.dataset.theme = isDark ? "dark" : "light"; };
const isDark = () => document.documentElement.dataset.theme === "dark";
paint(dark.matches);
dark.addEventListener("change", (event) => paint(event.matches));
one("#theme").addEventListener("click", () => paint(!isDark()));

/* --- filters and sorting -------------------------------------------------------------------- */

const filter = one("#filter");
const boxes = all("[data-kind][type=checkbox]");

function applyFilters() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hiddenKinds = new Set(boxes.filter((box) => !box.checked).map((box) => box.dataset.kind));
  for (const row of all("[data-filter]")) {
    const said = `${row.textContent} ${all("[title]", row).map((part) => part.title).join(" ")}`.toLowerCase();
    row.hidden = hiddenKinds.has(row.dataset.of) || !words.every((word) => said.includes(word));
  }
  for (const row of all(".source .free, .source .gap")) row.hidden = words.length > 0;
  document.body.classList.toggle("filtering", words.length > 0);
  light(words);
}

/* Of a long table the first rows are shown, in whatever order; a button shows all. */
function fold(table) {
  const top = Number(table.dataset.top ?? Infinity);
  [...table.tBodies[0].rows].forEach((row, number) => row.classList.toggle("beyond", number >= top));
}
for (const button of all("button.more")) {
  const table = button.previousElementSibling.firstElementChild;
  fold(table);
  table.classList.add("folded");
  button.addEventListener("click", () => {
    const folded = table.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? `show all ${table.tBodies[0].rows.length}` : `show the first ${table.dataset.top}`;
  });
}
filter.addEventListener("input", applyFilters);
boxes.forEach((box) => box.addEventListener("change", applyFilters));

function sortBy(head, column, table) {
  const falls = head.getAttribute("aria-sort") !== "descending";
  const key = (row) => {
    const cell = row.cells[column];
    return cell.dataset.order === undefined ? cell.textContent : Number(cell.dataset.order);
  };
  const rows = all("tbody tr", table).sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return falls ? -order : order;
  });
  all("th", table).forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", falls ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
  fold(table);
}
for (const table of all("table.sortable")) {
  all("th", table).forEach((head, column) => head.firstChild.addEventListener("click", () => sortBy(head, column, table)));
}
for (const dot of all(".dot")) {
  dot.addEventListener("click", () => {
    const again = dot.classList.contains("chosen");
    all(".dot.chosen").forEach((other) => other.classList.remove("chosen"));
    dot.classList.toggle("chosen", !again);
    filter.value = again ? "" : dot.dataset.name;
    applyFilters();
  });
}

/* --- the timeline --------------------------------------------------------------------------- */

const data = JSON.parse(one("#data").textContent);
const box = one("#timeline") ?? document.createElement("div"); /* a comparison of two runs has none */
const ROW = 17, GAP = 10, TITLE = 16, AXIS = 22;
const view = { place: Number(box.dataset.start ?? 0), from: 0, to: 1 };

function duration(us) {
  const [unit, size] = us >= 1e6 ? ["s", 1e6] : us >= 1e3 ? ["ms", 1e3] : ["µs", 1];
  return `${(us / size).toPrecision(3)} ${unit}`;
}

function spansOf(step) {
  const found = [];
  for (let k = 0; k < step.spans.length; k += 6) {
    const [lane, category, name, about, begin, length] = step.spans.slice(k, k + 6);
    found.push({ lane, category: data.categories[category], name: data.names[name], about: data.names[about], begin, length });
  }
  return found;
}

/* Each span stands below those that it lies in. */
function layOut(spans) {
  const lanes = new Map();
  for (const span of spans) {
    const lane = lanes.get(span.lane) ?? { open: [], depth: 0, spans: [] };
    lanes.set(span.lane, lane);
    let depth = 0;
    while (lane.open[depth] !== undefined && lane.open[depth] > span.begin + 0.05) depth += 1;
    lane.open[depth] = span.begin + span.length;
    lane.open.length = depth + 1;
    lane.depth = Math.max(lane.depth, depth + 1);
    lane.spans.push({ ...span, depth });
  }
  return [...lanes].sort((a, b) => a[0] - b[0]);
}

const NS = "http://www.w3.org/2000/svg";
function element(name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function draw() {
  if (!box.isConnected) return;
  const step = data.steps[view.place];
  const whole = step.end - step.begin, width = Math.max(box.clientWidth - 24, 200);
  const ticks = Math.max(2, Math.min(8, Math.floor(width / 110)));
  const from = view.from * whole, to = view.to * whole, scale = width / (to - from);
  const svg = element("svg", {});
  let y = AXIS;
  for (let k = 0; k <= ticks; k += 1) {
    const x = (k * width) / ticks;
    svg.append(element("line", { class: "axis", x1: x, x2: x, y1: 14, y2: 10000 }));
    svg.append(element("text", { x: x + (k === ticks ? -3 : 3), y: 11, "text-anchor": k === ticks ? "end" : "start" }, duration(from + (k * (to - from)) / ticks)));
  }
  for (const [number, lane] of layOut(spansOf(step))) {
    svg.append(element("text", { class: "lane", x: 0, y: y + 11 }, data.lanes[number]));
    y += TITLE;
    for (const span of lane.spans) drawSpan(svg, span, from, scale, width, y);
    y += lane.depth * ROW + GAP;
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${y}`);
  box.replaceChildren(svg);
  one("#which").textContent = `step ${step.number}: ${duration(whole)}`;
  all(".strip .step").forEach((bar) => bar.classList.toggle("chosen", Number(bar.dataset.step) === view.place));
  light(filter.value.toLowerCase().split(/\s+/).filter(Boolean));
}

function drawSpan(svg, span, from, scale, width, top) {
  const left = Math.max((span.begin - from) * scale, 0);
  const right = Math.min((span.begin + span.length - from) * scale, width);
  if (right <= 0 || left >= width || right < left) return;
  const size = Math.max(right - left, 0.6), y = top + span.depth * ROW;
  const rect = element("rect", { class: `c-${span.category}`, x: left.toFixed(2), y, width: size.toFixed(2), height: ROW - 2, rx: size > 4 ? 2 : 0 });
  const told = `${span.category}: ${span.name}, ${duration(span.length)}\n${span.about}`;
  rect.append(element("title", {}, told));
  rect.dataset.said = told.toLowerCase();
  rect.addEventListener("pointerenter", () => { one("#span").textContent = told; });
  svg.append(rect);
  const letters = Math.floor((size - 8) / 6.2);
  if (letters >= 4) {
    const name = span.name.length > letters ? `${span.name.slice(0, letters - 1)}…` : span.name;
    svg.append(element("text", { class: `label of-${span.category}`, x: left + 4, y: y + 11.5 }, name));
  }
}

function light(words) {
  for (const rect of all("#timeline rect")) {
    const meant = words.length > 0 && words.every((word) => rect.dataset.said.includes(word));
    rect.classList.toggle("lit", meant);
    rect.classList.toggle("dim", words.length > 0 && !meant);
  }
}

function show(place) {
  if (place < 0 || place >= data.steps.length) return;
  Object.assign(view, { place, from: 0, to: 1 });
  draw();
}

function zoom(factor, middle = (view.from + view.to) / 2) {
  const size = factor === 0 ? 1 : Math.min(Math.max((view.to - view.from) / factor, 1e-5), 1);
  const part = (middle - view.from) / (view.to - view.from);
  move(middle - part * size, size);
}

function move(from, size = view.to - view.from) {
  view.from = Math.min(Math.max(from, 0), 1 - size);
  view.to = view.from + size;
  draw();
}

all(".strip [data-step]").forEach((bar) => {
  bar.addEventListener("click", () => show(Number(bar.dataset.step)));
  bar.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { show(Number(bar.dataset.step)); event.preventDefault(); } });
});
all("[data-move]").forEach((button) => button.addEventListener("click", () => show(view.place + Number(button.dataset.move))));
all("[data-zoom]").forEach((button) => button.addEventListener("click", () => zoom(Number(button.dataset.zoom))));
box.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return; /* the page scrolls */
  event.preventDefault();
  const place = box.getBoundingClientRect();
  zoom(event.deltaY < 0 ? 1.25 : 0.8, view.from + ((event.clientX - place.left) / place.width) * (view.to - view.from));
}, { passive: false });
draw();
addEventListener("resize", draw);

/* --- keys ----------------------------------------------------------------------------------- */

const sections = all("main > section");
const KEYS = {
  "/": () => filter.focus(),
  t: () => paint(!isDark()),
  "[": () => show(view.place - 1),
  "]": () => show(view.place + 1),
  "+": () => zoom(1.6),
  "=": () => zoom(1.6),
  "-": () => zoom(0.625),
  0: () => zoom(0),
};
sections.forEach((part, number) => { KEYS[number + 1] = () => part.scrollIntoView(); });

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === filter) {
    if (event.key === "Escape") { filter.value = ""; applyFilters(); filter.blur(); }
    return;
  }
  const along = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key];
  if (along !== undefined && document.activeElement === box) move(view.from + along * (view.to - view.from));
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

addEventListener("scroll", () => {
  const here = sections.findLast((part) => part.getBoundingClientRect().top < innerHeight / 3);
  all("nav a").forEach((link) => link.classList.toggle("here", link.hash === `#${here?.id}`));
}, { passive: true });
