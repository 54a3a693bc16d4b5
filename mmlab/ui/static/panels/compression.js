/* Compression of gradients: chosen per group, and what it saves, costs and loses beside the loss. */
const OPTION_NAMES = { ratio: "ratio", rank: "rank", warm_start: "warm start", min_compression_rate: "min rate", error_feedback: "error feedback", residual: "residual", warmup_steps: "warm-up steps" };

/* The form and the figures of one group. */
class CompressionGroup {
  constructor(panel, group) {
    this.panel = panel;
    this.group = group;
    this.helpId = `mm-${Math.random().toString(36).slice(2)}`;
    this.choice = chooser({ "aria-label": t("Compressor of {0}", t(group)), "aria-describedby": this.helpId, onchange: () => { this.touched = true; this.showOptions(); }, onfocus: () => this.help("compressor") });
    this.options = make("div", { class: "mm-options" });
    this.helped = make("p", { class: "mm-helped", id: this.helpId, tabindex: 0 });
    this.apply = button(t("Apply"), () => this.send(), { "aria-label": t("Apply to the gradients of {0}", t(group)), title: t("Change it after the step under way") });
    this.control = new Control(`compress ${group}`, t("Compression of {0}", t(group)), [make("label", {}, t("compressor")), this.choice, this.apply]);
    this.figures = make("dl", { class: "mm-coded-figures" });
    this.node = make("section", { class: "mm-group", "aria-label": t("Gradients of {0}", t(group)) }, make("h4", {}, t("Gradients of {0}", t(group))),
      make("div", { class: "mm-compress" }, this.control.node, make("div", { class: "mm-ack-lines" }, this.control.line)), this.options, this.helped, this.figures);
    this.inputs = {};
    this.touched = false;
  }

  help(name) { // choices stand in the menu already
    const known = this.panel.frame.fields?.[name];
    put(this.helped, known ? `${t(OPTION_NAMES[name] ?? name)}: ${known.help}${known.kind === "choice" ? "" : ` ${t("({0})", known.expects)}`}` : "");
  }

  update(changed) {
    const { compressors = [], chosen = {}, state } = this.panel.frame;
    if (this.choice.childElementCount !== compressors.length) this.choice.replaceChildren(...compressors.map(([name]) => make("option", { value: name }, name)));
    if ("chosen" in changed && !this.touched) { this.choice.value = chosen[this.group]?.compressor ?? "none"; this.showOptions(); }
    const over = ENDED.includes(state);
    for (const node of this.node.querySelectorAll("button, input, select")) node.disabled = over;
    if ("controls" in changed || "step" in changed || "state" in changed) this.control.show(this.panel.frame.controls?.[this.control.key], this.panel.frame);
    if ("rows" in changed) this.showFigures();
  }

  names() { const { compressors = [], shared = [] } = this.panel.frame; return [...(compressors.find(([name]) => name === this.choice.value)?.[1] ?? []), ...shared]; }

  showOptions() {
    const { fields = {}, chosen = {} } = this.panel.frame;
    this.inputs = {};
    this.options.replaceChildren(...this.names().map((name) => {
      const input = this.input(fields[name], chosen[this.group]?.[name]);
      input.addEventListener("focus", () => this.help(name));
      input.addEventListener("input", () => { this.touched = true; });
      input.setAttribute("aria-describedby", this.helpId);
      this.inputs[name] = input;
      return make("label", { title: `${fields[name].help} (${fields[name].expects})` }, make("span", {}, t(OPTION_NAMES[name] ?? name)), input);
    }));
    this.help("compressor");
  }

  input(known, value) {
    if (known.kind === "switch") return field({ type: "checkbox", checked: Boolean(value) });
    if (known.kind === "number") return field({ type: "text", inputmode: "decimal", value }, () => this.send());
    const node = chooser({}, ...known.choices.map((choice) => make("option", { value: choice }, choice)));
    node.value = value;
    return node;
  }

  send() {
    const options = Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.type === "checkbox" ? input.checked : input.value.trim()]));
    this.control.sent();
    this.panel.ask("compress", { group: this.group, compressor: this.choice.value, options }, () => this.control.busy()).then(
      (value) => { this.touched = false; this.control.took(value.id); this.control.show(); },
      (refusal) => this.control.refused(refusal.message));
  }

  showFigures() {
    const { rows = [], projector } = this.panel.frame;
    const mine = rows.filter((row) => row.module === this.group || (row.module === "projector" && projector === this.group));
    const parts = mine.flatMap((row) => this.figure(row, mine.length > 1));
    this.figures.replaceChildren(...(parts.length ? parts : [make("dt", {}, t("nothing reduced")), make("dd", {}, t("one rank only, no step yet, or summed by sharding"))]));
  }

  figure(row, several) {
    const rows = [];
    const add = (name, ...value) => rows.push(make("dt", {}, name), make("dd", {}, ...value));
    if (several) add(t("module"), t(row.module));
    add(t("coded with"), [row.compressor, ...Object.entries(row.options).map(([key, value]) => `${key}=${value}`)].join(" "));
    if (row.bytes === null) add(t("bytes a step"), t("with sharding"));
    else {
      const share = row.dense ? Math.min(1, row.bytes / row.dense) : 1;
      add(t("bytes a step"), t("{0} sent of {1} dense", bytes(row.bytes), bytes(row.dense)) + (row.ratio > 1.005 ? t(", {0} times fewer", number(row.ratio, 3)) : ""),
        make("div", { class: "mm-share", role: "img", "aria-label": t("{0} % of the bytes without compression", number(100 * share, 3)) }, make("i", { style: `width:${100 * share}%` })));
    }
    const ms = (seconds) => (seconds === null ? "–" : `${number(1000 * seconds, 3)} ms`);
    add(t("time a step"), t("{0} under way, {1} waited for, {2} coding", ms(row.seconds), ms(row.exposed), ms(row.coding)));
    add(t("left out"), row.residual === null ? t("nothing") : `${number(row.residual, 3)}${row.residual_share === null ? "" : t(", {0} of the gradient's norm", number(row.residual_share, 3))}`);
    add(t("relative error"), row.error === null ? t("not measured with {0}", row.compressor) : t("{0}, measured in step {1}", number(row.error, 3), row.error_step));
    return rows;
  }
}

PANELS.compression = class extends Panel {
  static title = "Compression";

  constructor(store, name) {
    super(store, name);
    this.groups = ["vision", "language"].map((group) => new CompressionGroup(this, group));
    this.measure = new Control("measure", t("Measure the error"), [button(t("Measure"), () => this.send(), { title: t("Reduce the next step also without compression, to see how far off the compressed gradients are") })]);
    this.chart = make("div", { class: "mm-small-chart" });
    this.keys = make("div", { class: "mm-keys" });
    this.node.append(make("div", { class: "mm-grid" }, ...this.groups.map((group) => group.node)),
      make("div", { class: "mm-measure" }, make("div", {}, this.measure.node, make("div", { class: "mm-ack-lines" }, this.measure.line)), make("div", {}, make("h4", {}, t("Loss, measured errors and changes of compressor by step")), this.chart, this.keys)));
  }

  send() {
    this.measure.sent();
    this.ask("measure", {}, () => this.measure.busy()).then((value) => { this.measure.took(value.id); this.measure.show(); }, (refusal) => this.measure.refused(refusal.message));
  }

  update(changed) {
    for (const group of this.groups) group.update(changed);
    for (const node of this.measure.node.querySelectorAll("button")) node.disabled = ENDED.includes(this.frame.state);
    this.measure.show(this.frame.controls?.measure, this.frame);
    if ("loss" in changed || "errors" in changed || "changes" in changed) this.draw();
  }

  resize() { if (this.drawnWidth !== this.chart.clientWidth) this.draw(); }

  restyle() { this.draw(); }

  draw() {
    const { loss = [], errors = {}, changes = {} } = this.frame;
    const width = Math.max(200, this.chart.clientWidth), height = 110, left = 44, right = 44, top = 8, bottom = 18;
    this.drawnWidth = this.chart.clientWidth;
    const steps = [...loss.map(([x]) => x), ...Object.values(errors).flat().map(([x]) => x)];
    if (!loss.length) { this.chart.replaceChildren(make("p", { class: "mm-notice" }, t("no loss yet"))); return; }
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    const [low, high] = [Math.min(...loss.map(([, y]) => y)), Math.max(...loss.map(([, y]) => y))];
    const worst = Math.max(0, ...Object.values(errors).flat().map(([, y]) => y)) || 1;
    const x = (step) => left + ((width - left - right) * (step - first)) / Math.max(1, last - first);
    const y = (value, from, to) => top + (height - top - bottom) * (1 - (value - from) / (to - from || 1));
    const label = (text, at, to, anchor) => drawn("text", { x: at, y: to, "text-anchor": anchor }, text);
    const marks = Object.entries(changes).flatMap(([module, list]) => list.filter(([step]) => step >= first).map(([step, name]) =>
      drawn("g", { class: "mm-change" }, drawn("line", { x1: x(step), x2: x(step), y1: top, y2: height - bottom }), drawn("title", {}, t("step {0}: {1} of {2}", step, name, t(module))))));
    const dots = Object.entries(errors).flatMap(([module, list]) => list.map(([step, value]) => {
      const [cx, cy] = [x(step), y(value, 0, worst)];
      const shape = module === "language" ? drawn("rect", { x: cx - 4, y: cy - 4, width: 8, height: 8 }) : drawn("circle", { cx, cy, r: 4 });
      shape.append(drawn("title", {}, t("step {0}: error {1} of {2}", step, number(value, 3), t(module))));
      return shape;
    }));
    const measured = Object.entries(errors).map(([module, list]) => `${t(module)} ${number(list.at(-1)[1], 3)}`).join(", ") || t("none measured");
    this.chart.replaceChildren(drawn("svg", { width, height, role: "img", "aria-label": t("Loss from {0} to {1}; last relative errors: {2}", number(loss[0][1], 3), number(loss.at(-1)[1], 3), measured) },
      ...marks, drawn("polyline", { class: "mm-loss", points: loss.map(([step, value]) => `${x(step).toFixed(1)},${y(value, low, high).toFixed(1)}`).join(" ") }), ...dots,
      label(number(high, 3), left - 5, top + 9, "end"), label(number(low, 3), left - 5, height - bottom, "end"),
      ...(dots.length ? [label(number(worst, 3), width - right + 5, top + 9, "start"), label("0", width - right + 5, height - bottom, "start")] : []),
      label(number(first, 9), left, height - 3, "start"), label(number(last, 9), width - right, height - 3, "end")));
    this.keys.replaceChildren(make("span", {}, make("i", { style: "background:var(--mm-blue)" }), t("loss (left)")),
      ...(errors.vision || errors.projector ? [make("span", {}, make("i", { style: "background:var(--mm-orange);border-radius:50%" }), t("error, vision and projector (right)"))] : []),
      ...(errors.language ? [make("span", {}, make("i", { style: "background:var(--mm-orange);border-radius:0" }), t("error, language (right)"))] : []),
      ...(marks.length ? [make("span", {}, make("i", { style: "background:none;border-left:2px dashed var(--mm-violet);border-radius:0;width:4px" }), t("another compressor"))] : []));
  }
};
