/* The schedule as planned and as measured on one axis of time; plays for those who learn it. */
const PLAY_SECONDS = 12; // that a step takes at speed 1
const PLAY_STEP = 700; // ms between ops where motion is to be reduced
const MESSAGES = { tokens: "image tokens", token_grads: "gradients of image tokens", forward: "activations", backward: "gradients" };

PANELS.schedule = class extends Panel {
  static title = "Pipeline schedule";

  constructor(store, name) {
    super(store, name);
    this.zoom = 1;
    this.cursor = null; // seconds (or units) of the axis at which it stands; null: everything is shown
    this.chosen = null; // a traced step that was asked for; null: the newest
    this.at = null; // {lanes, row, index} pointed at
    this.summary = make("p", { class: "mm-lane-summary" });
    this.planned = new Lanes(this, t("As planned"));
    this.measured = new Lanes(this, t("As measured"));
    this.none = make("p", { class: "mm-soft" });
    this.detail = make("p", { class: "mm-lane-detail", role: "status", "aria-live": "polite" });
    this.keys = make("div", { class: "mm-keys" });
    this.moment = make("div", { class: "mm-lane-moment", hidden: true });
    this.table = make("details", {}, make("summary", {}, t("Bubbles as a table")), this.cells = make("div"));
    this.node.append(this.summary, this.choices(), this.player(), this.planned.node, this.measured.node, this.none, this.detail, this.moment, this.keys, this.table);
    this.hint();
  }

  choices() {
    this.steps = make("select", { onchange: () => this.choose(this.steps.value === "" ? null : Number(this.steps.value)) });
    this.costs = make("select", { onchange: () => this.redraw() }, make("option", { value: "estimated" }, t("estimated from operation counts")), make("option", { value: "replayed" }, t("measured, mean of each kind")));
    this.stepLabel = make("label", {}, t("Traced step"), this.steps);
    this.costLabel = make("label", {}, t("Durations of the plan"), this.costs);
    const zoom = (factor) => { this.zoom = Math.min(16, Math.max(1, this.zoom * factor)); this.redraw(); };
    return make("div", { class: "mm-lane-tools" }, this.stepLabel, this.costLabel,
      make("span", { role: "group", "aria-label": t("Zoom") }, button("−", () => zoom(0.5), { "aria-label": t("Zoom out"), class: "mm-small" }), button("+", () => zoom(2), { "aria-label": t("Zoom in"), class: "mm-small" })));
  }

  player() {
    this.toggle = button(t("Play"), () => this.play(this.timer === undefined), { title: t("Let the step run before your eyes") });
    this.speed = make("select", {}, ...[0.25, 0.5, 1, 2, 4].map((each) => make("option", { value: each, selected: each === 1 }, `${each} ×`)));
    this.slider = make("input", { type: "range", min: 0, max: 1000, value: 0, "aria-label": t("Time within the step"),
      oninput: () => { this.play(false); this.moveTo((this.slider.value / 1000) * this.span); }, onkeydown: (event) => event.stopPropagation() });
    this.clock = make("span", { class: "mm-lane-clock" });
    return make("div", { class: "mm-lane-tools", role: "toolbar", "aria-label": t("Play the step") }, this.toggle,
      button(t("Back"), () => this.step(-1), { title: t("To where the op before begins") }), button(t("Forward"), () => this.step(1), { title: t("To where the next op begins") }),
      this.all = button(t("Show all"), () => { this.play(false); this.moveTo(null); }, { disabled: true }), make("label", {}, t("Speed"), this.speed), this.slider, this.clock);
  }

  hint() { put(this.detail, t("Point at an op, or move with the arrow keys within a timeline, to read what it is.")); }

  update(changed) {
    if (this.cursor !== null && this.drawn) return; // what plays is not exchanged
    const { steps = [] } = this.frame;
    const wanted = ["", ...[...steps].reverse()].map(String);
    if ([...this.steps.options].map((option) => option.value).join() !== wanted.join()) {
      this.steps.replaceChildren(...wanted.map((step) => make("option", { value: step }, step || t("the newest"))));
      this.steps.value = this.chosen === null || !steps.includes(this.chosen) ? "" : String(this.chosen);
      if (this.steps.value === "") this.chosen = null;
    }
    this.redraw();
  }

  choose(step) {
    this.chosen = step;
    this.play(false);
    this.moveTo(null);
    if (step === null) { this.other = null; this.redraw(); return; }
    this.ask("step", { step }, () => put(this.detail, t("the kernel is busy with a cell and will answer after it"))).then((found) => { if (this.chosen === step) { this.other = found; this.redraw(); } },
      (refusal) => { put(this.detail, refusal.message); });
  }

  get step_() { return this.chosen === null ? this.frame.measured : this.other; }

  redraw() {
    const frame = this.frame, width = this.node.clientWidth;
    if (!frame.planned || !width) return;
    this.drawn = true;
    const found = this.step_ ?? null;
    const replayed = found && this.costs.value === "replayed";
    const plan = replayed ? found.replayed : frame.planned;
    const scale = found && !replayed ? found.scale : 1;
    this.span = Math.max(1e-9, plan.span * scale, found?.span ?? 0);
    this.time = found ? (value, short) => this.seconds(value, short) : (value, short) => `${Number(value.toPrecision(3))}${short ? "" : ` ${t("mean forwards of a stage")}`}`;
    const narrow = width < 700;
    const look = { rows: frame.rows, kinds: frame.kinds, span: this.span, time: this.time, width: width - (narrow ? 108 : 126) - 58 };
    this.node.classList.toggle("mm-narrow", narrow);
    this.planned.show(plan, { ...look, scale });
    this.measured.node.hidden = !found;
    if (found) this.measured.show(found, { ...look, scale: 1 });
    this.index = new Map(frame.rows.map(([rank], row) => [rank, row]));
    this.stepLabel.hidden = !frame.steps;
    this.costLabel.hidden = !found;
    this.tell(plan, scale, found);
    this.legend(plan, found);
    this.list(plan, found);
    this.moveTo(this.cursor);
  }

  seconds(value, short) {
    const milli = this.span < 10;
    const shown = milli ? value * 1000 : value;
    return `${Number(shown.toPrecision(short ? 4 : 3)).toLocaleString("en-US")} ${milli ? "ms" : "s"}`;
  }

  tell(plan, scale, found) {
    const { about, ideal, rows, ranks, every } = this.frame;
    const parts = [t("{0}: {1} with p = {2} ranks a pipeline, m = {3} microbatches", about.plan, about.schedule, about.p, about.m) + (about.v > 1 ? t(", v = {0} model chunks a rank", about.v) : "")];
    if (ideal) parts.push(t("bubble by formula, with equal stages: {0} = {1}", lanePercent(ideal.share), ideal.formula));
    if (rows.length < ranks) parts.push(t("{0} of {1} ranks are shown, the others do the same", rows.length, ranks));
    put(this.summary, `${parts.join("; ")}.`);
    this.summary.title = ideal ? t(ideal.given) : "";
    put(this.planned.title, t("As planned: bubble {0}, step {1}", lanePercent(plan.bubble), this.time(plan.span * scale)));
    if (found) put(this.measured.title, t("As measured at step {0}: bubble {1}, step {2}", found.step, lanePercent(found.bubble), this.time(found.span)));
    put(this.none, found || !this.frame.steps ? "" : every ? t("No step was traced yet; every {0} steps one is.", every) : t("No step is traced: tracking.trace_every is 0."));
  }

  legend(plan, found) {
    const used = new Set([...plan.ops, ...(found?.ops ?? [])].flatMap((line) => line.map(([kind]) => kind)));
    const entries = new Map();
    this.frame.kinds.forEach(([, name, colour, letter, shape], kind) => { if (used.has(kind) && !entries.has(name)) entries.set(name, { colour, letter: shape === "compute" && name !== "update" ? letter : "", shape }); });
    const items = [...entries].map(([name, { colour, letter, shape }]) => make("span", {}, make("i", { class: `mm-lane-key mm-${shape}`, style: shape === "wait" ? null : `background:${colour}` }), t(name), ...(letter ? [make("b", {}, ` ${letter}`)] : [])));
    const chunks = plan.ops.some((line) => line.some(([, , chunk]) => chunk > 0));
    this.keys.replaceChildren(...items, ...(chunks ? [make("span", {}, t("paler: a rank's further model chunks"))] : []), make("span", {}, t("numbers: microbatches")));
  }

  list(plan, found) {
    const shares = (planned, measured) => [planned, ...(found ? [measured] : [])].map(lanePercent);
    const rows = this.frame.rows.map(([rank, label], at) => [String(rank), label, ...shares(plan.idle[at], found?.idle[at])]);
    rows.push([t("stages"), t("bubble"), ...shares(plan.bubble, found?.bubble)]);
    this.cells.replaceChildren(table([t("rank"), t("role"), t("not computing, as planned"), ...(found ? [t("as measured")] : [])], rows, { named: true }), ...(this.frame.ideal ? [make("p", {}, `${lanePercent(this.frame.ideal.share)} = ${this.frame.ideal.formula}: ${t(this.frame.ideal.given)}`)] : []));
  }

  /* ---- what is pointed at ---- */
  point(lanes, at) {
    const before = this.at?.lanes;
    this.at = at && { lanes, ...at };
    if (before && before !== lanes) before.mark();
    lanes.mark();
    if (at) put(this.detail, this.words(lanes, at)); else this.hint();
  }

  marked(lanes) { return this.at?.lanes === lanes ? this.at : null; }

  words(lanes, { row, index }) {
    const op = lanes.data.ops[row][index], [kind, microbatch, chunk, start, end] = op, [rank, label] = this.frame.rows[row], scale = lanes.look.scale;
    const parts = [t(this.frame.kinds[kind][0].replaceAll("_", " ")), ...(microbatch >= 0 ? [t("microbatch {0}", microbatch)] : []), ...(lanes.data.ops.some((line) => line.some((each) => each[2])) ? [t("chunk {0}", chunk)] : [])];
    const other = lanes === this.planned ? this.measured : this.planned;
    const twin = this.step_ ? other.data?.ops[row].find((each) => each[0] === kind && each[1] === microbatch && each[2] === chunk) : null;
    const beside = twin ? `; ${lanes === this.planned ? t("measured {0}", this.time((twin[4] - twin[3]) * other.look.scale)) : t("planned {0}", this.time((twin[4] - twin[3]) * other.look.scale))}` : "";
    const waits = this.waits(row, op);
    return `${t("rank {0}", rank)} (${label}): ${parts.join(", ")}: ${this.time((end - start) * scale)}, ${t("from {0} to {1}", this.time(start * scale), this.time(end * scale))}${beside}${waits ? `; ${waits}` : ""}`;
  }

  /* The planned op of that name in a lane: its index, which tells what it waits for. */
  after(row, op) {
    const index = this.frame.planned.ops[row].findIndex((each) => each[0] === op[0] && each[1] === op[1] && each[2] === op[2]);
    return index < 0 ? [] : this.frame.after[row][index];
  }

  waits(row, op) {
    const ranks = [...new Set(this.after(row, op).map(([rank]) => rank))];
    if (!ranks.length) return "";
    const kind = this.frame.kinds[op[0]][0], named = ranks.length > 6 ? `${ranks.slice(0, 5).join(", ")}, …` : ranks.join(", ");
    const who = ranks.length === 1 ? t("rank {0}", named) : t("ranks {0}", named);
    return kind.startsWith("recv") ? t("waits for {0}: {1} of microbatch {2}", who, t(MESSAGES[kind.slice(5)]), op[1]) : t("together with {0}", who);
  }

  sources(lanes, row, op) {
    return this.after(row, op).flatMap(([rank, index]) => {
      const from = this.index.get(rank);
      const [kind, microbatch, chunk] = this.frame.planned.ops[from]?.[index] ?? [];
      const found = lanes.data.ops[from]?.find((each) => each[0] === kind && each[1] === microbatch && each[2] === chunk);
      return found ? [{ row: from, op: found }] : [];
    });
  }

  scrolled(lanes) { const other = lanes === this.planned ? this.measured : this.planned; if (other.plot.scrollLeft !== lanes.plot.scrollLeft) other.plot.scrollLeft = lanes.plot.scrollLeft; }

  typed(event) { // keys of the player within a timeline
    if (event.key !== " ") return false;
    event.preventDefault();
    event.stopPropagation();
    this.play(this.timer === undefined);
    return true;
  }

  /* ---- playing ---- */
  moveTo(time) {
    this.cursor = time;
    this.planned.moveTo(time);
    if (!this.measured.node.hidden) this.measured.moveTo(time);
    this.all.disabled = time === null;
    this.moment.hidden = time === null;
    this.slider.value = time === null ? 0 : (1000 * time) / this.span;
    if (this.time) { put(this.clock, time === null ? "" : this.time(time, true)); this.slider.setAttribute("aria-valuetext", this.time(time ?? 0)); }
    if (time === null) return;
    const shown = [this.planned, ...(this.measured.node.hidden ? [] : [this.measured])];
    shown.forEach((lanes) => lanes.reveal(lanes.x(time / lanes.look.scale)));
    this.now(shown, time);
  }

  /* What each rank does at a time, in words. */
  now(shown, time) {
    const { rows } = this.frame;
    if (this.moment.dataset.columns !== `${rows.length},${shown.length}`) {
      this.moment.dataset.columns = `${rows.length},${shown.length}`;
      this.words_ = rows.map(() => shown.map(() => make("td")));
      this.moment.replaceChildren(table([t("rank"), t("as planned"), ...(shown.length > 1 ? [t("as measured")] : [])], rows.map(([rank, label], row) => [`${rank} ${label}`, ...this.words_[row]]),
        { caption: t("At this moment"), named: true }));
    }
    rows.forEach((_, row) => shown.forEach((lanes, column) => {
      const [text, waits] = this.does(lanes, row, time / lanes.look.scale);
      put(this.words_[row][column], text);
      this.words_[row][column].classList.toggle("mm-soft", waits);
    }));
  }

  does(lanes, row, time) {
    const line = lanes.data.ops[row];
    const running = line.filter((op) => op[3] <= time && time < op[4]), op = running.find((each) => lanes.look.kinds[each[0]][4] === "compute") ?? running[0];
    const name = ([kind, microbatch]) => t(lanes.look.kinds[kind][0].replaceAll("_", " ")) + (microbatch >= 0 ? ` ${microbatch}` : "");
    if (op && lanes.look.kinds[op[0]][4] === "wait") return [this.waits(row, op), true];
    if (op) return [name(op), false];
    const next = line.find((each) => each[3] > time);
    if (!next) return [t("done"), true];
    const who = this.waits(row, next);
    return [t("idle until {0}", name(next)) + (who ? ` (${who})` : ""), true];
  }

  starts() { // times of the axis at which ops begin
    const shown = [this.planned, ...(this.measured.node.hidden ? [] : [this.measured])];
    const all = shown.flatMap((lanes) => lanes.data.ops.flatMap((line) => line.filter((op) => op[4] > op[3]).map((op) => op[3] * lanes.look.scale)));
    return [...new Set(all.map((value) => Number(value.toPrecision(9))))].sort((a, b) => a - b);
  }

  step(by) {
    if (!this.drawn) return;
    this.play(false);
    const times = this.starts(), now = this.cursor ?? 0, least = this.span * 1e-3;
    this.moveTo((by > 0 ? times.find((each) => each > now + least) : times.findLast((each) => each < now - least)) ?? (by > 0 ? this.span : 0));
  }

  play(on) {
    if (!this.drawn) return;
    cancelAnimationFrame(this.timer);
    clearTimeout(this.timer);
    this.timer = undefined;
    put(this.toggle, on ? t("Halt") : t("Play"));
    if (!on) return;
    if (this.cursor === null || this.cursor >= this.span) this.moveTo(0);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.jump(); else this.run(performance.now());
  }

  advance(time) {
    if (!this.node.isConnected || time >= this.span) { this.play(false); this.moveTo(this.span); return false; }
    this.moveTo(time);
    return true;
  }

  run(before) {
    this.timer = requestAnimationFrame((now) => { if (this.advance(this.cursor + (this.span * Number(this.speed.value) * (now - before)) / 1000 / PLAY_SECONDS)) this.run(now); });
  }

  jump() {
    this.timer = setTimeout(() => { const next = this.starts().find((each) => each > this.cursor + this.span * 1e-3) ?? this.span; if (this.advance(next)) this.jump(); }, PLAY_STEP / Number(this.speed.value));
  }

  restyle() { if (!this.drawn) this.update({}); }

  resize() { if (this.node.clientWidth !== this.wide) { this.wide = this.node.clientWidth; this.redraw(); } }

  dispose() { cancelAnimationFrame(this.timer); clearTimeout(this.timer); }
};
