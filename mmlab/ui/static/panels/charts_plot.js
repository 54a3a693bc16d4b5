/* One chart of the panel: its curves, marks where something happened, a legend with values, and the keyboard. */
const MARKS = { // letter, colour, words
  command: ["C", "--mm-soft", "command"], checkpoint: ["S", "--mm-green", "checkpoint saved"], restore: ["R", "--mm-violet", "restored"],
  relayout: ["L", "--mm-violet", "another layout"], notice: ["N", "--mm-orange", "notice"], failure: ["F", "--mm-red", "failure"], recovery: ["V", "--mm-blue", "recovered"],
};
const NEAR = 5; // pixels from a mark within which the pointer shows what it is
const TIP_LINES = 6;
const DASHES = [undefined, [6, 3], [2, 3], [8, 3, 2, 3], [4, 6]]; // of this run, and of those beside it

function smooth(y, percent) { // the mean around each value (no lag), as mmlab/ui/scales.py does it for 5 %
  const reach = Math.floor((y.length * percent) / 200);
  if (reach < 1) return y;
  const sums = new Float64Array(y.length + 1), counts = new Uint32Array(y.length + 1);
  for (let i = 0; i < y.length; i++) {
    const finite = Number.isFinite(y[i]);
    sums[i + 1] = sums[i] + (finite ? y[i] : 0);
    counts[i + 1] = counts[i] + (finite ? 1 : 0);
  }
  return Array.from(y, (_, i) => {
    const room = Math.min(reach, i, y.length - 1 - i);
    const count = counts[i + room + 1] - counts[i - room];
    return count ? (sums[i + room + 1] - sums[i - room]) / count : null;
  });
}

/* Many curves on one grid of steps: of each bin the lowest and the highest value, in their order, so that a chart draws
   no more than two points a pixel, and spikes stay. Few points are drawn as they are. */
function onGrid(curves, bins) {
  const longest = Math.max(0, ...curves.map(([x]) => x.length));
  if (longest <= 2 * bins) return uPlot.join(curves);
  const low = Math.min(...curves.map(([x]) => x[0] ?? Infinity)), high = Math.max(...curves.map(([x]) => x.at(-1) ?? -Infinity));
  const size = (high - low) / bins || 1;
  const steps = Array.from({ length: 2 * bins }, (_, row) => low + (size * row) / 2);
  steps[2 * bins - 1] = high;
  return [steps, ...curves.map(([x, y]) => {
    const column = new Array(2 * bins).fill(null);
    for (let i = 0, next; i < x.length; i = next) {
      const bin = Math.min(bins - 1, Math.floor((x[i] - low) / size));
      let least = -1, most = -1;
      for (next = i; next < x.length && Math.min(bins - 1, Math.floor((x[next] - low) / size)) === bin; next++) {
        if (!Number.isFinite(y[next])) continue;
        if (least < 0 || y[next] < y[least]) least = next;
        if (most < 0 || y[next] > y[most]) most = next;
      }
      if (least < 0) continue;
      column[2 * bin] = y[Math.min(least, most)];
      column[2 * bin + 1] = y[Math.max(least, most)];
    }
    return column;
  })];
}

class Chart {
  constructor(title, panel, key) {
    this.title = title;
    this.panel = panel; // {range, marks, log, zoom(low, high), whole(), tell(text)}
    this.key = key;
    this.lines = []; // [{label, colour, alpha, width, dash, scale, dots, listed, data: () => [x, y]}]
    this.holder = make("div", { class: "mm-plot", tabindex: 0, role: "group", onkeydown: (event) => this.onKey(event) });
    this.tip = make("div", { class: "mm-tip" });
    this.legend = make("div", { class: "mm-legend" });
    this.empty = make("p", { class: "mm-empty" });
    this.node = make("section", { class: "mm-chart" }, make("h4", {}, title), this.holder, this.legend);
    this.holder.append(this.tip, this.empty);
    this.plot = null;
    this.labelling = null;
  }

  /* Take other lines; the plot is built anew only if they differ in more than their data. */
  setLines(lines, style) {
    const signature = JSON.stringify([lines, this.panel.log]);
    this.lines = lines;
    if (signature === this.signature && this.plot) return;
    this.signature = signature;
    this.build(style);
  }

  build(style) {
    this.plot?.destroy();
    this.colour = (name) => style.getPropertyValue(name).trim() || "#888";
    const axis = { stroke: this.colour("--mm-soft"), grid: { stroke: this.colour("--mm-line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3)));
    const scales = [...new Set(this.lines.map((line) => line.scale))];
    if (!scales.length) scales.push("y");
    const axes = scales.map((scale, index) => ({ ...axis, scale, values, size: 52, side: index === 0 ? 3 : 1, grid: { ...axis.grid, show: index === 0 },
      stroke: scales.length > 1 ? this.colour(this.lines.find((line) => line.scale === scale).colour) : axis.stroke }));
    const series = this.lines.map((line) => ({ scale: line.scale, stroke: this.colour(line.colour), alpha: line.alpha ?? 1, width: line.width ?? 1.5, spanGaps: true,
      dash: line.dash, paths: line.dots ? () => null : undefined, points: line.dots ? { show: true, size: 7, fill: this.colour(line.colour) } : { show: false } }));
    this.plot = new uPlot({
      width: this.width(), height: this.height(), padding: [16, scales.length > 1 ? 0 : 12, 0, 0], legend: { show: false },
      cursor: { sync: { key: this.key, setSeries: false }, y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false, dist: 5 },
        bind: { dblclick: () => () => { this.panel.whole(); return null; } } },
      scales: { x: { time: false, range: (_, low, high) => this.panel.range ?? [low ?? 0, high > low ? high : (low ?? 0) + 1] },
        ...Object.fromEntries(scales.map((scale) => [scale, this.scale(scale)])) },
      axes: [{ ...axis, size: 26, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en-US") : "")) }, ...axes],
      series: [{}, ...series],
      hooks: { draw: [() => this.drawMarks()], setCursor: [() => this.showValues()], setSelect: [(plot) => this.select(plot)] },
    }, this.data(), this.holder);
    this.fillLegend(style);
    this.showValues();
  }

  scale(name) {
    if (this.panel.log) return { distr: 3, log: 10, range: (_, low, high) => (low === null ? [0.1, 1] : uPlot.rangeLog(low, high, 10, false)) };
    if (name === "loss") return { range: (_, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.08, false)) };
    return { range: (_, low, high) => (high === null ? [0, 1] : [Math.min(0, low), high * 1.08 || 1]) };
  }

  width() { return Math.max(220, Math.floor(this.holder.clientWidth || 400)); }

  height() { return Math.max(120, Math.floor(this.holder.clientHeight || 210)); }

  data() {
    const positive = ([x, y]) => (this.panel.log ? [x, Array.from(y, (value) => (value > 0 ? value : null))] : [x, y]);
    const curves = this.lines.map((line) => positive(line.data()));
    const some = curves.some(([x]) => x.length);
    put(this.empty, some ? "" : t("no values yet"));
    return curves.length ? onGrid(curves, this.width()) : [[], []].slice(0, 1);
  }

  draw() {
    if (!this.plot) return;
    this.plot.setData(this.data());
    this.showValues();
    this.labelling ??= setTimeout(() => { this.labelling = null; this.holder.setAttribute("aria-label", this.summary()); }, 500);
  }

  /* The text alternative: last, lowest and highest value of each curve. */
  figures() {
    return this.lines.filter((line) => line.told).map((line) => {
      const values = (line.raw ?? line.data)()[1];
      let low = Infinity, high = -Infinity, last = null;
      for (const value of values) if (Number.isFinite(value)) { last = value; if (value < low) low = value; if (value > high) high = value; }
      return [line.label, last, last === null ? null : low, last === null ? null : high];
    });
  }

  summary() {
    const words = this.figures().map(([label, last, low, high]) => t("{0} {1}, from {2} to {3}", label, number(last), number(low), number(high)));
    return `${this.title}. ${words.join("; ")}. ${t("Arrow keys read values, plus and minus zoom, 0 shows all, M goes to the next mark")}`;
  }

  fillLegend(style) {
    this.values = this.lines.map((line) => line.listed && make("b", {}, ""));
    this.legend.replaceChildren(...this.lines.flatMap((line, index) => {
      if (!line.listed) return [];
      const look = line.dots ? "dots" : line.dash ? "dashed" : "solid";
      return make("span", {}, make("i", { class: `mm-swatch mm-${look}`, style: `border-color:${style.getPropertyValue(line.colour)}` }), line.label, " ", this.values[index]);
    }));
    this.step = make("b");
    this.legend.prepend(make("span", {}, `${t("step")} `, this.step));
  }

  /* Values at the pointer, else the last ones. */
  showValues() {
    const { plot } = this;
    if (!plot || !this.values) return;
    const at = plot.cursor.left >= 0 ? plot.cursor.idx : null;
    const [steps] = plot.data;
    put(this.step, steps.length ? number(Math.round(steps[at ?? steps.length - 1]), 9) : "–");
    this.lines.forEach((line, index) => {
      if (!line.listed) return;
      const column = plot.data[1 + (line.from ?? index)] ?? [];
      let row = at ?? column.length - 1;
      while (row > 0 && (column[row] === null || column[row] === undefined)) row--;
      put(this.values[index], number(column[row]));
    });
    this.showTip(at === null ? null : plot.cursor.left);
  }

  marksNear(left, reach) {
    return this.panel.marks.filter(([step]) => Math.abs(this.plot.valToPos(step, "x") - left) <= reach);
  }

  showTip(left) {
    const here = left !== null && this.holder.matches(":hover, :focus"); // not on charts that only follow the pointer
    const near = !here ? [] : this.marksNear(left, NEAR);
    this.tip.style.display = near.length ? "block" : "none";
    if (!near.length) return;
    const more = near.length > TIP_LINES ? [t("and {0} more", near.length - TIP_LINES)] : [];
    this.tip.replaceChildren(...[...near.slice(-TIP_LINES).map(([step, kind, text]) => `${MARKS[kind][0]}  ${t("step {0}", step)}  ${text}`), ...more].map((line) => make("div", {}, line)));
    const right = left > this.width() / 2;
    this.tip.style.left = right ? "auto" : `${left + 64}px`;
    this.tip.style.right = right ? `${this.width() - left - 44}px` : "auto";
  }

  drawMarks() {
    const { ctx, bbox } = this.plot;
    const unit = devicePixelRatio || 1;
    const [low, high] = [this.plot.scales.x.min, this.plot.scales.x.max];
    ctx.save();
    ctx.font = `${Math.round(10 * unit)}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    const letters = new Map(); // by pixel: what is written over the line there
    for (const [step, kind] of this.panel.marks) {
      if (step < low || step > high) continue;
      const [letter, colour] = MARKS[kind];
      const x = Math.round(this.plot.valToPos(step, "x", true));
      const here = letters.get(x) ?? { text: "", colour };
      if (!here.text.includes(letter)) letters.set(x, { text: here.text + letter, colour });
      ctx.strokeStyle = this.colour(colour);
      ctx.lineWidth = unit;
      ctx.setLineDash(kind === "failure" ? [] : [3 * unit, 3 * unit]);
      ctx.beginPath();
      ctx.moveTo(x + 0.5, bbox.top);
      ctx.lineTo(x + 0.5, bbox.top + bbox.height);
      ctx.stroke();
    }
    let written = -Infinity;
    for (const [x, { text, colour }] of [...letters].sort(([a], [b]) => a - b)) {
      if (x - written < 9 * unit) continue; // letters would lie on each other
      ctx.fillStyle = this.colour(colour);
      ctx.fillText(text, x, bbox.top - 3 * unit);
      written = x + ctx.measureText(text).width - 9 * unit;
    }
    ctx.restore();
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const [low, high] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.panel.zoom(low, high);
  }

  onKey(event) {
    const { plot } = this;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = [plot.scales.x.min, plot.scales.x.max];
    const at = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : high;
    const around = (factor) => this.panel.zoom(at - (at - low) * factor, at + (high - at) * factor);
    const move = (rows) => this.point(plot.data[0][Math.min(plot.data[0].length - 1, Math.max(0, (plot.cursor.left >= 0 ? plot.cursor.idx : plot.data[0].length) + rows))]);
    const actions = { ArrowLeft: () => move(event.shiftKey ? -20 : -1), ArrowRight: () => move(event.shiftKey ? 20 : 1), "+": () => around(0.5), "=": () => around(0.5),
      "-": () => around(2), 0: () => this.panel.whole(), Escape: () => this.panel.whole(), m: () => this.nextMark(at, 1), M: () => this.nextMark(at, -1) };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  }

  nextMark(at, way) {
    const steps = [...new Set(this.panel.marks.map(([step]) => step))].filter((step) => (way > 0 ? step > at + 0.5 : step < at - 0.5)).sort((a, b) => way * (a - b));
    if (steps.length) this.point(steps[0]); else this.panel.tell(t("no further mark"));
  }

  point(step) {
    if (step === undefined) return;
    const left = this.plot.valToPos(step, "x");
    this.plot.setCursor({ left, top: 10 });
    const values = this.lines.flatMap((line, index) => (line.listed ? [`${line.label} ${this.values[index].textContent}`] : []));
    const marks = this.marksNear(left, 1).map(([, kind, text]) => `${t(MARKS[kind][2])}: ${text}`);
    this.panel.tell([t("step {0}", this.step.textContent), ...values, ...marks].join(", "));
  }

  resize() {
    if (this.plot && (this.width() !== this.plot.width || this.height() !== this.plot.height)) { this.plot.setSize({ width: this.width(), height: this.height() }); this.draw(); }
  }

  dispose() {
    clearTimeout(this.labelling);
    this.plot?.destroy();
    this.plot = null;
  }
}
