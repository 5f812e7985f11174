// The page of `runguard replay --html`: one file, whose data stands in it.
import { axis, colour } from "./chart.js";
import { find, make, name, say, table } from "./dom.js";
import { briefly, counted, usd } from "./words.js";

const POLICIES = ["--tone-0", "--tone-2"];
const report = JSON.parse(find("data").textContent);
const drawings = [];

name(find("sources"), report.sources);
name(find("policy"), `Under ${report.policies.join(" against ")}`);
for (const part of report.totals) find("totals").append(card(part.title, tabled(part), part.notes));
drawLines(report.cost, (value) => usd(value));
drawLines(report.prompts, briefly);
if (report.stops.policies.some(({ heights }) => heights.some(Boolean))) drawBars(report.stops);
for (const part of report.details) find("details").append(card(part.title, part.head.length > 1 ? tabled(part) : listed(part), part.notes));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawings.forEach((again) => again()));

function card(title, content, notes = []) {
  const heading = make("h2");
  name(heading, title);
  return make("section", { class: "card" }, heading, content, ...notes.map((more) => make("p", { class: "note" }, more)));
}

// Columns of words may be wrapped; all others hold numbers.
function tabled({ title, head, words, rows }) {
  const host = make("div");
  const columns = head.map((title, position) => ({
    title, right: !words.includes(position), wide: words.includes(position) && position > 0, text: (row) => row.cells[position],
  }));
  table(host, title, columns, rows.map((cells, number) => ({ cells, number })), (row) => row.number);
  return host;
}

function listed({ rows }) {
  const lines = rows.map(([item]) => {
    const line = make("li");
    name(line, item);
    return line;
  });
  return make("ul", {}, ...lines);
}

// A chart with its key. `told` says what lies at the pointer, in words.
function chart(title, key, label, options, data, told) {
  const readout = make("p", { class: "readout", "aria-hidden": "true" }, label);
  const host = make("div", { class: "chart", role: "img", "aria-label": `${title}. ${label}` });
  const legend = make("p", { class: "note" });
  for (const [tone, words] of key) {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = `var(${tone})`;
    const said = make("span", { class: "key" }, swatch, words);
    legend.append(said, " ");
  }
  find("charts").append(card(title, make("div", {}, legend, host, readout)));
  let plot = null;
  const width = () => Math.max(Math.floor(host.clientWidth), 200);
  const draw = () => {
    if (plot) plot.destroy();
    plot = new uPlot({
      width: width(), height: 220, padding: [10, 20, 0, 0], legend: { show: false }, cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
      hooks: { setCursor: [({ cursor }) => say(readout, cursor.idx === null || cursor.idx === undefined ? label : told(cursor.idx))] }, ...options(),
    }, data, host);
  };
  draw();
  drawings.push(draw);
  new ResizeObserver(() => plot.width !== width() && plot.setSize({ width: width(), height: 220 })).observe(host);
}

function scales(most, x) {
  return { x: { time: false, range: () => x }, y: { range: () => [0, most > 0 ? most * 1.05 : 1] } };
}

// The mean of all runs, and the most expensive runs, with the calls after which they would have been stopped.
function drawLines({ title, label, mean, runs }, format) {
  const turns = mean.map((_, position) => position + 1);
  const data = [turns, ...runs.map(({ values }) => turns.map((_, position) => values[position] ?? null)), mean];
  const most = Math.max(...mean, ...runs.flatMap(({ values }) => values.slice(0, turns.length)));
  const isStopped = ({ stop, values }) => stop > 0 && stop <= Math.min(values.length, turns.length);
  const key = [["--tone-0", "mean of all runs"], ["--tone-7", "the most expensive runs"]];
  if (runs.some(isStopped)) key.push(["--bad", "would have been stopped"]);
  const options = () => ({
    scales: scales(most, [1, Math.max(turns.length, 2)]),
    axes: [
      { ...axis(), grid: { show: false }, space: 60, size: 32, values: (_, marks) => marks.map((mark) => (Number.isInteger(mark) ? counted(mark) : "")) },
      { ...axis(), size: 62, space: 44, values: (_, marks) => marks.map(format) },
    ],
    series: [
      {},
      ...runs.map((run) => ({
        stroke: colour("--tone-7"), width: 1, alpha: 0.7,
        points: { show: isStopped(run), filter: () => [run.stop - 1], size: 9, fill: colour("--bad"), stroke: colour("--bad") },
      })),
      { stroke: colour("--tone-0"), width: 2, points: { show: false } },
    ],
  });
  chart(title, key, label, options, data, (position) => {
    const ended = runs.filter((run) => isStopped(run) && run.stop === position + 1).map((run) => `${run.name} would have been stopped`);
    return [`call ${position + 1}: mean ${format(mean[position])}`, ...ended].join(" · ");
  });
}

// In which twentieth of a run its stop falls.
function drawBars({ title, label, policies }) {
  const share = 100 / policies[0].heights.length;
  const middles = policies[0].heights.map((_, position) => (position + 0.5) * share);
  const sides = policies.length > 1 ? [-1, 1] : [0];
  const options = () => ({
    scales: scales(Math.max(...policies.flatMap(({ heights }) => heights)), [0, 100]),
    axes: [
      { ...axis(), grid: { show: false }, space: 60, size: 32, values: (_, marks) => marks.map((mark) => `${mark} %`) },
      { ...axis(), size: 62, space: 44, values: (_, marks) => marks.map((mark) => (Number.isInteger(mark) ? counted(mark) : "")) },
    ],
    series: [{}, ...policies.map((_, position) => ({
      fill: colour(POLICIES[position]), stroke: colour(POLICIES[position]), width: 0, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.8 / policies.length, 20], align: sides[position] }),
    }))],
  });
  const key = policies.map(({ name }, position) => [POLICIES[position], name]);
  chart(title, key, label, options, [middles, ...policies.map(({ heights }) => heights)], (bin) =>
    `${Math.round(bin * share)} % or later: ${policies.map(({ name, heights }) => `${name} ${counted(heights[bin])}`).join(" · ")}`);
}
