/* Curves of a run, and of others beside it. */
const CHARTS = { // as in mmlab/ui/panels/charts.py: title, curves (a name that ends with a dot: all that begin so), button
  loss: ["Loss", ["loss", "held_out"], "Loss"],
  throughput: ["Throughput", ["tokens_per_s", "images_per_s"], "Throughput"],
  norms: ["Gradient norms", ["grad_norm_total", "grad_norm."], "Gradient norms"],
  rates: ["Learning rates", ["lr."], "Learning rates"],
  wait: ["Data wait (s)", ["data_wait"], "Data wait"],
  phases: ["Time per phase (ms a step, mean of ranks)", ["phase."], "Phases"],
};
const CURVE_COLOURS = { loss: "--mm-blue", held_out: "--mm-green", tokens_per_s: "--mm-blue", images_per_s: "--mm-orange", grad_norm_total: "--mm-grey",
  data_wait: "--mm-blue", vision: "--mm-violet", projector: "--mm-orange", language: "--mm-blue" };
const CURVE_WORDS = { held_out: "held-out", tokens_per_s: "tokens/s", images_per_s: "images/s", grad_norm_total: "all modules", data_wait: "data wait" };
const RUN_COLOURS = ["--mm-orange", "--mm-violet", "--mm-green", "--mm-grey"];
const CLOSER_AFTER = 150; // ms after the last zoom until the kernel is asked for more detail

PANELS.charts = class extends Panel {
  static title = "Charts";
  static curved = true;

  constructor(store, name) {
    super(store, name);
    this.options = { shown: ["loss", "throughput"], smoothing: 5, log: false };
    this.range = null; // [low, high] while zoomed
    this.closer = null; // {curve: [x, y]}: what the kernel read of that range
    this.charts = {};
    this.key = `mm-${Math.random().toString(36).slice(2)}`;
    this.said = make("p", { class: "mm-unseen", role: "status", "aria-live": "polite" });
    this.grid = make("div", { class: "mm-grid" });
    this.table = make("div", { class: "mm-figures-table", tabindex: 0, role: "group", "aria-label": t("Values of the charts"), hidden: true });
    this.letters = make("p", { class: "mm-letters" });
    this.node.append(this.tools(), this.grid, this.letters, this.table, this.said);
  }

  get marks() { return this.frame.marks ?? []; }

  get log() { return this.options.log; }

  get others() { return this.frame.others ?? []; }

  tools() {
    this.chips = Object.fromEntries(Object.entries(CHARTS).map(([key, [, , label]]) => [key, button(t(label), () => this.toggle(key))]));
    this.slider = field({ type: "range", min: 0, max: 20, step: 1, "aria-label": t("Smoothing, percent of the steps in sight") });
    this.slider.addEventListener("input", () => { this.options.smoothing = Number(this.slider.value); this.show(); });
    this.slider.addEventListener("change", () => this.choose({ smoothing: Number(this.slider.value) }));
    this.percent = make("span", { class: "mm-percent" });
    this.logs = button(t("Log scale"), () => this.choose({ log: !this.options.log }));
    this.all = button(t("Whole run"), () => this.whole(), { title: t("Drag over a chart to zoom; double click, or this, shows all") });
    this.tabled = button(t("Table"), () => { this.table.hidden = !this.table.hidden; this.tabled.setAttribute("aria-pressed", !this.table.hidden); this.fillTable(); }, { "aria-pressed": "false" });
    this.compare = chooser({ "aria-label": t("Draw another run beside this one"), onchange: () => this.beside(this.compare.value), onfocus: () => this.list() });
    this.beside_ = make("span", { class: "mm-beside" });
    return make("div", { class: "mm-chart-tools", role: "group", "aria-label": t("Charts in sight") },
      make("span", { class: "mm-chips" }, ...Object.values(this.chips)),
      make("label", { class: "mm-smooth" }, t("Smoothing"), this.slider, this.percent), this.logs, this.all, this.tabled, this.compare, this.beside_);
  }

  tell(text) { put(this.said, text); }

  toggle(key) {
    const shown = this.options.shown.includes(key) ? this.options.shown.filter((each) => each !== key) : [...this.options.shown, key];
    this.choose({ shown: Object.keys(CHARTS).filter((each) => shown.includes(each)) });
  }

  choose(some) { // at once here, also while the kernel runs a cell; then there
    Object.assign(this.options, some);
    this.show();
    this.ask("set", some).catch((refusal) => this.tell(refusal.message));
  }

  list() {
    this.ask("runs").then((runs) => {
      const drawn = this.others.map(([, name]) => name);
      const rest = runs.filter((name) => !drawn.includes(name));
      this.compare.replaceChildren(make("option", { value: "" }, t("Compare with …")), ...rest.map((name) => make("option", { value: name }, name)));
    }).catch((refusal) => this.tell(refusal.message));
  }

  beside(name) { if (name) this.overlay([...this.others.map(([, other]) => other), name]); }

  overlay(runs) { this.ask("overlay", { runs }, () => this.tell(t("the kernel is busy with a cell"))).then(() => this.list()).catch((refusal) => this.trouble(refusal.message)); }

  /* ---- zoom ---- */
  zoom(low, high) {
    const most = Math.max(1, ...Object.values(this.curves.all).map((curve) => curve.x.at(-1) ?? 0));
    [low, high] = [Math.max(0, Math.round(low)), Math.min(most, Math.round(high))];
    if (high - low < 1) return;
    if (low <= 1 && high >= most) { this.whole(); return; }
    if (this.range && this.range[0] === low && this.range[1] === high) return;
    this.range = [low, high];
    this.closer = null;
    this.tell(t("steps {0} to {1}", number(low, 9), number(high, 9)));
    this.show();
    this.askCloser();
  }

  whole() {
    if (!this.range) return;
    this.range = this.closer = null;
    this.tell(t("all steps"));
    this.show();
  }

  askCloser() {
    clearTimeout(this.asking);
    this.asking = setTimeout(() => {
      const range = this.range;
      if (!range) return;
      this.ask("range", { low: range[0], high: range[1] }).then(({ curves, buffers }) => {
        if (range !== this.range) return;
        const found = new Curves();
        found.take(curves, buffers, true);
        this.closer = found;
        this.show();
      }).catch((refusal) => this.tell(refusal.message));
    }, CLOSER_AFTER);
  }

  points(name) {
    const [x, y] = this.curves.get(name);
    if (!this.range) return [x, y];
    const within = (xs, ys, low, high) => {
      let a = 0, b = xs.length;
      while (a < xs.length && xs[a] < low) a++;
      while (b > a && xs[b - 1] > high) b--;
      return [xs.slice(a, b), ys.slice(a, b)];
    };
    const [fineX, fineY] = this.closer?.get(name) ?? [[], []];
    if (!fineX.length) return within(x, y, ...this.range);
    const [laterX, laterY] = within(x, y, fineX.at(-1) + 1e-9, this.range[1]);
    return [[...fineX, ...laterX], [...fineY, ...laterY]];
  }

  /* ---- which lines a chart has ---- */
  lines(key) {
    const [, stems] = CHARTS[key];
    const { smoothing } = this.options;
    const known = Object.keys(this.curves.all);
    const lines = [];
    [["", ""], ...this.others].forEach(([suffix, run], nth) => {
      const names = stems.flatMap((stem) => known.filter((name) => (stem.endsWith(".") ? name.startsWith(stem) : name === stem + suffix) && name.endsWith(suffix) && (suffix || !name.includes("@"))));
      for (const name of names) this.line(lines, { key, name, bare: suffix ? name.slice(0, -suffix.length) : name, run, nth, smoothing: key === "rates" ? 0 : smoothing });
    });
    return lines;
  }

  line(lines, { key, name, bare, run, nth, smoothing }) {
    const last = bare.split(".").at(-1);
    const phase = bare.startsWith("phase.");
    const single = key === "loss" || key === "wait";
    const colour = nth && single ? RUN_COLOURS[nth - 1] : phase ? `--mm-${PHASE_COLOURS.includes(last) ? last : "other"}` : CURVE_COLOURS[last] ?? "--mm-grey";
    const label = t(CURVE_WORDS[last] ?? last) + (nth ? ` · ${run.length > 24 ? `…${run.slice(-23)}` : run}` : "");
    const scale = key === "throughput" ? bare : key === "loss" || key === "rates" ? "loss" : "y";
    const raw = () => this.points(name);
    if (bare === "held_out") { if (!nth) lines.push({ label, colour, scale, dots: true, told: true, listed: true, data: raw }); return; }
    const drawn = { label, colour, scale, dash: DASHES[nth] ?? (bare === "images_per_s" ? [5, 3] : undefined), told: true, listed: !nth || single, width: nth ? 1.5 : 2, raw };
    if (!smoothing) { lines.push({ ...drawn, width: 1.5, data: raw }); return; }
    const smoothed = () => { const [x, y] = raw(); return [x, smooth(y, smoothing)]; };
    const from = lines.length;
    if (!nth && !phase) lines.push({ colour, scale, alpha: 0.35, width: 1, data: raw });
    lines.push({ ...drawn, from, data: smoothed }); // the legend tells what is not smoothed, where that is drawn
  }

  /* ---- showing ---- */
  update(changed, curves) {
    for (const key of ["shown", "smoothing", "log"]) if (key in changed) this.options[key] = changed[key];
    if (curves && this.range && "shown" in changed) this.askCloser();
    if ("others" in changed) this.fillOthers();
    if (!this.compare.childElementCount) { this.compare.append(make("option", { value: "" }, t("Compare with …"))); this.list(); }
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => { this.dirty = false; this.show(); });
  }

  fillOthers() {
    this.beside_.replaceChildren(...this.others.map(([, name], index) => make("span", { class: "mm-other" },
      make("i", { class: "mm-swatch mm-dashed", style: `border-color:var(${RUN_COLOURS[index]})` }), name,
      button("×", () => this.overlay(this.others.map(([, other]) => other).filter((other) => other !== name)), { "aria-label": t("Draw {0} no longer", name) }))));
  }

  show() {
    if (!this.style) return;
    const { shown, smoothing, log } = this.options;
    for (const [key, chip] of Object.entries(this.chips)) chip.setAttribute("aria-pressed", shown.includes(key));
    this.logs.setAttribute("aria-pressed", log);
    this.all.disabled = !this.range;
    if (document.activeElement !== this.slider) this.slider.value = smoothing;
    put(this.percent, `${smoothing} %`);
    for (const key of Object.keys(this.charts)) if (!shown.includes(key)) { this.charts[key].dispose(); this.charts[key].node.remove(); delete this.charts[key]; }
    for (const key of shown) this.charts[key] ??= new Chart(t(CHARTS[key][0]), this, this.key);
    const nodes = shown.map((key) => this.charts[key].node);
    if (nodes.some((node, index) => this.grid.children[index] !== node)) this.grid.replaceChildren(...nodes);
    for (const key of shown) { this.charts[key].setLines(this.lines(key), this.style); this.charts[key].draw(); }
    const there = new Set(this.marks.map(([, kind]) => kind));
    const letters = Object.entries(MARKS).filter(([kind]) => there.has(kind)).map(([, [letter, colour, words]]) => [letter, colour, t(words)]);
    if (this.lettered !== letters.join()) {
      this.lettered = letters.join();
      this.letters.replaceChildren(...letters.map(([letter, colour, words]) => make("span", {}, make("b", { style: `color:var(${colour})` }, letter), ` ${words}`)));
    }
    this.fillTable();
  }

  fillTable() {
    if (this.table.hidden) return;
    this.stale = Boolean(this.filling);
    if (this.stale) return;
    this.filling = setTimeout(() => { this.filling = null; if (this.stale) this.fillTable(); }, 1_000); // at most once a second
    const figures = Object.values(this.charts).flatMap((chart) => chart.figures().map(([label, ...values]) => [`${chart.title}: ${label}`, ...values.map((value) => number(value))]));
    const marks = this.marks.slice(-50).reverse().map(([step, kind, text]) => [number(step, 9), t(MARKS[kind][2]), text]);
    this.table.replaceChildren(
      table([t("curve"), t("last"), t("lowest"), t("highest")], figures, { named: true }),
      table([t("step"), t("mark"), t("what happened")], marks, { named: true }));
  }

  restyle(style) {
    this.style = style;
    for (const chart of Object.values(this.charts)) { chart.signature = null; }
    this.show();
  }

  resize() { Object.values(this.charts).forEach((chart) => chart.resize()); }

  dispose() {
    clearTimeout(this.asking);
    clearTimeout(this.filling);
    Object.values(this.charts).forEach((chart) => chart.dispose());
  }
};
