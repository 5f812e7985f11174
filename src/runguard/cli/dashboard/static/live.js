// Asking again and again, and saying whether it works.
import { find, note, say } from "./dom.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 15000;

export class Live {
  constructor(address, onAnswer) {
    this.address = address; // a function: what is asked may change
    this.onAnswer = onAnswer;
    this.turn = 0;
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
    this.ask();
  }

  async ask() {
    const turn = (this.turn += 1); // whoever asks last is answered
    clearTimeout(this.timer);
    let ended = false;
    try {
      const reply = await fetch(this.address(), { signal: AbortSignal.timeout(PATIENCE_MS), credentials: "same-origin" });
      const body = reply.headers.get("content-type")?.startsWith("application/json") ? await reply.json() : {};
      if (turn !== this.turn) return;
      if (reply.ok) {
        this.onAnswer(body);
        state("live", "live");
        note("problem", "");
      } else if (reply.status === 403) {
        ended = true;
        state("lost", "not open");
        note("problem", "The dashboard was started again: open the address that its terminal shows.");
      } else {
        ended = reply.status === 404;
        state("lost", ended ? "not found" : "store away");
        note("problem", body.error || `The dashboard answered with ${reply.status}.`);
      }
    } catch (error) {
      if (turn !== this.turn) return;
      state("lost", "connection lost");
      note("problem", error instanceof TypeError || error.name === "TimeoutError" || error.name === "AbortError"
        ? "No answer from runguard dashboard. What you see is as it was. Started again, the command prints a new address: open that one."
        : `This page failed: ${error.message}`);
      if (!(error instanceof TypeError)) console.error(error);
    }
    if (!ended) this.timer = setTimeout(() => this.ask(), document.hidden ? EVERY_MS * 15 : EVERY_MS);
  }
}

function state(kind, words) {
  const element = find("state");
  if (element.dataset.state !== kind) element.dataset.state = kind;
  say(element, words);
}
