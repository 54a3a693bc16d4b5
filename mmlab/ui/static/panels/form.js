/* The form of a plan: what it is started from, load and save, undo; fields and side are in form_fields.js, form_side.js. */
const FORM_REST = 250; // ms without a key after which what was typed is sent

PANELS.form = class extends Panel {
  static title = "Plan";

  constructor(store, name) {
    super(store, name);
    this.node.dataset.lmSuppressShortcuts = "true"; // what is typed here are no notebook commands
    this.id = `mm-form-${Math.random().toString(36).slice(2)}`;
    this.fields = new FormFields(this);
    this.side = new FormSide(this);
    this.node.append(this.tools(), this.status(), make("div", { class: "mm-form-columns" }, this.fields.node, this.side.node));
    this.node.addEventListener("keydown", (event) => this.key(event));
  }

  tools() {
    this.base = make("select", { id: `${this.id}-base`, onchange: () => this.start() });
    this.path = field({ id: `${this.id}-path`, type: "text", class: "mm-form-path", placeholder: "plan.toml", spellcheck: "false", autocomplete: "off" }, () => this.load());
    this.undo = button(t("Undo"), () => this.back("undo"));
    this.redo = button(t("Redo"), () => this.back("redo"));
    this.train = button(t("Train"), () => this.go(), { class: "mm-form-train" });
    this.train.hidden = true;
    return make("div", { class: "mm-tools mm-form-tools", role: "toolbar", "aria-label": t("The whole plan") },
      make("label", { for: this.base.id }, t("Start from")), this.base,
      make("label", { for: this.path.id }, t("File")), this.path,
      button(t("Load"), () => this.load(), { title: t("Start from this TOML file") }),
      button(t("Save"), () => this.save(), { title: t("Write the plan to this TOML file") }),
      this.undo, this.redo, this.train);
  }

  status() {
    this.count = make("b", { class: "mm-form-ranks" }, "…");
    this.roles = make("span", { class: "mm-form-soft mm-form-roles" });
    this.found = make("button", { type: "button", class: "mm-form-found", onclick: () => this.side.showProblems() });
    this.said = make("span", { class: "mm-said", role: "status", "aria-live": "polite" });
    this.asks = make("span", { class: "mm-form-asks", role: "group", "aria-label": t("Confirm") });
    this.news = make("p", { class: "mm-form-sr", role: "status", "aria-live": "polite" });
    return make("div", { class: "mm-form-status" }, this.count, this.found, this.roles, this.said, this.asks, this.news);
  }

  key(event) {
    const undo = (event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "z";
    if (undo) { event.preventDefault(); event.stopPropagation(); this.back(event.shiftKey ? "redo" : "undo"); return; }
    if (!(event.ctrlKey || event.metaKey)) event.stopPropagation();
  }

  say(text, bad = false) { put(this.said, text); this.said.classList.toggle("mm-bad", bad); }

  /* Ask the kernel; what it refuses is said. */
  async request(verb, args = {}, working = "") {
    this.asks.replaceChildren();
    this.say(working);
    const busy = () => this.say(t("The kernel is busy with a cell and will answer afterwards."));
    try {
      const answer = await this.ask(verb, args, busy);
      if (this.said.textContent) this.say("");
      return answer;
    } catch (refusal) { this.say(refusal.message, true); return null; }
  }

  async back(verb) {
    if (verb === "undo" && this.fields.drop()) return; // what was typed and is not sent yet
    this.fields.leave();
    await this.request(verb);
  }

  async start() {
    const preset = this.base.value;
    if (preset === "") return;
    this.fields.leave();
    if (await this.request("start", { preset })) this.say(t("started from {0}; Undo brings back what was there", preset));
  }

  async load() {
    const path = this.path.value.trim();
    this.fields.leave();
    if (await this.request("load", { path }, t("loading {0}", path))) this.say(t("loaded {0}", path));
  }

  async save(overwrite = false) {
    await this.fields.flush();
    const path = this.path.value.trim();
    const answer = await this.request("save", { path, overwrite }, t("saving {0}", path));
    if (answer?.there) this.confirm(answer.there);
    else if (answer?.saved) this.say(t("saved {0}", answer.saved));
  }

  confirm(path) {
    this.say(t("{0} is there already.", path));
    const done = () => { this.asks.replaceChildren(); this.path.focus(); };
    const yes = button(t("Replace it"), () => { done(); this.save(true); });
    this.asks.replaceChildren(yes, button(t("Keep it"), () => { done(); this.say(t("not saved")); }));
    yes.focus();
  }

  async go() {
    await this.fields.flush();
    const answer = await this.request("train", {}, t("starting a run"));
    if (answer) this.say(t("training as run {0}; form.run in a cell shows it", answer.run));
  }

  update(changed) {
    const frame = this.frame;
    if (!frame.fields) return;
    const help = frame.fields.map((one) => one.help).join(); // comes again in the page's language
    if (this.helped !== help) { this.helped = help; this.fields.build(frame); this.train.hidden = !frame.lab; }
    if ("base" in changed || "presets" in changed) this.showBase();
    const used = [this.undo, this.redo].includes(document.activeElement);
    this.undo.disabled = !frame.undo;
    this.redo.disabled = !frame.redo;
    if (used && document.activeElement?.disabled) [this.undo, this.redo].find((one) => !one.disabled)?.focus();
    this.undo.title = frame.undo ? t("Take back {0} (Ctrl+Z)", frame.undo) : t("Nothing to undo");
    this.redo.title = frame.redo ? t("Make {0} again (Ctrl+Shift+Z)", frame.redo) : t("Nothing to do again");
    this.showCount();
    this.fields.update(changed);
    this.side.update(changed);
    if ("problems" in changed || "mistyped" in changed) this.tell();
  }

  showBase() {
    const { base, presets } = this.frame;
    const named = base.kind === "file" ? [make("option", { value: "" }, t("file {0}", base.name))] : [];
    this.base.replaceChildren(...named, ...presets.map((name) => make("option", { value: name }, name)));
    this.base.value = base.kind === "file" ? "" : base.name;
    if (base.kind === "file" && document.activeElement !== this.path) this.path.value = base.name;
  }

  showCount() {
    const { ranks, problems, mistyped } = this.frame;
    const wrong = problems.length + Object.keys(mistyped).length;
    put(this.count, ranks === 1 ? t("1 rank") : t("{0} ranks", number(ranks, 12)));
    put(this.roles, this.frame.roles.join(" · "));
    put(this.found, wrong === 0 ? t("✓ no problems") : wrong === 1 ? t("⚠ 1 problem") : t("⚠ {0} problems", wrong));
    this.found.classList.toggle("mm-bad", wrong > 0);
    this.found.disabled = wrong === 0;
  }

  tell() { // to screen readers: what is wrong now and was not before
    const now = [...Object.entries(this.frame.mistyped).map(([key, { reason }]) => `${key}: ${reason}`), ...this.frame.problems.map((one) => `${one.field}: ${one.message}`)];
    const fresh = now.filter((text) => !(this.told ?? []).includes(text));
    if (fresh.length || (this.told?.length && !now.length)) put(this.news, fresh.join(" ") || t("no problems"));
    this.told = now;
  }

  dispose() { this.fields.dispose(); this.side.dispose(); }
};
