/* The fields of a plan, section by section: entry, help, what is wrong; a search, and those that differ alone. */
class FormFields {
  constructor(form) {
    this.form = form;
    this.rows = new Map(); // dotted key -> {node, input, why, help, unset, about}
    this.waiting = new Map(); // dotted key -> timer: typed and not yet sent
    this.typed = null; // the key that someone types into: what the kernel says does not replace that text
    this.edit = "";
    this.search = field({ id: `${form.id}-search`, type: "search", placeholder: t("name or help, such as batch"), class: "mm-form-search" });
    this.search.addEventListener("input", () => this.filter());
    this.only = make("input", { type: "checkbox", id: `${form.id}-only`, onchange: () => this.filter() });
    this.matches = make("span", { class: "mm-form-soft", role: "status" });
    this.list = make("div", { class: "mm-form-list" });
    this.node = make("div", { class: "mm-form-fields", role: "group", "aria-label": t("Fields of the plan") },
      make("div", { class: "mm-tools mm-form-filter" }, make("label", { for: this.search.id }, t("Search")), this.search,
        make("label", { class: "mm-form-check" }, this.only, t("changed only")), this.matches),
      this.list);
  }

  build({ fields, sections }) {
    this.rows.clear();
    this.list.replaceChildren();
    const tops = [...new Set(fields.map(({ section }) => section.split(".")[0]))];
    this.groups = tops.map((top) => {
      const own = fields.filter(({ section }) => section.split(".")[0] === top);
      const first = own.filter((one) => one.first);
      const rest = own.filter((one) => !one.first);
      const node = make("section", { class: "mm-form-group", "aria-label": top || t("Run") });
      if (first.length) node.append(make("h4", {}, top || t("Run"), make("span", {}, sections[top] ?? "")), ...this.parts(first, sections, top));
      if (rest.length) {
        const words = first.length ? t("More of {0}", top) : top;
        const hint = first.length ? "" : sections[top];
        node.append(make("details", {}, make("summary", {}, make("b", {}, words), make("span", {}, hint), make("i", {}, t("{0} fields", rest.length))), ...this.parts(rest, sections, top)));
      }
      this.list.append(node);
      return node;
    });
  }

  parts(fields, sections, top) { // the rows, under the names of their subsections
    const nodes = [];
    let last = top;
    for (const one of fields) {
      if (one.section !== last) { nodes.push(make("h5", { class: "mm-form-sub" }, one.section, make("span", {}, sections[one.section]))); last = one.section; }
      nodes.push(this.row(one));
    }
    return nodes;
  }

  row(one) {
    const id = `${this.form.id}-${one.key.replaceAll(".", "-")}`;
    const prefix = one.key.slice(0, -one.label.length);
    const input = this.input(one, { id, "aria-describedby": `${id}-why ${id}-help`, "data-key": one.key });
    const why = make("p", { class: "mm-form-why", id: `${id}-why` });
    const bounds = one.bounds ? ` (${one.bounds})` : "";
    const live = one.live ? ` ${t("May change during a run.")}` : "";
    const idle = make("span", { class: "mm-form-idle" });
    const help = make("p", { class: "mm-form-help", id: `${id}-help` }, idle, one.help, make("span", {}, `${bounds}${live}`));
    const unset = button("↺", () => this.reset(one.key), { class: "mm-form-unset", "aria-label": t("Reset {0}", one.key) });
    unset.hidden = true;
    const node = make("div", { class: "mm-form-row" },
      make("label", { for: id }, make("span", { class: "mm-form-sr" }, prefix), one.label),
      make("span", { class: "mm-form-entry" }, input, make("span", { class: "mm-form-unit" }, one.unit), unset),
      make("div", { class: "mm-form-about" }, why, help));
    this.rows.set(one.key, { node, input, why, help, idle, unset, one, about: `${one.key} ${one.help}`.toLowerCase() });
    return node;
  }

  input(one, attributes) {
    const now = (text) => this.send(one.key, text);
    if (one.entry === "switch") {
      const box = make("input", { ...attributes, type: "checkbox", onchange: () => now(String(box.checked)) });
      return box;
    }
    if (one.entry === "choice") {
      const select = make("select", { ...attributes, onchange: () => now(select.value) }, ...one.choices.map((choice) => make("option", { value: choice }, choice)));
      return select;
    }
    const numeric = one.entry === "whole" ? "numeric" : one.entry === "number" ? "decimal" : null;
    const input = make("input", { ...attributes, type: "text", inputmode: numeric, spellcheck: "false", autocomplete: "off", placeholder: one.entry === "text" || one.entry === "list" ? t("empty") : null,
      class: numeric ? "mm-form-number" : "mm-form-text" });
    input.addEventListener("focus", () => { this.edit = Math.random().toString(36).slice(2); });
    input.addEventListener("input", () => { this.typed = one.key; this.later(one.key); });
    input.addEventListener("keydown", (event) => { if (event.key === "Enter") this.flush(); });
    input.addEventListener("blur", () => { this.flush().then(() => { if (this.typed === one.key && document.activeElement !== input) { this.typed = null; this.show(one.key); } }); });
    return input;
  }

  later(key) {
    clearTimeout(this.waiting.get(key));
    this.waiting.set(key, setTimeout(() => this.send(key, this.rows.get(key).input.value), FORM_REST));
  }

  async send(key, text) {
    clearTimeout(this.waiting.get(key));
    this.waiting.delete(key);
    return this.form.request("enter", { key, text, edit: this.typed === key ? this.edit : "" });
  }

  async flush() { // send what was typed and is still waiting
    await Promise.all([...this.waiting.keys()].map((key) => this.send(key, this.rows.get(key).input.value)));
  }

  drop() { // forget what was typed and not sent; whether there was any
    if (!this.waiting.size) return false;
    this.waiting.forEach((timer) => clearTimeout(timer));
    const keys = [...this.waiting.keys()];
    this.waiting.clear();
    this.leave();
    keys.forEach((key) => this.show(key));
    return true;
  }

  leave() { this.typed = null; this.edit = Math.random().toString(36).slice(2); } // the next change is one of its own

  async reset(key) {
    this.leave();
    await this.form.request("reset", { key });
    this.rows.get(key).input.focus();
  }

  update(changed) {
    const keys = Object.keys(changed).filter((name) => name[0] === "=").map((name) => name.slice(1));
    const all = ["mistyped", "problems", "idle", "changed"].some((name) => name in changed);
    (all ? [...this.rows.keys()] : keys).forEach((key) => this.show(key));
    if ("changed" in changed && (this.only.checked || !this.filtered)) this.filter();
  }

  show(key) {
    const { frame } = this.form;
    const row = this.rows.get(key);
    const wrong = frame.mistyped[key];
    const text = wrong ? wrong.text : frame[`=${key}`];
    if (row.one.entry === "switch") row.input.checked = text === "true";
    else if (this.typed !== key && row.input.value !== text) row.input.value = text;
    const problems = frame.problems.filter((one) => one.field === key);
    this.explain(row, wrong, problems);
    const before = frame.changed[key];
    row.node.classList.toggle("mm-form-differs", before !== undefined);
    row.unset.hidden = before === undefined;
    if (before !== undefined) row.unset.title = t("Back to {0}", before === "" ? t("empty") : before);
    const when = frame.idle[key];
    row.node.classList.toggle("mm-form-rests", when !== undefined);
    put(row.idle, when === undefined ? "" : `${t("No effect now, only {0}.", when)} `);
  }

  explain(row, wrong, problems) {
    row.input.setAttribute("aria-invalid", String(Boolean(wrong) || problems.length > 0));
    const said = JSON.stringify([wrong, problems]);
    if (row.said === said) return;
    row.said = said;
    const told = wrong ? [`✕ ${wrong.reason}. ${t("The plan keeps {0}.", this.form.frame[`=${row.one.key}`])}`] : [];
    const kept = told.map((text) => make("span", { class: "mm-form-typed", title: text }, text));
    const distinct = new Map(problems.map((one) => [one.overrides.join(" "), one])); // several problems often have one fix
    const all = problems.map((one) => one.message).join(" ");
    const more = problems.length > 1 ? [button(t("all {0}", problems.length), () => this.form.side.showProblems(), { class: "mm-form-fix", title: all })] : [];
    const fixes = [...[...distinct.values()].slice(0, 1).flatMap((one) => this.form.side.fixes(one, true)), ...more];
    const found = problems.length && !wrong ? [make("span", { title: all }, `⚠ ${problems[0].message}`), make("div", { class: "mm-form-fixes" }, ...fixes)] : [];
    const had = row.why.contains(document.activeElement);
    row.why.replaceChildren(...kept, ...found);
    if (had) row.input.focus({ preventScroll: true }); // the button that was pressed is gone
    row.node.classList.toggle("mm-form-wrong", kept.length + found.length > 0);
  }

  filter() { // the rows that match; folds open while there is a search, and are as before after it
    const wanted = this.search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const { changed, mistyped } = this.form.frame;
    const active = wanted.length > 0 || this.only.checked;
    let count = 0;
    for (const [key, row] of this.rows) {
      const shown = wanted.every((word) => row.about.includes(word)) && (!this.only.checked || key in changed || key in mistyped);
      row.node.hidden = !shown;
      count += shown;
    }
    for (const group of this.groups) {
      group.hidden = !group.querySelector(".mm-form-row:not([hidden])");
      for (const fold of group.querySelectorAll("details")) {
        if (active && this.filtered !== true) fold.dataset.before = fold.open;
        if (active) fold.open = true; else if (this.filtered) fold.open = fold.dataset.before === "true";
        fold.hidden = !fold.querySelector(".mm-form-row:not([hidden])");
      }
      for (const heading of group.querySelectorAll(".mm-form-sub")) heading.hidden = !this.below(heading);
    }
    this.filtered = active;
    put(this.matches, count === 0 ? t("no field matches") : active ? t("{0} of {1} fields", count, this.rows.size) : t("{0} fields, {1} changed", this.rows.size, Object.keys(changed).length));
  }

  below(heading) { // whether a row under a heading is shown
    for (let node = heading.nextElementSibling; node && node.matches(".mm-form-row"); node = node.nextElementSibling) if (!node.hidden) return true;
    return false;
  }

  go(key) { // to a field, wherever it is folded
    const row = this.rows.get(key);
    if (!row) return;
    if (row.node.hidden) { this.search.value = ""; this.only.checked = false; this.filter(); }
    const fold = row.node.closest("details");
    if (fold) fold.open = true;
    row.node.scrollIntoView({ block: "nearest" });
    row.input.focus({ preventScroll: true });
  }

  dispose() { this.waiting.forEach((timer) => clearTimeout(timer)); }
}
