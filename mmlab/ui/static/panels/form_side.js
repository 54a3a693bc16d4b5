/* Beside the fields: problems with fixes, memory, the same plan in words, pictures. */
const FORM_DRAWN = 400; // ms without a change after which the pictures are drawn anew

class FormSide {
  constructor(form) {
    this.form = form;
    this.problems = make("div", { class: "mm-form-card mm-form-problems", tabindex: "-1", role: "group", "aria-label": t("Problems") });
    this.memory = make("div", { class: "mm-form-card" });
    this.pictures = { layout: this.picture("layout", t("Layout")), schedule: this.picture("schedule", t("Schedule")) };
    this.node = make("div", { class: "mm-form-side" }, this.problems, this.words(), this.memory, this.pictures.layout.node, this.pictures.schedule.node);
  }

  /* ---- problems ---- */
  showProblems() {
    const first = Object.keys(this.form.frame.mistyped)[0];
    if (first) { this.form.fields.go(first); return; }
    this.problems.scrollIntoView({ block: "nearest" });
    this.problems.focus({ preventScroll: true });
  }

  listProblems() {
    const { problems, mistyped } = this.form.frame;
    const typed = Object.entries(mistyped).map(([key, { reason }]) => make("li", {}, this.link(key), ` ${reason}.`));
    const items = problems.map((one) => make("li", {}, this.link(one.field), ` ${one.message} `, make("em", {}, `${t("Fix: {0}.", one.fix)} `), ...this.fixes(one)));
    const fixable = problems.some((one) => one.overrides.length);
    const all = button(t("Fix all…"), () => this.preview(preview), { title: t("Shows first what would change") });
    const preview = make("div", { class: "mm-form-preview" });
    const count = typed.length + items.length;
    const had = this.problems.contains(document.activeElement);
    this.problems.replaceChildren(make("h4", {}, t("Problems")), ...(count ? [make("ul", {}, ...typed, ...items)] : [make("p", { class: "mm-form-soft" }, t("None: this plan can run."))]),
      ...(fixable ? [all, preview] : []));
    if (had) this.problems.focus({ preventScroll: true }); // the button that was pressed is gone
  }

  link(key) { // a problem may be one of a whole section
    if (!this.form.fields.rows.has(key)) return make("b", {}, key);
    return this.linked(key);
  }

  linked(key) { return make("button", { type: "button", class: "mm-form-link", onclick: () => this.form.fields.go(key), title: t("Go to this field") }, key); }

  /* The buttons that fix a problem: at once where one field changes, else after showing what does (`row`: among the problems,
     a row has no room for it). */
  fixes(problem, row = false) {
    if (!problem.overrides.length) return [];
    const apply = () => { this.form.fields.leave(); this.form.request("fix", { overrides: problem.overrides }); };
    if (problem.changes.length === 1) {
      const [[key, before, after]] = problem.changes;
      return [button(`${key} ${before || t("empty")} → ${after || t("empty")}`, apply, { class: "mm-form-fix", title: problem.fix, "aria-label": t("Fix: {0} from {1} to {2}", key, before || t("empty"), after || t("empty")) })];
    }
    const shown = make("div", { class: "mm-form-preview" });
    const open = () => (row ? this.showProblems() : this.ask(shown, problem.changes, apply));
    if (row) return [button(t("Fix ({0} changes)…", problem.changes.length), open, { class: "mm-form-fix", title: problem.fix })];
    return [button(t("Fix ({0} changes)…", problem.changes.length), open, { class: "mm-form-fix", title: problem.fix }), shown];
  }

  async preview(place) {
    const answer = await this.form.request("repaired");
    if (answer) this.ask(place, answer.changes, () => { this.form.fields.leave(); this.form.request("repair"); });
  }

  ask(place, changes, apply) { // what would change, then yes or no
    const rows = changes.map(([key, before, after]) => make("li", {}, `${key}: ${before || t("empty")} → ${after || t("empty")}`));
    const yes = button(changes.length === 1 ? t("Apply 1 change") : t("Apply {0} changes", changes.length), () => { place.replaceChildren(); apply(); });
    place.replaceChildren(make("ul", {}, ...rows), yes, button(t("Cancel"), () => place.replaceChildren()));
    yes.focus();
  }

  /* ---- memory ---- */
  listMemory() {
    const { rows, notes } = this.form.frame.memory;
    const some = (index) => rows.some((row) => row[index] > 0);
    const columns = [[t("ranks"), 0], [t("what"), 1], [t("parameters"), 2], [t("weights"), 3], [t("gradients"), 4], [t("optimizer"), 5],
      ...(some(6) ? [[t("gathered"), 6]] : []), ...(some(7) ? [[t("left out"), 7]] : []), [t("activations"), 8], [t("sum"), 9]];
    const cell = (row, index) => (index < 2 ? row[index] : index === 2 ? number(row[2], 12) : row[index] === null ? "?" : row[index] ? bytes(row[index]) : "–");
    const held = table(columns.map(([title]) => title), rows.map((row) => columns.map(([, index]) => cell(row, index))));
    const scrolled = make("div", { class: "mm-form-scroll", tabindex: "0", role: "group", "aria-label": t("Memory of each rank") }, held);
    this.memory.replaceChildren(make("h4", {}, t("Memory of each rank"), make("span", {}, t("from shapes and schedule"))), ...(rows.length ? [scrolled] : []), ...notes.map((note) => make("p", { class: "mm-form-soft" }, note)));
  }

  /* ---- the same plan in words ---- */
  words() {
    const kinds = [["command", t("Command line")], ["python", t("Python")], ["toml", "TOML"]];
    this.kind = "command";
    this.tabs = kinds.map(([kind, title]) => make("button", { type: "button", "aria-pressed": String(kind === this.kind), onclick: () => this.turn(kind) }, title));
    this.kinds = kinds.map(([kind]) => kind);
    this.whole = make("select", { "aria-label": t("How much of the TOML"), onchange: () => this.listWords() },
      make("option", { value: "" }, t("what differs from the defaults")), make("option", { value: "whole" }, t("every field")), make("option", { value: "comments" }, t("every field, explained")));
    this.whole.hidden = true;
    this.spelled = make("pre", { class: "mm-form-words", tabindex: "0", "aria-label": t("The plan in words") });
    this.copied = make("span", { class: "mm-form-soft", role: "status" });
    const copy = button(t("Copy"), () => this.copy());
    return make("div", { class: "mm-form-card" }, make("h4", {}, t("The same plan in words")),
      make("div", { class: "mm-tools" }, make("div", { class: "mm-form-tabs", role: "group", "aria-label": t("In which words") }, ...this.tabs), this.whole, copy, this.copied), this.spelled);
  }

  turn(kind) {
    this.kind = kind;
    this.tabs.forEach((tab, index) => tab.setAttribute("aria-pressed", String(this.kinds[index] === kind)));
    this.whole.hidden = kind !== "toml";
    this.listWords();
  }

  async listWords() {
    put(this.copied, "");
    if (this.kind === "toml" && this.whole.value) {
      const answer = await this.form.request("toml", { comments: this.whole.value === "comments" });
      if (answer && this.kind === "toml" && this.whole.value) put(this.spelled, answer.text);
    } else put(this.spelled, this.form.frame.said[this.kind]);
  }

  async copy() {
    const text = this.spelled.textContent;
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch { done = this.copySelected(); } // no clipboard without https
    put(this.copied, done ? t("copied") : t("marked: copy it with Ctrl+C"));
  }

  copySelected() {
    const range = document.createRange();
    range.selectNodeContents(this.spelled);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    try { return document.execCommand("copy"); } catch { return false; }
  }

  /* ---- pictures ---- */
  picture(name, title) {
    const body = make("div", { class: `mm-form-picture mm-form-${name}`, tabindex: "0", role: "group", "aria-label": title });
    const node = make("details", { class: "mm-form-card", open: true, ontoggle: () => this.draw() }, make("summary", {}, make("b", {}, title)), body);
    return { node, body };
  }

  draw() {
    clearTimeout(this.drawing);
    const open = Object.values(this.pictures).some(({ node }) => node.open);
    if (open && this.form.frame.revision !== this.drawn) this.drawing = setTimeout(() => this.drawNow(), FORM_DRAWN);
  }

  async drawNow() {
    const { revision } = this.form.frame;
    this.drawn = revision;
    let found;
    try { found = await this.form.ask("pictures"); } catch (refusal) { found = { layout_not: refusal.message, schedule_not: refusal.message }; }
    if (this.form.frame.revision !== revision) return; // another change came meanwhile: its pictures follow
    for (const [name, { body }] of Object.entries(this.pictures)) {
      if (found[name]) body.innerHTML = found[name]; // SVG that Python made, with all texts escaped
      else body.replaceChildren(make("p", { class: "mm-form-soft" }, found[`${name}_not`] ?? ""));
    }
  }

  update(changed) {
    if ("problems" in changed || "mistyped" in changed) this.listProblems();
    if ("memory" in changed) this.listMemory();
    if ("said" in changed) this.listWords();
    if ("revision" in changed) this.draw();
  }

  dispose() { clearTimeout(this.drawing); }
}
