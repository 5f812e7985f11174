// How one run came to its stop.
import { find, keep, make, name, note, say, show, table } from "./dom.js";
import { Live } from "./live.js";
import { briefly, counted, lasted, moment, ruleWords, sentence, usd } from "./words.js";

const trip = location.pathname.split("/").pop();

new Live(() => `/api/trips/${trip}`, (story) => {
  const { trip } = story;
  say(find("store"), story.store);
  document.title = `${ruleWords(trip.rule)} · RunGuard`;
  name(find("title"), `${ruleWords(trip.rule)}${trip.tool ? `: ${trip.tool}` : ""}`);
  show(find("shadow"), trip.shadow);
  name(find("message"), sentence(trip.message));
  name(find("resume"), trip.shadow ? `Nothing was stopped: this policy only watches. With mode = "enforce": ${trip.resume}` : trip.resume); // may begin with code
  showCommand(trip.shadow ? "" : story.command);
  showFigures(story);
  showReasons(story);
  showFacts(story);
  showTimeline(story);
  show(find("content"), true);
});

function showCommand(command) {
  note("command-note", !command ? "" : command.startsWith("runguard extend ") ? "In a shell, to grant as much again as the limit was:" : "In a shell:");
  say(find("command-code"), command);
  show(find("command"), Boolean(command));
}

function showFigures({ usd: cost, later_usd, unpriced, estimated, projection, trip }) {
  const figures = [
    { key: "cost", figure: usd(cost, estimated > 0), label: `cost until the stop${unpriced ? `; ${counted(unpriced)} calls without a price` : ""}` },
    { key: "calls", figure: briefly(trip.model_calls), label: "model calls" },
    { key: "tokens", figure: briefly(trip.tokens), label: "tokens" },
  ];
  if (Number(later_usd)) figures.push({ key: "later", figure: usd(later_usd), label: trip.shadow ? "spent after it, as nothing was stopped" : "spent after it, by other branches" });
  if (projection) {
    figures.push({
      key: "projection",
      figure: `about ${usd(projection.total_usd)}`,
      label: `ADK's own cap of ${projection.cap} model calls would have let it cost: ${projection.cap - projection.made} more at ${usd(projection.mean_usd)} each, the mean of the last calls`,
      badge: "projection",
    });
  }
  keep(find("figures"), figures, (row) => row.key, newFigure, (line, row) => {
    say(line.querySelector(".figure"), row.figure);
    say(line.querySelector(".label"), row.label);
    say(line.querySelector(".badge"), row.badge);
    show(line.querySelector(".badge"), Boolean(row.badge));
    line.classList.toggle("projection", Boolean(row.badge));
  });
}

const newFigure = () => make("li", {}, make("span", { class: "figure" }), make("span", { class: "badge shadow" }), make("span", { class: "label" }));

function showReasons({ why, repeats, trip }) {
  const lines = repeats.map((repeat) =>
    repeat.what === "hand-off"
      ? `${repeat.name}: handed over ${counted(repeat.times)} times`
      : repeat.what !== "call" ? `${repeat.name}: ${counted(repeat.times)} ${repeat.what}` : `${repeat.name}: the same call ${counted(repeat.times)} times${repeat.same_answer > 1 ? `, the same answer ${counted(repeat.same_answer)} times` : ""}`,
  );
  if (!why.length && trip.observed !== null && trip.observed !== undefined) lines.push(`The rule “${trip.rule}” counted ${Number(trip.observed)} ${trip.unit}; its limit is ${Number(trip.limit)}.`);
  for (const [id, told] of [["why", why], ["repeats", lines]]) {
    keep(find(id), told, (line) => line, () => make("li"), name);
    show(find(id), told.length > 0);
    show(find(`${id}-title`), told.length > 0);
  }
}

function showFacts({ trip }) {
  const facts = [
    ["When", moment(trip.at)], ["App", trip.app], ["User", trip.user_id], ["Session", trip.session_id], ["Run", trip.run_id],
    ["Stopped", trip.branch ? `the branch ${trip.branch}` : trip.scope === "run" ? "the run" : trip.scope_id],
    ["Agents", (trip.agent_path || []).join(" → ")], ["Stop", trip.id], ["Policy", trip.policy_digest],
  ].filter(([, value]) => value);
  keep(find("facts"), facts, ([name]) => name, ([name]) => make("div", {}, make("dt", {}, name), make("dd")), (line, [, value]) => name(line.querySelector("dd"), value));
}

const KINDS = { begin: "agent", hand: "hand-off", model: "model", tool: "tool", decision: "guard" };
const DECISIONS = { warn: "warned", nudge: "nudged", block: "refused", stop: "stopped" };

function what(row) {
  if (row.kind === "decision") return `${row.what}${row.name ? ` of ${row.name}` : ""}${row.outcome ? `: ${row.outcome}` : ""}`;
  if (row.kind === "begin") return "begins";
  return row.kind === "hand" ? `hands over to ${row.name}` : row.name || row.what;
}

function again(row) {
  if (row.nth_call < 2) return "";
  if (row.kind === "hand") return `${row.nth_call}× this hand-off`;
  return `${row.nth_call}× the same call${row.nth_answer === row.nth_call ? " and answer" : row.nth_answer > 1 ? `, ${row.nth_answer}× the same answer` : ""}`;
}

const isMade = (row) => row.kind === "model" && row.outcome !== "not made" && row.outcome !== "refused";
const OUTCOMES = { failed: "failed", error: "error", timeout: "timeout", unknown_tool: "no such tool", refused: "refused", empty: "empty" };

function mark(row) {
  if (row.kind === "decision") return [DECISIONS[row.decision] || row.decision, row.decision === "stop" || row.decision === "block" ? "stop" : "shadow"];
  if (row.outcome === "not made") return ["not made", ""];
  if (row.kind === "model") return row.outcome ? [row.outcome, "stop"] : null;
  return row.kind === "tool" && OUTCOMES[row.outcome] ? [OUTCOMES[row.outcome], row.outcome === "empty" ? "" : "stop"] : null;
}

function showTimeline({ rows, left_out, source }) {
  const numbered = rows.map((row, position) => ({ ...row, number: left_out + position }));
  const columns = [
    { title: "after", right: true, text: (row) => lasted(row.after_s) },
    { title: "agent", text: (row) => row.agent + (row.lane ? ` (${row.lane})` : "") },
    { title: "step", text: (row) => KINDS[row.kind] || row.kind },
    { title: "what", text: what, mark },
    { title: "again", text: again, wide: true },
    { title: "tokens", right: true, text: (row) => (isMade(row) ? `${row.tokens_in === null ? "?" : briefly(row.tokens_in)} → ${row.tokens_out === null ? "?" : briefly(row.tokens_out)}` : "") },
    { title: "cost", right: true, text: (row) => (row.kind === "model" || row.usd !== null ? usd(row.usd, row.estimated) : "") },
  ];
  table(find("timeline"), "What happened, in order", source === "steps" ? columns : columns.filter(({ title }) => title !== "again"), numbered, (row) => row.number);
  for (const line of find("timeline").querySelectorAll("tbody tr")) line.dataset.kind = numbered[line.rowIndex - 1]?.kind;
  note("timeline-note", {
    calls: "The store has the model calls of this run and not its steps.",
    trip: "The store has nothing of this run but its stop: its records were purged, or it made no model call.",
  }[source] || (left_out ? `The last ${counted(rows.length)} steps; ${counted(left_out)} before them are left out.` : ""));
  show(find("timeline"), rows.length > 0);
}
