// The overview: what is spent, what runs, what was stopped.
import { Bars } from "./chart.js";
import { find, keep, make, name, note, say, show, table } from "./dom.js";
import { Live } from "./live.js";
import { ago, amount, briefly, counted, lasted, moment, ruleWords, tick, usd, windowWords } from "./words.js";

const CHOICES = {
  by: { app: "app", agent: "agent", model: "model", user: "user", tool: "tool" },
  range: { "15m": "15 min", "1h": "hour", "1d": "day", "7d": "7 days", "30d": "30 days" },
  unit: { usd: "dollars", tokens: "tokens" },
};
const FEW = 6; // of a long list, until somebody asks for all
const DEFAULTS = { by: "app", range: "1d", unit: "usd" };
const chosen = { ...DEFAULTS };
const bars = new Bars(find("chart"), find("readout"));
let last = null;
let tripsTold = null;

for (const [what, options] of Object.entries(CHOICES)) {
  const given = new URLSearchParams(location.search).get(what);
  if (given in options) chosen[what] = given;
  for (const [value, words] of Object.entries(options)) {
    const input = make("input", { type: "radio", name: what, value, id: `${what}-${value}` });
    input.checked = chosen[what] === value;
    input.addEventListener("change", () => choose(what, value));
    find(`choose-${what}`).append(make("span", { class: "choice" }, input, make("label", { for: `${what}-${value}` }, words)));
  }
}

function choose(what, value) {
  chosen[what] = value;
  const query = Object.keys(chosen).filter((name) => chosen[name] !== DEFAULTS[name]).map((name) => `${name}=${chosen[name]}`).join("&");
  history.replaceState(null, "", query ? `/?${query}` : "/");
  if (what === "unit" && last) showSpend(last);
  else live.ask();
}

find("numbers").addEventListener("toggle", () => last && showNumbers(last.spend));

const live = new Live(() => `/api/overview?by=${chosen.by}&range=${chosen.range}`, render);

function render(overview) {
  last = overview;
  say(find("store"), overview.store);
  show(find("empty"), overview.is_empty);
  show(find("content"), !overview.is_empty);
  say(find("empty-code"), `from runguard.adk import RunGuardPlugin\n\napp = App(name="my_app", root_agent=agent,\n          plugins=[RunGuardPlugin(store="${overview.store}")])`);
  say(find("unreadable"), overview.unreadable ? `${counted(overview.unreadable)} records could not be read and are left out.` : "");
  showStops(overview);
  showFigures(overview);
  showSpend(overview);
  showBudgets(overview);
  showRunning(overview);
  showBreakers(overview);
  showTrips(overview);
}

// The first few of a list, and a button for the rest.
function first(id, rows, few) {
  const button = find(`${id}-more`);
  const isOpen = button.getAttribute("aria-expanded") === "true";
  button.onclick = () => {
    button.setAttribute("aria-expanded", String(!isOpen));
    if (last) render(last);
  };
  if (!button.hasAttribute("aria-expanded")) button.setAttribute("aria-expanded", "false");
  say(button, isOpen ? "Show fewer" : `Show all ${counted(rows.length)}`);
  show(button, rows.length > few);
  return isOpen ? rows : rows.slice(0, few);
}

function showStops({ stops, now }) {
  show(find("stops"), stops.length > 0);
  keep(find("stop-list"), stops, (stop) => stop.scope, () => make("li"), (line, stop) => {
    name(line, `${stop.scope === "all" ? "everything" : stop.scope}, by ${stop.actor}, ${ago(stop.at, now)}: ${stop.reason}`);
  });
}

function showFigures({ spend, running, running_left_out, trips, trips_left_out }) {
  const { total } = spend;
  const isUnknown = total.calls > 0 && total.unpriced === total.calls;
  const least = spend.capped_at ? "+" : ""; // older calls of this time were not read
  say(find("figure-usd"), isUnknown ? "unknown" : usd(total.usd, total.estimated > 0) + least);
  say(find("figure-usd-label"), `spent, ${CHOICES.range[chosen.range] === "hour" ? "last hour" : `last ${CHOICES.range[chosen.range]}`}${total.unpriced ? `; ${counted(total.unpriced)} calls without a price` : ""}`);
  say(find("figure-calls"), briefly(total.calls) + least);
  say(find("figure-running"), counted(running.length + running_left_out));
  const since = trips.filter((trip) => trip.at >= spend.since).length;
  say(find("figure-trips"), since === trips.length && trips_left_out ? `${since}+` : counted(since));
  say(find("figure-trips-label"), since === 1 ? "stop" : "stops");
}

function showSpend(overview) {
  const { spend } = overview;
  const least = spend.capped_at ? "+" : "";
  bars.draw(spend, chosen.unit);
  const place = (row) => Math.min(spend.names.indexOf(row.name) < 0 ? spend.names.length - 1 : spend.names.indexOf(row.name), 7);
  table(find("totals"), `Totals by ${spend.by}`, [
    { title: spend.by, text: (row) => row.name || "unnamed", swatch: place },
    { title: "spent", right: true, text: (row) => (row.unpriced === row.calls ? "no price" : usd(row.usd, row.estimated > 0) + least) },
    { title: "tokens", right: true, text: (row) => briefly(row.tokens) + least },
    { title: "calls", right: true, text: (row) => briefly(row.calls) + least },
  ], spend.totals.slice(0, 20), (row) => row.name);
  const notes = [
    spend.total.calls ? "" : "No model call in this time. Choose a longer one, or start a guarded run.",
    spend.totals.length > 20 ? `and ${counted(spend.totals.length - 20)} more with less.` : "",
    spend.capped_at ? `Only the last ${counted(spend.capped_at)} calls are read; earlier ones of this time are left out.` : "",
  ];
  note("spend-note", notes.filter(Boolean).join(" "));
  showNumbers(spend);
}

function showNumbers(spend) {
  if (!find("numbers").open) return;
  const rows = chosen.unit === "usd" ? spend.usd : spend.tokens;
  const words = (value) => (value ? (chosen.unit === "usd" ? usd(value) : briefly(value)) : "–");
  const buckets = spend.begins.map((at, bucket) => ({ at, bucket })).filter(({ bucket }) => rows.some((row) => row[bucket])).reverse();
  table(find("numbers-table"), `Spend by ${spend.by} over time`, [
    { title: "from", text: ({ at }) => tick(at, 3 * 86400) },
    ...spend.names.map((name, position) => ({ title: name || "unnamed", right: true, text: ({ bucket }) => words(rows[position][bucket]) })),
  ], buckets, ({ at }) => at);
}

function showBudgets({ budgets, budgets_left_out, now }) {
  keep(find("budgets"), first("budgets", budgets, FEW), (row) => `${row.scope} ${row.window} ${row.unit}`, newBudget, (line, row) => {
    const limit = Number(row.limit) + Number(row.granted);
    const part = (value) => Math.max(0, Math.min(100, limit ? (100 * Number(value)) / limit : Number(value) > 0 ? 100 : 0));
    const isFull = row.closed || row.share >= 1;
    name(line.querySelector(".scope"), row.scope);
    say(line.querySelector(".of"), `${amount(row.unit, row.spent)} of ${amount(row.unit, limit)}`);
    say(line.querySelector(".more"), [
      Number(row.reserved) ? `${amount(row.unit, row.reserved)} reserved` : "",
      Number(row.granted) ? `${amount(row.unit, row.granted)} granted on top` : "",
      Number(row.overrun) ? `${amount(row.unit, row.overrun)} overrun` : "",
      row.window ? `per ${windowWords(row.window)}${row.ends ? `, resets in ${lasted(Math.max(row.ends - now, 0))}` : ""}` : "",
      isFull ? "" : budgetForecast(row.forecast, now),
    ].filter(Boolean).join(" · "));
    const badge = line.querySelector(".badge");
    say(badge, row.closed ? "closed" : isFull ? "full" : "");
    show(badge, isFull);
    line.dataset.level = isFull ? "full" : row.share >= 0.8 ? "high" : "";
    const bar = line.querySelector("svg");
    bar.setAttribute("aria-label", `${Math.round(row.share * 100)} percent spent or reserved`);
    bar.querySelector(".spent").setAttribute("width", part(row.spent));
    bar.querySelector(".reserved").setAttribute("x", part(row.spent));
    bar.querySelector(".reserved").setAttribute("width", Math.min(part(row.reserved), 100 - part(row.spent)));
  });
  note("budgets-note", !budgets.length ? 'No budget beyond single runs. Add one: budgets=[Budget(usd=5, per="user", window="1d")].' : budgets_left_out ? `The fullest ${counted(budgets.length)}; runguard status lists all.` : "");
}

// An estimate, so it says "about".
function budgetForecast(forecast, now) {
  if (!forecast) return "";
  if (forecast.used_up_at === null) return `about ${Math.round(forecast.share_at_end * 100)} % by then`;
  return `used up in about ${lasted(Math.max(forecast.used_up_at - now, 0))}`;
}

// The nearest limit of a run, as status shows it.
function runForecast(forecast) {
  const limits = Object.entries({ cap: "cap", window: "window", tier: "higher price" });
  const found = limits.filter(([key]) => forecast && forecast[key]).map(([key, words]) => ({ ...forecast[key], words }));
  if (!found.length) return "–";
  const next = found.reduce((a, b) => (b.calls_left < a.calls_left ? b : a));
  return `${next.words} in ~${briefly(next.calls_left)} calls`;
}

function newBudget() {
  const drawn = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const bar = drawn("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img" });
  bar.append(drawn("rect", { class: "room", width: 100, height: 4 }), drawn("rect", { class: "spent", height: 4 }), drawn("rect", { class: "reserved", height: 4 }));
  const head = make("div", { class: "line" }, make("span", { class: "scope" }), make("span", { class: "badge full" }), make("span", { class: "of" }));
  return make("li", {}, head, bar, make("p", { class: "more" }));
}

function showRunning({ running, running_left_out }) {
  const who = (row) => [row.app, row.user].filter(Boolean).join(" / ") || row.run;
  table(find("running"), "Runs that are alive", [
    { title: "run", text: who, mark: (row) => (row.stopped ? [`stopping: ${row.stopped}`, "stop"] : row.silent_s > 5 ? ["silent", "shadow"] : row.waiting ? [`${counted(row.waiting)} waiting`, "shadow"] : null) },
    { title: "for", right: true, text: (row) => lasted(row.seconds) },
    { title: "calls", right: true, text: (row) => `${briefly(row.model_calls)}${row.in_flight ? ` +${row.in_flight}` : ""}` },
    { title: "spent", right: true, text: (row) => usd(row.spent_usd, row.estimated_calls > 0) },
    { title: "next limit", text: (row) => runForecast(row.forecast) },
    { title: "notes", text: (row) => row.notes.join("; ") || "–" },
  ], running, (row) => row.run);
  show(find("running"), running.length > 0);
  note("running-note", !running.length ? "No run is alive right now." : running_left_out ? `and ${counted(running_left_out)} more.` : "");
}

function showBreakers({ breakers, now }) {
  table(find("breakers"), "Breakers of tools", [
    { title: "tool", text: (row) => row.tool, mark: (row) => [row.state.replace("_", " "), row.state === "closed" ? "" : "stop"] },
    { title: "failures", right: true, text: (row) => (row.failures ? `${counted(row.failures)} in ${counted(row.runs)} runs` : "–") },
    { title: "since", right: true, text: (row) => (row.state === "closed" ? "–" : ago(row.opened_at, now)) },
  ], breakers, (row) => row.tool);
  show(find("breakers"), breakers.length > 0);
  note("breakers-note", breakers.length ? "" : "All closed: no tool fails across runs.");
}

function showTrips({ trips, trips_left_out, now }) {
  table(find("trips"), "Stops, newest first", [
    { title: "what", text: (row) => `${ruleWords(row.rule)}${row.tool ? `: ${row.tool}` : ""}`, link: (row) => `/trips/${encodeURIComponent(row.id)}`, mark: (row) => (row.shadow ? ["shadow", "shadow"] : null) },
    { title: "app / user", text: (row) => [row.app, row.user_id].filter(Boolean).join(" / ") },
    { title: "calls", right: true, text: (row) => briefly(row.model_calls) },
    { title: "cost", right: true, text: (row) => usd(row.usd, row.estimated) },
    { title: "when", right: true, text: (row) => ago(row.at, now) },
  ], first("trips", trips, FEW), (row) => row.id);
  show(find("trips"), trips.length > 0);
  note("trips-note", !trips.length ? "None so far." : trips_left_out ? `The last ${counted(trips.length)}; runguard trips lists more.` : "");
  if (tripsTold !== null && trips.length && trips[0].id !== tripsTold) say(find("told"), `A new stop: ${ruleWords(trips[0].rule)}, ${moment(trips[0].at)}`);
  tripsTold = trips.length ? trips[0].id : "";
}
