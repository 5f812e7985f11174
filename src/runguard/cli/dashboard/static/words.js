// Numbers and times as people read them. Unknown is never zero.

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const counted = (number) => (number === null || number === undefined ? "unknown" : whole.format(number));
export const briefly = (number) => (number === null || number === undefined ? "unknown" : number < 1000000 ? whole.format(number) : short.format(number));

export function usd(amount, isEstimated = false) {
  if (amount === null || amount === undefined || amount === "") return "unknown";
  const number = Number(amount);
  if (!Number.isFinite(number)) return "unknown";
  const size = Math.abs(number);
  const digits = size === 0 || size >= 1 ? 2 : size >= 0.01 ? 3 : size >= 0.0001 ? 5 : 7;
  const text = number.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: digits });
  return `${isEstimated ? "about " : ""}$${text}`;
}

export const amount = (unit, value) => (unit === "usd" ? usd(value) : `${briefly(Number(value))} ${unit}`);

export function lasted(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

const WINDOWS = { s: "second", m: "minute", h: "hour", d: "day", w: "week" };

export function windowWords(window) {
  const [, number, unit] = /^(\d+)([smhdw])$/.exec(window) ?? [];
  return number === "1" ? WINDOWS[unit] : number ? `${number} ${WINDOWS[unit]}s` : window;
}

export const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");

export const ago = (at, now) => (at === null || at === undefined ? "" : now - at < 5 ? "just now" : `${lasted(Math.round(now - at))} ago`);

export const moment = (at) => (at ? new Date(at * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" }) : "");

// A moment within a span of so many seconds: the time of day, the day, or both.
export function tick(at, span) {
  const date = new Date(at * 1000);
  const day = date.toLocaleDateString(undefined, { month: "short", day: "numeric" });
  const time = date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
  if (span > 10 * 86400) return day;
  return span > 2 * 86400 ? `${day} ${time}` : time;
}

// What a rule is, in words.
const rules = {
  repetition: "Repeating the same step", no_news: "Nothing new", same_call: "Calling the same over and over", cycle: "Going in circles",
  stall: "Failing in the same way", tool_failures: "A tool keeps failing", handoff: "Passing back and forth", talk: "Talking without a step", fan_out: "Too much at once",
  deadline: "Out of time", growth: "The prompt grows", context: "The context is full", polling: "Waiting for nothing",
  budget: "Out of budget", model_calls: "Too many model calls", tool_calls: "Too many tool calls", tool_limit: "A tool's limit",
  depth: "Delegated too deep", result_size: "Answers too large", kill_switch: "Stopped by an operator", policy_error: "The policy is not valid",
  guard_error: "The guard itself failed", once: "Done once already", breaker: "The breaker is open", empty: "Nothing found", unpriced: "A model without a price",
  downgrade: "A cheaper model", prompt_cache: "The prompt cache is lost",
};
export const ruleWords = (rule) => rules[rule] || rule || "Stopped";
