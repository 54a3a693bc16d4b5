/* Buttons: a command is sent, passed on by the kernel, applied at a step boundary on all ranks. */

PANELS.controls = class extends Panel {
  static title = "Steer the run";

  constructor(store, name) {
    super(store, name);
    this.toggle = button(t("Pause"), () => this.command(this.frame.state === "paused" ? "resume" : "pause"), { title: t("Pause after the step under way, or go on") });
    this.n = field({ name: "n", type: "number", min: 1, value: 1, "aria-label": t("Steps to run") }, () => this.step());
    this.buttons = [this.toggle, button(t("Step"), () => this.step(), { title: t("Run that many steps, then pause") }), this.n,
      button(t("Checkpoint"), () => this.command("checkpoint"), { title: t("Save after the step under way") }),
      button(t("Stop"), () => this.command("stop"), { title: t("End the run after the step under way"), class: "mm-stop", sure: true }),
      button(t("Abort"), () => this.command("abort"), { title: t("End the run at once, also one that is stuck; nothing is saved"), class: "mm-abort", sure: true })];
    this.said = make("span", { class: "mm-said", role: "status", "aria-live": "polite" });
    this.rates = make("div", { class: "mm-rates", role: "group", "aria-label": t("Base learning rates") });
    this.node.append(make("div", { class: "mm-tools", role: "toolbar", "aria-label": t("Steer the run") }, ...this.buttons, this.said), this.rates);
  }

  step() { this.command("step", { n: Math.max(1, Math.round(Number(this.n.value) || 1)) }); }

  command(verb, args = {}) {
    this.say(t("{0}: sent", t(verb)), false);
    const busy = () => this.say(t("{0}: the kernel is busy with a cell and will pass it on afterwards; from a terminal: mmlab {1} {2}", t(verb), verb, this.frame.name), false);
    this.ask(verb, args, busy).catch((refusal) => this.say(`${t(verb)}: ${refusal.message}`, true));
  }

  update(changed) {
    put(this.toggle, this.frame.state === "paused" ? t("Resume") : t("Pause"));
    const over = ENDED.includes(this.frame.state);
    this.buttons.forEach((node) => { node.disabled = over; });
    if ("rates" in changed || "state" in changed) this.showRates(over);
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
      this.rates.replaceChildren(...Object.keys(rates).map((module) => this.rateRow(module)));
    }
    for (const [module, rate] of Object.entries(rates)) {
      const { input, set, now } = this.inputs[module];
      if (document.activeElement !== input && input.dataset.base !== String(rate.base)) { input.value = number(rate.base); input.dataset.base = rate.base; }
      input.disabled = set.disabled = over || rate.frozen;
      put(now, rate.frozen ? t("frozen") : t("now {0}", number(rate.now, 3)));
    }
  }

  rateRow(module) {
    const send = () => {
      const value = Number(input.value);
      if (!input.value.trim() || !Number.isFinite(value) || value < 0) { this.say(t("{0} is not a learning rate; give a number such as 1e-4", input.value), true); return; }
      this.command("set", { key: `train.${module}.lr`, value });
    };
    const input = field({ type: "text", inputmode: "decimal", "aria-label": t("Base learning rate of {0}", t(module)) }, send);
    const set = button(t("Set"), send, { "aria-label": t("Set the learning rate of {0}", t(module)) });
    const now = make("span");
    this.inputs[module] = { input, set, now };
    return make("div", { class: "mm-rate" }, make("label", {}, t("{0} lr", t(module))), input, set, now);
  }

  say(text, bad) { put(this.said, text); this.said.classList.toggle("mm-bad", bad); }
};
