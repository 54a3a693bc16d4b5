/* What the model writes for held-out pictures, beside the truth; the newest step, or an earlier one. */
PANELS.samples = class extends Panel {
  static title = "Samples";

  constructor(store, name) {
    super(store, name);
    this.earlier = null; // {folder, items, pictures} of a chosen step; null: the newest
    this.choice = chooser({ "aria-label": t("Step of the samples"), onchange: () => this.choose(this.choice.value) });
    this.back = button(t("Earlier"), () => this.move(-1), { title: t("The samples before these") });
    this.on = button(t("Later"), () => this.move(1), { title: t("The samples after these") });
    this.said = make("span", { class: "mm-samples-said", role: "status" });
    this.cards = make("ul", { class: "mm-cards", "aria-label": t("Held-out pictures with what the model writes"), tabindex: 0 });
    this.node.append(make("div", { class: "mm-tools" }, make("label", {}, t("step"), " ", this.choice), this.back, this.on, this.said), this.cards);
  }

  get steps() { return this.frame.steps ?? []; }

  get folder() { return this.earlier?.folder ?? this.frame.folder; }

  update(changed) {
    if ("steps" in changed || "folder" in changed) this.showSteps();
    if ("every" in changed || "state" in changed || "steps" in changed || "items" in changed) this.show();
  }

  showSteps() {
    const newest = this.frame.folder;
    this.choice.replaceChildren(...[...this.steps].reverse().map(([folder, step, time]) => make("option", { value: folder }, folder === newest ? t("{0} (newest)", number(step, 9)) : `${number(step, 9)}  ${time}`)));
    if (!this.steps.length) this.choice.replaceChildren(make("option", { value: "" }, t("none yet")));
    this.choice.disabled = !this.steps.length;
    this.choice.value = this.folder ?? "";
    const at = this.steps.findIndex(([folder]) => folder === this.folder);
    this.back.disabled = at <= 0;
    this.on.disabled = at < 0 || at >= this.steps.length - 1;
  }

  move(by) { const at = this.steps.findIndex(([folder]) => folder === this.folder) + by; if (this.steps[at]) this.choose(this.steps[at][0]); }

  choose(folder) {
    if (folder === this.frame.folder) { this.earlier = null; this.showSteps(); this.show(); return; }
    put(this.said, t("reading"));
    this.ask("step", { folder }, () => put(this.said, t("the kernel runs a cell and answers afterwards"))).then(
      (found) => { this.earlier = found; this.showSteps(); this.show(); },
      (refusal) => { put(this.said, refusal.message); this.choice.value = this.folder ?? ""; });
  }

  show() {
    const { items = [], pictures = {} } = this.earlier ?? this.frame;
    const { every, wanted } = this.frame;
    const cadence = every ? t("renewed every {0} steps and at the end", number(every, 9)) : t("renewed at the end of the run");
    if (!items.length) put(this.said, wanted === 0 ? t("no samples: train.sample_images is 0") : t("no samples yet; {0}", cadence));
    else put(this.said, t("{0} of {1} right, word for word; {2}", items.filter((item) => item.right).length, items.length, cadence));
    this.cards.replaceChildren(...items.map((item) => this.card(item, pictures[item.picture])));
  }

  card({ prompt, truth, text, right }, url) {
    const picture = url ? make("img", { src: url, alt: t("picture of: {0}", truth), width: 96, height: 96 }) : make("span", { class: "mm-missing" }, t("no picture"));
    const line = (name, value, kind) => make("div", { class: kind }, make("dt", {}, name), make("dd", {}, value || t("(nothing)")));
    return make("li", { class: "mm-card" }, picture, make("dl", {},
      line(t("asked"), prompt, "mm-asked"), line(t("wrote"), `${right ? "✓" : "✗"} ${text || t("(nothing)")}`, right ? "mm-right" : "mm-wrong"), line(t("truth"), truth, "mm-truth")));
  }
};
