// Stacked bars by uPlot. Bars of one bucket lie over each other, the tallest sum behind.
import { say } from "./dom.js";
import { tick, usd, briefly } from "./words.js";

const HEIGHT = 220;
const TONES = 8;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const axis = () => ({ stroke: colour("--soft"), font: "12px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: colour("--line"), width: 1 } });

export class Bars {
  constructor(host, readout) {
    this.host = host;
    this.readout = readout;
    this.plot = null;
    this.shape = "";
    new ResizeObserver(() => this.plot && this.plot.width !== this.width() && this.plot.setSize({ width: this.width(), height: HEIGHT })).observe(host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again());
  }

  width() {
    return Math.max(Math.floor(this.host.clientWidth), 200);
  }

  again() {
    this.shape = "";
    if (this.last) this.draw(...this.last);
  }

  draw(spend, unit) {
    this.last = [spend, unit];
    const rows = unit === "usd" ? spend.usd : spend.tokens;
    const sums = [];
    rows.forEach((row, position) => sums.push(row.map((value, bucket) => value + (position ? sums[position - 1][bucket] : 0))));
    const data = [spend.begins, ...sums.toReversed()];
    const shape = JSON.stringify([spend.names.length, unit, spend.step]);
    this.spend = spend;
    this.rows = rows;
    this.format = unit === "usd" ? (value) => usd(value) : (value) => briefly(value);
    if (this.plot === null || this.shape !== shape) this.build(spend, data, shape);
    else this.plot.setData(data);
  }

  build(spend, data, shape) {
    if (this.plot) this.plot.destroy();
    const bars = uPlot.paths.bars({ size: [0.72, 26], align: 1, radius: 0.08 });
    const series = spend.names.map((_, position) => {
      const tone = colour(`--tone-${(spend.names.length - 1 - position) % TONES}`);
      return { fill: tone, stroke: tone, width: 0, paths: bars, points: { show: false } };
    });
    this.plot = new uPlot(
      {
        width: this.width(),
        height: HEIGHT,
        padding: [10, 28, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
        scales: {
          x: { range: () => [this.spend.begins[0], this.spend.begins.at(-1) + this.spend.step] },
          y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] },
        },
        axes: [
          { ...axis(), grid: { show: false }, space: 100, size: 32, values: (_, marks) => marks.map((at) => tick(at, this.spend.until - this.spend.since)) },
          { ...axis(), size: 62, space: 44, values: (_, marks) => marks.map((value) => this.format(value)) },
        ],
        series: [{}, ...series],
        hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)] },
      },
      data,
      this.host,
    );
    this.shape = shape;
  }

  tell(bucket) {
    if (bucket === null || bucket === undefined || !this.spend) return say(this.readout, "");
    const parts = this.spend.names.map((name, position) => [name || "unnamed", this.rows[position][bucket]]).filter(([, value]) => value);
    say(this.readout, parts.length ? `${tick(this.spend.begins[bucket], 3 * 86400)}  ${parts.map(([name, value]) => `${name} ${this.format(value)}`).join(" · ")}` : "");
  }
}
