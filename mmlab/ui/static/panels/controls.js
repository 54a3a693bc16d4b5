/* Buttons: a command is sent, passed on by the kernel, applied at a step boundary on all ranks. Each control says what
   has become of the newest command of its kind, whoever gave it: this page, another one, a cell, the command line. */
const CHECK_AFTER = 350; // ms without a key after which changes to the layout are checked

/* One control: its buttons and fields, and what has become of its last command, to be put into the line that the
   controls of a row share. */
class Control {
  constructor(key, label, nodes) {
    this.key = key;
    this.id = `mm-${Math.random().toString(36).slice(2)}`;
    this.line = make("span", { class: "mm-ack", id: this.id, "data-control": key, "data-label": label });
    this.node = make("div", { class: "mm-control", role: "group", "aria-label": label }, ...nodes);
    for (const node of nodes) if (node.matches("button, input")) node.setAttribute("aria-describedby", this.id);
    this.own = null; // {text, bad, after}: what this page knows before the run does
    this.say("", "");
  }

  say(text, kind) { put(this.line, text); this.line.title = text; this.line.dataset.kind = kind; }

  sent() { this.own = { text: t("sent"), kind: "sent", after: this.latest }; this.show(); }

  busy() { if (this.own) { this.own.text = t("sent; the kernel runs a cell and passes it on afterwards"); this.show(); } }

  refused(reason) { this.own = { text: t("refused: {0}", reason), kind: "refused", after: this.latest }; this.show(); }

  took(id) { if (this.own) this.own.id = id; }

  show(told = this.told, frame = this.frame) {
    [this.told, this.frame] = [told, frame];
    this.latest = told?.id ?? "";
    const known = this.own && (this.own.id ? this.latest >= this.own.id : this.latest !== this.own.after);
    if (known) this.own = null;
    if (this.own) this.say(this.own.text, this.own.kind);
    else if (told) this.say(...outcome(told, frame));
  }
}

function outcome(told, { state, step }) {
  if (told.waits) {
    const more = told.waits > 1 ? t(" ({0} of them)", told.waits) : "";
    if (told.verb === "abort") return [t("waiting for the first rank to be freed") + more, "waits"];
    if (state === "paused") return [t("{0}: waiting for the ranks, paused after step {1}", told.text, step) + more, "waits"];
    return [t("{0}: waiting for the end of step {1}", told.text, step + 1) + more, "waits"];
  }
  if (!told.ok) return [t("{0} {1}: refused after step {2}: {3}", told.time, told.text, told.step, told.message), "bad"];
  if (told.verb === "abort") return [`${told.time} ${told.text}: ${told.message}`, "ok"];
  return [t("{0} {1}: applied after step {2} on {3} of {4} ranks", told.time, told.text, told.step, told.ranks, told.of), "ok"];
}

PANELS.controls = class extends Panel {
  static title = "Steer the run";

  constructor(store, name) {
    super(store, name);
    this.toggle = button(t("Pause"), () => this.command("pause", this.frame.state === "paused" ? "resume" : "pause"), { title: t("Pause after the step under way, or go on") });
    this.n = field({ name: "n", type: "number", min: 1, value: 1, "aria-label": t("Steps to run") }, () => this.step());
    this.named = field({ name: "checkpoint", type: "text", placeholder: t("name (optional)"), "aria-label": t("Name of the checkpoint, optional") }, () => this.save());
    this.changes = field({ name: "changes", type: "text", placeholder: "parallel.tp=2", spellcheck: "false", "aria-label": t("Changes to the layout, such as parallel.tp=2"), oninput: () => this.checkSoon() }, () => this.relayout());
    this.checked = make("div", { class: "mm-checked", role: "status", "aria-live": "polite" });
    this.controls = {};
    const first = [
      this.control("pause", t("Pause and resume"), [this.toggle]),
      this.control("step", t("Single steps"), [button(t("Step"), () => this.step(), { title: t("Run that many steps, then pause") }), this.n]),
      this.control("checkpoint", t("Checkpoint"), [button(t("Checkpoint"), () => this.save(), { title: t("Save after the step under way") }), this.named]),
      this.control("stop", t("Stop"), [button(t("Stop"), () => this.command("stop"), { title: t("End the run after the step under way"), class: "mm-stop", sure: true })]),
      this.control("abort", t("Abort"), [button(t("Abort"), () => this.command("abort"), { title: t("End the run at once, also one that is stuck; nothing is saved"), class: "mm-abort", sure: true })]),
    ];
    this.move = this.control("relayout", t("Another layout"), [this.apply = button(t("Relayout"), () => this.relayout(), { title: t("Go on in another layout after the step under way, on more or fewer ranks too") }), this.changes]);
    this.move.node.classList.add("mm-wide");
    this.said = make("div", { class: "mm-said", role: "status", "aria-live": "polite" });
    this.rates = make("div", { class: "mm-rates", role: "group", "aria-label": t("Base learning rates") });
    this.rateAcks = make("span", { class: "mm-acks" });
    this.node.append(make("div", { class: "mm-steering" }, ...first.map((control) => control.node)), make("div", { class: "mm-acks" }, ...first.map((control) => control.line)),
      make("div", { class: "mm-steering" }, this.rates, this.move.node), make("div", { class: "mm-acks" }, this.rateAcks, this.move.line),
      make("div", { class: "mm-answer", tabindex: 0, role: "group", "aria-label": t("Newest answer") }, this.checked, this.said));
    this.buttons = [...this.node.querySelectorAll("button, input")];
  }

  control(key, label, nodes) { this.controls[key] = new Control(key, label, nodes); return this.controls[key]; }

  step() { this.command("step", "step", { n: Math.max(1, Math.round(Number(this.n.value) || 1)) }); }

  save() { this.command("checkpoint", "checkpoint", { name: this.named.value.trim() }).then((sent) => { if (sent) this.named.value = ""; }); }

  relayout() {
    const changes = this.changes.value.trim();
    if (!changes) { this.check({ bad: t("write key=value, such as parallel.tp=2") }); this.changes.focus(); return; }
    this.check({}); // what becomes of it takes the place of the check
    this.command("relayout", "relayout", { changes }).then((sent) => { if (sent) this.changes.value = ""; });
  }

  checkSoon() {
    clearTimeout(this.soon);
    const changes = this.changes.value.trim();
    if (!changes) { this.check({}); return; }
    this.soon = setTimeout(() => this.ask("check_relayout", { changes }).then(
      (found) => { if (this.changes.value.trim() === changes) this.check({ good: `${found.changes.join(", ")}; ${t("{0} -> {1} ranks", found.before, found.after)}` }); },
      (refusal) => { if (this.changes.value.trim() === changes) this.check({ bad: refusal.message }); }), CHECK_AFTER);
  }

  check({ good = "", bad = "" }) {
    put(this.checked, bad ? `✕ ${bad}` : good ? `✓ ${good}` : "");
    this.checked.classList.toggle("mm-bad", Boolean(bad));
    this.changes.setAttribute("aria-invalid", Boolean(bad));
  }

  /* Sends a command; resolves with what the kernel made of it, with null where it was refused. */
  command(key, verb = key, args = {}) {
    const control = this.controls[key];
    control.sent();
    this.say(t("{0}: sent", t(verb)), false);
    const busy = () => {
      control.busy();
      this.say(t("{0}: the kernel is busy with a cell and will pass it on afterwards; from a terminal: mmlab {1} {2}", t(verb), verb, this.frame.name), false);
    };
    return this.ask(verb, args, busy).then(
      (value) => { control.took(value.id); control.show(); return value; },
      (refusal) => { control.refused(refusal.message); this.say(`${t(verb)}: ${refusal.message}`, true); return null; });
  }

  update(changed) {
    put(this.toggle, this.frame.state === "paused" ? t("Resume") : t("Pause"));
    const over = ENDED.includes(this.frame.state);
    if ("rates" in changed || "state" in changed) this.showRates(over);
    for (const node of this.buttons) node.disabled = over;
    if ("controls" in changed || "step" in changed || "state" in changed) for (const [key, control] of Object.entries(this.controls)) control.show(this.frame.controls?.[key], this.frame);
    if ("waiting" in changed || "acked" in changed) this.showAnswer();
  }

  showAnswer() {
    const waiting = this.frame.waiting ?? [];
    if (waiting.length) this.say(t("{0}: waits for the end of step {1}", waiting.join("; "), this.frame.step + 1), false);
    else if (this.frame.acked) this.say(this.frame.acked.text, !this.frame.acked.ok);
  }

  showRates(over) {
    const rates = this.frame.rates ?? {};
    if (this.rates.childElementCount !== Object.keys(rates).length) {
      this.inputs = {};
      const rows = Object.keys(rates).map((module) => this.rateRow(module));
      this.rates.replaceChildren(...rows.map((control) => control.node));
      this.rateAcks.replaceChildren(...rows.map((control) => control.line));
    }
    for (const [module, rate] of Object.entries(rates)) {
      const { input, set, now } = this.inputs[module];
      if (document.activeElement !== input && input.dataset.base !== String(rate.base)) { input.value = number(rate.base); input.dataset.base = rate.base; }
      input.disabled = set.disabled = over || rate.frozen;
      put(now, rate.frozen ? t("frozen") : t("now {0}", number(rate.now, 3)));
    }
  }

  rateRow(module) {
    const key = `rate ${module}`;
    const send = () => {
      const value = Number(input.value);
      if (!input.value.trim() || !Number.isFinite(value) || value < 0) {
        const reason = t("{0} is not a learning rate; give a number such as 1e-4", input.value);
        this.controls[key].refused(reason);
        this.say(reason, true);
        return;
      }
      this.command(key, "set", { key: `train.${module}.lr`, value });
    };
    const input = field({ type: "text", inputmode: "decimal", "aria-label": t("Base learning rate of {0}", t(module)) }, send);
    const set = button(t("Set"), send, { "aria-label": t("Set the learning rate of {0}", t(module)) });
    const now = make("span", { class: "mm-now" });
    this.inputs[module] = { input, set, now };
    const control = this.control(key, t("Learning rate of {0}", t(module)), [make("label", {}, t("{0} lr", t(module))), input, set, now]);
    control.show(this.frame.controls?.[key], this.frame);
    return control;
  }

  say(text, bad) { put(this.said, text); this.said.classList.toggle("mm-bad", bad); }

  dispose() { clearTimeout(this.soon); }
};
