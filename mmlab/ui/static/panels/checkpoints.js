/* The checkpoint browser: a tree as a table with check boxes; one chosen shows what it holds, two are compared. */
const CK_INDENT = 16; // px a level
const CK_PAUSE = 350; // ms after a key until the changes that were typed are checked
const CK_COLUMNS = [["checkpoint", ""], ["step", "mm-ck-n"], ["loss", "mm-ck-n"], ["layout", "mm-ck-line mm-ck-medium"], ["samples", "mm-ck-n mm-ck-wide"],
  ["size", "mm-ck-n mm-ck-medium"], ["kept", "mm-ck-line mm-ck-wide"], ["saved", "mm-ck-line mm-ck-wide"]];

PANELS.checkpoints = class extends Panel {
  static title = "Checkpoints";

  constructor(store, name) {
    super(store, name);
    this.chosen = []; // names, at most two, in the order in which they were chosen
    this.asked = 0; // counts requests whose answers fill the lower part: a late one is not shown
    this.body = make("tbody");
    const head = make("tr", {}, ...CK_COLUMNS.map(([label, kind]) => make("th", { scope: "col", class: kind || null }, t(label))));
    this.empty = make("p", { class: "mm-ck-empty" });
    this.list = make("div", { class: "mm-ck-list", tabindex: 0, role: "group", "aria-label": t("Checkpoints, branch by branch") },
      make("table", {}, make("thead", {}, head), this.body), this.empty);
    this.list.addEventListener("keydown", (event) => this.arrow(event));
    this.said = make("p", { class: "mm-ck-said", role: "status", "aria-live": "polite" });
    this.what = make("div", { class: "mm-ck-what", role: "region", "aria-label": t("What was chosen"), "aria-live": "polite" });
    this.node.append(make("h4", {}, t("Checkpoints")), this.list, ...this.tools(), this.said, this.what);
    this.choose();
  }

  tools() {
    this.compareButton = button(t("Compare"), () => this.compare(), { title: t("What differs between two: plan and weights") });
    this.restoreButton = button(t("Restore"), () => this.act("restore"), { title: t("Go back to it"), sure: true });
    this.branchButton = button(t("Branch"), () => this.act("branch"), { title: t("Start a new run from it") });
    this.deleteButton = button(t("Delete"), () => this.remove(false), { class: "mm-ck-delete", sure: true });
    this.forceButton = button(t("Delete all the same"), () => this.remove(true), { class: "mm-ck-delete", sure: true });
    this.forceButton.hidden = true;
    this.renameButton = button(t("Name"), () => this.rename(), { title: t("Give it a name; it is then kept") });
    this.newName = field({ type: "text", class: "mm-ck-new", "aria-label": t("New name"), placeholder: t("new name"), maxlength: 200 }, () => this.rename());
    const id = `mm-${Math.random().toString(36).slice(2)}`;
    this.changes = field({ type: "text", id, placeholder: "parallel.tp=2, train.steps=500", "aria-describedby": `${id}-check`, spellcheck: "false" });
    this.changes.addEventListener("input", () => { clearTimeout(this.typing); this.typing = setTimeout(() => this.check(), CK_PAUSE); });
    this.checked = make("div", { class: "mm-ck-check", id: `${id}-check`, "aria-live": "polite" });
    return [
      make("div", { class: "mm-ck-bar", role: "group", "aria-label": t("With what was chosen") }, this.compareButton, this.newName, this.renameButton, this.deleteButton, this.forceButton),
      make("div", { class: "mm-ck-bar", role: "group", "aria-label": t("Go on from it") }, this.restoreButton, this.branchButton, make("label", { for: id }, t("with changes to the plan")), this.changes),
      this.checked,
    ];
  }

  update(changed) {
    if (changed.nodes || changed.unreadable !== undefined || changed.listed !== undefined || changed.left_out !== undefined) this.draw();
    if (this.waits && (changed.answers || changed.went_back !== undefined)) this.answered();
    if (changed.state) this.enable();
  }

  draw() {
    const { nodes = [], unreadable = "", listed = false, left_out: left = 0 } = this.frame;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.value : null;
    this.body.replaceChildren(...nodes.map((node) => this.row(node)));
    const any = nodes.some((node) => node.kind === "checkpoint");
    const none = listed ? t("No checkpoint yet. The run saves by itself as its plan says; Checkpoint saves one now.") : t("Looking for checkpoints …");
    put(this.empty, unreadable || (any ? (left ? t("{0} older rows are not shown", left) : "") : none));
    this.empty.classList.toggle("mm-bad", Boolean(unreadable));
    this.empty.hidden = !this.empty.textContent;
    if (focused !== null) [...this.body.querySelectorAll("input")].find((box) => box.value === focused)?.focus({ preventScroll: true });
    const there = this.chosen.filter((name) => nodes.some((node) => node.name === name));
    if (there.length !== this.chosen.length) { this.chosen = there; this.choose(); }
    if (listed && !this.scrolled && any) { this.scrolled = true; this.list.scrollTop = this.list.scrollHeight; }
  }

  row(node) {
    const indent = `padding-left:${8 + CK_INDENT * node.depth}px`;
    if (node.kind === "lineage") return make("tr", { class: "mm-ck-branch" }, make("th", { scope: "rowgroup", colspan: CK_COLUMNS.length, style: indent }, `${node.here ? "▶" : "⎇"} ${node.text}`));
    if (node.kind === "run") return make("tr", { class: "mm-ck-run" }, make("th", { colspan: CK_COLUMNS.length, style: indent }, t("→ branched off: run {0}", node.text)));
    const chosen = this.chosen.includes(node.name);
    const box = make("input", { type: "checkbox", value: node.name });
    box.checked = chosen;
    box.addEventListener("change", () => this.toggle(node.name, box.checked));
    const label = make("label", { class: "mm-ck-name" }, box, make("span", {}, node.name));
    if (!node.current) label.append(make("span", { class: "mm-ck-back" }, t("(taken back)")));
    const shared = node.shared_bytes ? t("{0} + {1} frozen", bytes(node.bytes), bytes(node.shared_bytes)) : bytes(node.bytes);
    const cells = [number(node.step, 9), number(node.loss), node.layout, number(node.samples, 9), shared, node.periodic ? t("until newer ones") : t("for good"), node.when];
    return make("tr", { class: chosen ? "mm-ck-chosen" : null }, make("td", { style: indent }, label),
      ...cells.map((text, index) => make("td", { class: CK_COLUMNS[index + 1][1] || null }, text)));
  }

  arrow(event) { // up and down go from one check box to the next
    const to = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!to || event.target.type !== "checkbox") return;
    const boxes = [...this.body.querySelectorAll("input")];
    event.preventDefault();
    event.stopPropagation();
    boxes[boxes.indexOf(event.target) + to]?.focus();
  }

  toggle(name, on) {
    this.chosen = this.chosen.filter((each) => each !== name);
    if (on) this.chosen = [...this.chosen, name].slice(-2);
    this.choose();
  }

  choose() { // show what was chosen
    for (const box of this.body.querySelectorAll("input")) {
      box.checked = this.chosen.includes(box.value);
      box.closest("tr").classList.toggle("mm-ck-chosen", box.checked);
    }
    this.forceButton.hidden = true;
    this.asked += 1;
    this.checks = (this.checks ?? 0) + 1; // an answer about another one comes too late
    this.enable();
    put(this.checked, "");
    if (this.chosen.length === 1) { this.details(); this.check(); }
    else this.what.replaceChildren(make("p", { class: "mm-ck-back" }, this.chosen.length ? t("Two are chosen: {0}. Compare them, or choose one to go on from.", this.chosen.join(", ")) : t("Choose one to see what it holds, two to compare them.")));
  }

  enable() {
    const one = this.chosen.length === 1;
    this.compareButton.disabled = this.chosen.length !== 2;
    for (const node of [this.restoreButton, this.branchButton, this.deleteButton, this.renameButton, this.newName, this.changes]) node.disabled = !one;
  }

  say(text, bad = false) { put(this.said, text); this.said.classList.toggle("mm-bad", bad); }

  busy() { this.say(t("the kernel is busy with a cell and will pass it on afterwards")); }

  order() { return [...this.chosen].sort((a, b) => this.place(a) - this.place(b)); } // the earlier row first

  place(name) { return (this.frame.nodes ?? []).findIndex((node) => node.name === name); }

  details() {
    const mine = (this.asked += 1);
    this.ask("details", { name: this.chosen[0] }).then((found) => { if (mine === this.asked) this.what.replaceChildren(ckDetails(found)); },
      (refusal) => { if (mine === this.asked) this.what.replaceChildren(make("p", { class: "mm-bad" }, refusal.message)); });
  }

  compare() {
    const [first, second] = this.order();
    const mine = (this.asked += 1);
    this.what.replaceChildren(make("p", { class: "mm-ck-back" }, t("Reading the weights of {0} and {1} …", first, second)));
    this.ask("compare", { first, second }, () => this.busy()).then((found) => { if (mine === this.asked) this.what.replaceChildren(ckComparison(found)); },
      (refusal) => { if (mine === this.asked) this.what.replaceChildren(make("p", { class: "mm-bad" }, refusal.message)); });
  }

  check() {
    if (this.chosen.length !== 1) return;
    const mine = (this.checks = (this.checks ?? 0) + 1);
    const line = (label, { ok, text }) => make("div", { class: ok ? null : "mm-bad" }, `${ok ? "✓" : "✕"} ${label}: ${text}`);
    this.ask("check", { name: this.chosen[0], changes: this.changes.value }).then((found) => {
      if (mine === this.checks) this.checked.replaceChildren(line(t("Restore"), found.restore), line(t("Branch"), found.branch));
    }, (refusal) => { if (mine === this.checks) this.checked.replaceChildren(make("div", { class: "mm-bad" }, refusal.message)); });
  }

  act(verb, more = {}) {
    const [name] = this.chosen;
    this.say(t("{0}: sent", `${t(verb)} ${name}`));
    return this.ask(verb, { name, changes: this.changes.value, ...more }, () => this.busy()).then((done) => {
      this.say(done.text);
      this.waits = verb === "restore" ? { id: done.id, went: this.frame.went_back } : null;
      if (this.waits) this.answered(); // the ranks may have been faster
      return done;
    }, (refusal) => { this.say(`${t(verb)} ${name}: ${refusal.message}`, true); return null; });
  }

  answered() {
    const { id, went } = this.waits;
    const answer = (this.frame.answers ?? []).find(([each]) => id && each === id);
    if (answer) this.say(answer[2], !answer[1]);
    else if (!id && this.frame.went_back && this.frame.went_back !== went) this.say(t("{0}; the run goes on from there", this.frame.went_back));
    else return;
    this.waits = null;
  }

  rename() {
    const new_ = this.newName.value;
    if (this.chosen.length !== 1) return;
    this.act("rename", { new: new_ }).then((done) => { if (done) { this.chosen = [done.name]; this.newName.value = ""; } });
  }

  remove(force) {
    this.forceButton.hidden = true;
    this.act("delete", { force }).then((done) => { if (!done) this.forceButton.hidden = force || ENDED.includes(this.frame.state); });
  }
};

function ckDetails(found) {
  const epochs = found.epochs.length ? t(", epoch {0}", found.epochs.map((epoch) => epoch + 1).join(" / ")) : "";
  const frozen = found.frozen.length ? t("{0}: {1}, stored once for all", found.frozen.map((module) => t(module)).join(", "), bytes(found.shared_bytes)) : t("nothing");
  const rows = [[t("checkpoint"), found.name], [t("layout"), found.layout], [t("step and loss"), `${number(found.step, 9)}, ${number(found.loss)}`],
    [t("place in the data"), `${t("{0} samples", number(found.samples, 9))}${epochs}`], [t("size"), t("{0} in {1} files", bytes(found.bytes), Object.keys(found.files).length)],
    [t("frozen, left out"), frozen], [t("lineage"), found.lineage + (found.current ? "" : ` ${t("(taken back)")}`)],
    [t("saved"), `${found.saved}${found.seconds ? t(", in {0} s", number(found.seconds, 2)) : ""}`], [t("kept"), found.periodic ? t("until newer ones take its place") : t("until it is deleted")], [t("where"), found.path]];
  if (found.origin) rows.splice(7, 0, [t("taken from"), found.origin]);
  const list = make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  const box = make("div", { class: "mm-ck-two" }, list);
  if (found.differs.length) box.append(table([t("field"), t("now"), t("then")], found.differs, { caption: t("its plan beside the run's now") }));
  if (!found.problem) return box;
  return make("div", {}, make("p", { class: "mm-bad", role: "alert" }, found.problem), box);
}

function ckComparison(found) {
  const most = Math.max(1e-12, ...found.modules.map((m) => m.change ?? 0));
  const change = (entry) => (entry.change === null ? t("not finite") : entry.change === 0 ? t("unchanged") : number(entry.change, 3));
  const bar = (m) => make("span", {}, ...(m.change ? [make("i", { class: "mm-ck-change", style: `width:${Math.max(2, (70 * m.change) / most)}px` })] : []), change(m));
  const modules = found.modules.map((m) => [t(m.module), bar(m), m.tensors ? t("{0} of {1}", m.changed, m.tensors) : "–", m.tensors ? number(m.parameters, 9) : "–", m.same ? t("frozen part the same") : ""]);
  const tables = [table([t("module"), t("change"), t("tensors changed"), t("parameters"), ""], modules, { caption: t("change of weights, relative to their norm") })];
  if (found.tensors.length) tables.push(table([t("tensor"), t("change"), t("shape")], found.tensors.map((each) => [each.name, change(each), each.shape.join(" × ")]), { caption: t("changed most") }));
  const plan = found.plan.length ? table([t("field"), t("before"), t("after")], found.plan, { caption: t("plan") }) : make("p", {}, t("The plans are the same."));
  return make("div", {}, make("p", {}, make("b", {}, found.title)), make("div", { class: "mm-ck-two" }, ...tables), ...found.rest.map((line) => make("p", {}, line)), plan);
}
