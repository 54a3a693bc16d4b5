/* The dashboard of a run. Data comes as custom messages (see mmlab/ui/charts.py); nothing is a synced trait. */
const HERE_EVERY = 10_000; // ms between signs of life to the kernel, which slows down without them
const BUSY_AFTER = 2_000; // ms after which an unheard command means that the kernel runs a cell
const REFOCUS = 5_000; // ms after a button was pressed in which a renewed view focuses it again
const ASK_AGAIN = 1_000; // ms until a history that has not come is asked for again; doubles each time
const MOST_POINTS = 9_000; // points of a curve beyond which the view asks for the decimated history again
const SMOOTH = 40; // the smoothed loss is the mean over two of so many shares of the points around each (no lag)

const PHASE_COLOURS = ["data", "encode", "forward", "backward", "exchange", "pipeline", "reduce", "optimizer", "idle"];
const ICONS = { running: "▶", paused: "❚❚", finished: "✓", failed: "✕", stopped: "■", queued: "…", starting: "…" };
const ENDED = ["finished", "stopped", "failed"];

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function put(node, text) { if (node.textContent !== text) node.textContent = text; }

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size === 0 || size >= 1e-3) return String(Number(value.toPrecision(digits)));
  return Number(value.toPrecision(3)).toExponential();
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

/* ---- curves: bounded by asking for the decimated history when they grow too long ---- */
class Curves {
  constructor() { this.all = {}; }

  take(sizes, buffers, replace) {
    if (replace) this.all = {};
    sizes.forEach(([name, count], index) => {
      const copy = (view) => view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
      const x = new Float64Array(copy(buffers[2 * index]));
      const y = new Float32Array(copy(buffers[2 * index + 1]));
      const curve = (this.all[name] ??= { x: [], y: [] });
      for (let i = 0; i < count; i++) { curve.x.push(x[i]); curve.y.push(y[i]); }
    });
  }

  get(name) { const curve = this.all[name] ?? { x: [], y: [] }; return [curve.x, curve.y]; }

  longest() { return Math.max(0, ...Object.values(this.all).map((curve) => curve.x.length)); }

  smooth(name) { // as mmlab/ui/scales.py does it
    const [x, y] = this.get(name);
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
}

/* ---- what a widget has got from the kernel, shared by all its views: a new view shows it at once ---- */
class Store {
  constructor(model) {
    this.model = model;
    this.frame = {};
    this.curves = new Curves();
    this.seq = null; // number of the last message taken; null while the history is on its way
    this.views = new Set();
    this.onMessage = (message, buffers) => this.receive(message, buffers ?? []);
    model.on("msg:custom", this.onMessage);
    this.ask();
  }

  dispose() { this.model.off("msg:custom", this.onMessage); clearTimeout(this.again); }

  send(message) { this.model.send(message); }

  ask(wait = ASK_AGAIN) { // a page that is just reconnecting loses messages, so ask until the history is here
    this.seq = null;
    this.send({ kind: "hello" });
    clearTimeout(this.again);
    this.again = setTimeout(() => { if (this.seq === null) this.ask(Math.min(2 * wait, 60_000)); }, wait);
  }

  receive(message, buffers) {
    const history = message.kind === "history";
    if (!history && this.seq === null) return;
    if (!history && message.seq !== this.seq + 1) { this.ask(); return; }
    this.seq = message.seq;
    this.frame = history ? message.frame : { ...this.frame, ...message.frame };
    this.curves.take(message.curves, buffers, history);
    if (this.curves.longest() > MOST_POINTS) this.ask();
    for (const view of this.views) view.update(history ? this.frame : message.frame, history || message.curves.length > 0);
  }
}

/* ---- one chart ---- */
class Chart {
  constructor(title, curves, host) {
    this.title = title;
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
      series: [{ label: "step", value: (_, value) => number(value) }, ...series],
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

/* ---- the whole board ---- */
class Board {
  constructor(store, el) {
    this.store = store;
    this.curves = store.curves;
    this.sent = new Map();
    this.dirty = false;
    this.root = make("div", { class: "mm-board", role: "region", "aria-label": "Dashboard of a run" });
    this.buildHead();
    this.buildTools();
    this.buildPanels();
    el.append(this.root);
    this.listen();
  }

  get frame() { return this.store.frame; }

  buildHead() {
    this.state = make("span", { class: "mm-state", role: "status" }, "…");
    this.name = make("span", { class: "mm-name" });
    this.fill = make("i");
    this.bar = make("div", { class: "mm-bar", role: "progressbar", "aria-label": "Steps", "aria-valuemin": 0 }, this.fill);
    this.count = make("span", {}, "step – of –");
    this.reason = make("p", { class: "mm-reason", role: "alert" });
    this.figures = {};
    const figures = [["loss", "loss"], ["held_out", "held-out loss"], ["tokens_per_s", "tokens/s"], ["images_per_s", "images/s"],
      ["seconds", "s a step"], ["data", "data wait, steps ahead"], ["left", "left"]].map(([key, label]) => {
      this.figures[key] = make("b", {}, "–");
      return make("div", { class: "mm-figure" }, this.figures[key], make("span", {}, label));
    });
    this.root.append(make("div", { class: "mm-head" }, this.state, this.name, this.bar, this.count), this.reason,
      make("div", { class: "mm-figures" }, ...figures), this.coded = make("p", { class: "mm-coded" }));
  }

  buildTools() {
    const button = (label, action, title, extra = {}) => make("button", { type: "button", title, onclick: action, ...extra }, label);
    this.toggle = button("Pause", () => this.command(this.frame.state === "paused" ? "resume" : "pause"), "Pause after the step under way, or go on");
    this.n = make("input", { name: "n", type: "number", min: 1, value: 1, "aria-label": "Steps to run" });
    const step = () => this.command("step", { n: Math.max(1, Math.round(Number(this.n.value) || 1)) });
    this.n.addEventListener("keydown", (event) => { event.stopPropagation(); if (event.key === "Enter") step(); });
    this.buttons = [this.toggle, button("Step", step, "Run that many steps, then pause"), this.n,
      button("Checkpoint", () => this.command("checkpoint"), "Save after the step under way"),
      button("Stop", (event) => this.surely(event.target, "Stop"), "End the run after the step under way", { class: "mm-stop" }),
      button("Abort", (event) => this.surely(event.target, "Abort"), "End the run at once, also one that is stuck; nothing is saved", { class: "mm-abort" })];
    this.buttons.forEach((node, index) => node.addEventListener("click", () => { this.store.used = { index, at: Date.now() }; }));
    this.said = make("span", { class: "mm-said", role: "status", "aria-live": "polite" });
    this.root.append(make("div", { class: "mm-tools", role: "toolbar", "aria-label": "Steer the run" }, ...this.buttons, this.said));
  }

  buildPanels() {
    const key = `mm-${Math.random().toString(36).slice(2)}`;
    const curve = (label, colour, scale, data, extra = {}) => ({ label, colour, scale, data, width: 1.5, ...extra });
    this.charts = [
      new Chart("Loss by step", [
        curve("loss", "--mm-pipeline", "loss", () => this.curves.get("loss"), { width: 1 }),
        curve("smoothed", "--mm-blue", "loss", () => this.curves.smooth("loss"), { width: 2 }),
        curve("held-out", "--mm-green", "loss", () => this.curves.get("held_out"), { points: true }),
      ], key),
      new Chart("Throughput by step", [
        curve("tokens/s", "--mm-blue", "tokens", () => this.curves.get("tokens_per_s")),
        curve("images/s", "--mm-orange", "images", () => this.curves.get("images_per_s"), { dash: [5, 3] }),
      ], key),
    ];
    this.keys = make("div", { class: "mm-keys" });
    this.rows = make("div", { class: "mm-phases", tabindex: 0, "aria-label": "Time per phase for each rank" });
    this.rates = make("div", { class: "mm-rates" });
    this.events = make("ol", { class: "mm-events", role: "log", "aria-label": "Last events", tabindex: 0 });
    this.root.append(make("div", { class: "mm-grid" }, ...this.charts.map((chart) => chart.node),
      make("section", {}, make("h4", {}, "Time per phase, mean of the last steps (ms a step)"), this.keys, this.rows),
      make("section", {}, make("h4", {}, "Base learning rates"), this.rates, make("h4", { style: "margin-top:10px" }, "Last events"), this.events)));
  }

  listen() {
    this.sizes = new ResizeObserver(() => { if (this.root.clientWidth) { if (!this.charts[0].plot) this.restyle(); this.charts.forEach((chart) => chart.resize()); } });
    this.sizes.observe(this.root);
    this.themes = new MutationObserver(() => this.restyle());
    this.themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
    this.timer = setInterval(() => this.store.send({ kind: "here" }), HERE_EVERY);
    this.store.views.add(this);
    if ("state" in this.frame) this.update(this.frame, true);
    else this.silence = setTimeout(() => this.say("no data from the kernel yet; it answers after the cell that it is running", false), BUSY_AFTER);
    requestAnimationFrame(() => this.refocus());
  }

  refocus() { // a pause replaces the cell's output: the button that was pressed must not lose the keyboard
    const used = this.store.used;
    if (used && Date.now() - used.at < REFOCUS && document.activeElement === document.body) this.buttons[used.index].focus({ preventScroll: true });
  }

  dispose() {
    this.store.views.delete(this);
    this.sizes.disconnect();
    this.themes.disconnect();
    clearInterval(this.timer);
    clearTimeout(this.silence);
    this.charts.forEach((chart) => chart.plot?.destroy());
  }

  update(changed, redraw) {
    if (this.silence) { clearTimeout(this.silence); this.silence = null; this.say("", false); }
    this.show(changed);
    if (redraw) this.redraw();
  }

  restyle() {
    const [r, g, b] = (getComputedStyle(this.root).backgroundColor.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
    this.root.classList.toggle("mm-dark", 0.3 * r + 0.59 * g + 0.11 * b < 128);
    const style = getComputedStyle(this.root);
    this.charts.forEach((chart) => chart.build(style));
  }

  redraw() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => { this.dirty = false; this.charts.forEach((chart) => chart.draw()); });
  }

  show(changed) {
    const frame = this.frame;
    this.state.dataset.state = frame.state;
    put(this.state, `${ICONS[frame.state] ?? ""} ${frame.state}`);
    put(this.name, frame.name ?? "");
    put(this.reason, frame.state === "failed" ? frame.reason : "");
    const doing = frame.doing === frame.state ? "" : `, ${frame.doing}`;
    put(this.count, `step ${number(frame.step, 9)} of ${number(frame.steps, 9)}${doing}`);
    this.fill.style.width = `${Math.min(100, (100 * frame.step) / Math.max(1, frame.steps))}%`;
    this.bar.setAttribute("aria-valuemax", frame.steps);
    this.bar.setAttribute("aria-valuenow", frame.step);
    for (const key of ["loss", "held_out", "tokens_per_s", "images_per_s", "seconds"]) put(this.figures[key], number(frame[key]));
    put(this.figures.data, frame.data ?? "–");
    put(this.figures.left, ENDED.includes(frame.state) ? "–" : duration(frame.left));
    put(this.coded, frame.compression ?? "");
    put(this.toggle, frame.state === "paused" ? "Resume" : "Pause");
    this.buttons.forEach((button) => { button.disabled = ENDED.includes(frame.state); });
    if ("phases" in changed) this.showPhases();
    if ("rates" in changed || "state" in changed) this.showRates();
    if ("events" in changed) this.showEvents();
    if ("heard" in changed || "waiting" in changed || "acked" in changed) this.showCommands();
  }

  showPhases() {
    const { names, roles, rows } = this.frame.phases ?? { names: [], roles: [], rows: [] };
    const totals = rows.map((row) => row.reduce((sum, value) => sum + value, 0));
    const most = Math.max(1e-9, ...totals);
    const colour = (name) => `var(--mm-${PHASE_COLOURS.includes(name) ? name : "other"})`;
    this.keys.replaceChildren(...names.map((name) => make("span", {}, make("i", { style: `background:${colour(name)}` }), name)));
    this.rows.replaceChildren(...rows.map((row, rank) => {
      const words = names.map((name, index) => `${name} ${row[index].toFixed(1)} ms`).filter((_, index) => row[index] > 0).join(", ");
      const parts = row.flatMap((value, index) => value <= 0 ? [] : make("i", { style: `width:${(100 * value) / most}%;background:${colour(names[index])}`, title: `${names[index]} ${value.toFixed(1)} ms` }));
      return make("div", { class: "mm-row" }, make("span", { title: `rank ${rank}: ${roles[rank] ?? ""}` }, `${rank}  ${roles[rank] ?? ""}`),
        make("div", { class: "mm-stack", role: "img", "aria-label": `rank ${rank}, ${roles[rank] ?? ""}: ${words}` }, ...parts),
        make("span", {}, totals[rank].toFixed(0)));
    }));
  }

  showRates() {
    const rates = this.frame.rates ?? {};
    const over = ENDED.includes(this.frame.state);
    if (this.rates.childElementCount !== 4 * Object.keys(rates).length) {
      this.inputs = {};
      this.rates.replaceChildren(...Object.keys(rates).flatMap((module) => this.rateRow(module)));
    }
    for (const [module, rate] of Object.entries(rates)) {
      const { input, button, now } = this.inputs[module];
      if (document.activeElement !== input && input.dataset.base !== String(rate.base)) { input.value = number(rate.base); input.dataset.base = rate.base; }
      input.disabled = button.disabled = over || rate.frozen;
      put(now, rate.frozen ? "frozen" : `now ${number(rate.now, 3)}`);
    }
  }

  rateRow(module) {
    const input = make("input", { type: "text", inputmode: "decimal", "aria-label": `Base learning rate of ${module}` });
    const send = () => {
      const value = Number(input.value);
      if (!input.value.trim() || !Number.isFinite(value) || value < 0) { this.say(`${input.value} is not a learning rate; give a number such as 1e-4`, true); return; }
      this.command("set", { key: `train.${module}.lr`, value });
    };
    input.addEventListener("keydown", (event) => { event.stopPropagation(); if (event.key === "Enter") send(); });
    const button = make("button", { type: "button", onclick: send, "aria-label": `Set the learning rate of ${module}` }, "Set");
    const now = make("span");
    this.inputs[module] = { input, button, now };
    return [make("label", {}, module), input, button, now];
  }

  showEvents() {
    const events = this.frame.events ?? [];
    this.events.replaceChildren(...events.map((event) => make("li", { class: event.bad ? "mm-bad" : null }, make("time", {}, event.time), make("span", {}, event.text))));
    this.events.scrollTop = this.events.scrollHeight;
  }

  /* ---- commands: sent -> passed on by the kernel -> applied at a step boundary ---- */
  command(verb, args = {}) {
    const token = Math.random().toString(36).slice(2);
    this.sent.set(token, setTimeout(() => this.say(`${verb}: the kernel is busy with a cell and will pass it on afterwards; from a terminal: mmlab ${verb} ${this.frame.name}`, false), BUSY_AFTER));
    this.say(`${verb}: sent`, false);
    this.store.send({ kind: "command", token, verb, args });
  }

  /* What ends the run takes a second click. */
  surely(button, label) {
    if (button.dataset.sure) { this.command(label.toLowerCase()); }
    else { button.dataset.sure = label; put(button, `Really ${label.toLowerCase()}`); }
    clearTimeout(this.sure);
    this.sure = setTimeout(() => {
      for (const each of this.buttons.filter((one) => one.dataset.sure)) { put(each, each.dataset.sure); delete each.dataset.sure; }
    }, 4000);
  }

  showCommands() {
    for (const heard of this.frame.heard ?? []) {
      if (!this.sent.has(heard.token)) continue;
      clearTimeout(this.sent.get(heard.token));
      this.sent.delete(heard.token);
      if (heard.refusal) { this.say(`${heard.text}: ${heard.refusal}`, true); return; }
    }
    const waiting = this.frame.waiting ?? [];
    if (waiting.length) this.say(`${waiting.join("; ")}: waits for the end of step ${this.frame.step + 1}`, false);
    else if (this.frame.acked) this.say(this.frame.acked.text, !this.frame.acked.ok);
  }

  say(text, bad) { put(this.said, text); this.said.classList.toggle("mm-bad", bad); }
}

export default () => {
  let store;
  return {
    initialize({ model }) {
      store = new Store(model);
      return () => store.dispose();
    },
    render({ el }) {
      const board = new Board(store, el);
      return () => board.dispose();
    },
  };
};
