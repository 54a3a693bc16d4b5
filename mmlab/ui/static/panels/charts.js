/* Curves of a run. */
const SMOOTH = 40; // the smoothed loss is the mean over two of so many shares of the points around each (no lag)

function smooth([x, y]) { // as mmlab/ui/scales.py does it
  const reach = Math.floor(y.length / SMOOTH);
  const sums = [0], counts = [0];
  for (const value of y) {
    const finite = Number.isFinite(value);
    sums.push(sums.at(-1) + (finite ? value : 0));
    counts.push(counts.at(-1) + (finite ? 1 : 0));
  }
  return [x, y.map((_, index) => {
    const room = Math.min(reach, index, y.length - 1 - index);
    const count = counts[index + room + 1] - counts[index - room];
    return count ? (sums[index + room + 1] - sums[index - room]) / count : null;
  })];
}

class Chart {
  constructor(title, curves, host) {
    this.curves = curves; // [{label, colour, width, dash, points, scale, data: () => [x, y]}]
    this.holder = make("div", { class: "mm-chart" });
    this.node = make("section", { "aria-label": title }, make("h4", {}, title), this.holder);
    this.host = host;
    this.plot = null;
  }

  build(style) {
    this.plot?.destroy();
    const colour = (name) => style.getPropertyValue(name).trim() || "#888";
    const axis = { stroke: colour("--mm-soft"), grid: { stroke: colour("--mm-line"), width: 1 }, ticks: { show: false },
      font: "11px system-ui, sans-serif", gap: 4 };
    const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3)));
    const scales = [...new Set(this.curves.map((curve) => curve.scale))];
    const axes = scales.map((scale, index) => ({ ...axis, scale, values, size: 52, side: index === 0 ? 3 : 1,
      grid: { ...axis.grid, show: index === 0 }, stroke: scales.length > 1 ? colour(this.curves.find((c) => c.scale === scale).colour) : axis.stroke }));
    const series = this.curves.map((curve) => ({ label: curve.label, scale: curve.scale, stroke: colour(curve.colour), width: curve.width,
      spanGaps: true, dash: curve.dash, value: (_, value) => number(value), paths: curve.points ? () => null : undefined,
      points: curve.points ? { show: true, size: 7, fill: colour(curve.colour) } : { show: false } }));
    this.plot = new uPlot({
      width: this.width(), height: 222, legend: { live: true }, cursor: { sync: { key: this.host }, y: false, points: { size: 6 } },
      scales: { x: { time: false }, ...Object.fromEntries(scales.map((scale) => [scale, { range: this.range(scale) }])) },
      axes: [{ ...axis, size: 26, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en-US") : "")) }, ...axes],
      series: [{ label: t("step"), value: (_, value) => number(value) }, ...series],
    }, this.data(), this.holder);
  }

  range(scale) {
    if (scale === "loss") return (_, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.08, false));
    return (_, low, high) => (high === null ? [0, 1] : [0, high * 1.08 || 1]);
  }

  width() { return Math.max(220, Math.floor(this.holder.clientWidth || this.holder.parentElement?.clientWidth || 400)); }

  data() { return uPlot.join(this.curves.map((curve) => curve.data())); }

  draw() {
    if (!this.plot) return;
    const data = this.data();
    this.plot.setData(data);
    if (!(this.plot.cursor.left >= 0)) this.plot.setLegend({ idx: data[0].length - 1 }); // without a pointer: the last step
  }

  resize() { if (this.plot && this.width() !== this.plot.width) this.plot.setSize({ width: this.width(), height: 222 }); }
}

PANELS.charts = class extends Panel {
  static title = "Charts";

  constructor(store, name) {
    super(store, name);
    const key = `mm-${Math.random().toString(36).slice(2)}`;
    const curve = (label, colour, scale, data, extra = {}) => ({ label, colour, scale, data, width: 1.5, ...extra });
    this.charts = [
      new Chart(t("Loss by step"), [
        curve(t("loss"), "--mm-pipeline", "loss", () => this.curves.get("loss"), { width: 1 }),
        curve(t("smoothed"), "--mm-blue", "loss", () => smooth(this.curves.get("loss")), { width: 2 }),
        curve(t("held-out"), "--mm-green", "loss", () => this.curves.get("held_out"), { points: true }),
      ], key),
      new Chart(t("Throughput by step"), [
        curve(t("tokens/s"), "--mm-blue", "tokens", () => this.curves.get("tokens_per_s")),
        curve(t("images/s"), "--mm-orange", "images", () => this.curves.get("images_per_s"), { dash: [5, 3] }),
      ], key),
    ];
    this.node.append(make("div", { class: "mm-grid" }, ...this.charts.map((chart) => chart.node)));
  }

  update(_, curves) {
    if (!curves || this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => { this.dirty = false; this.charts.forEach((chart) => chart.draw()); });
  }

  restyle(style) { this.charts.forEach((chart) => chart.build(style)); }

  resize() { this.charts.forEach((chart) => chart.resize()); }

  dispose() { this.charts.forEach((chart) => chart.plot?.destroy()); }
};
