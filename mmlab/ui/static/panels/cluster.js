/* A lab: state, engines with the ranks on them, runs; more engines for it; closing it. */
const LAB_ICONS = { ready: "▶", starting: "…", queued: "…", failed: "✕", ended: "■" };

PANELS.cluster = class extends Panel {
  static title = "Lab";

  constructor(store, name) {
    super(store, name);
    this.state = make("span", { class: "mm-state", role: "status" }, "…");
    this.line = make("span", { class: "mm-lab-line" });
    this.closing = button(t("Close"), () => this.close(), { title: t("End the engines and everything that the lab has started; a live run ends with it"), class: "mm-stop", sure: true });
    this.wanted = field({ type: "number", min: 1, step: 1, class: "mm-lab-wanted", "aria-label": t("Engines in all") }, () => this.grow());
    this.growing = button(t("Grow"), () => this.grow(), { title: t("Start engines until the lab has as many; it only grows, and the run at work goes on as it is") });
    this.said = make("span", { class: "mm-lab-said", role: "status" });
    this.reason = make("p", { class: "mm-reason", role: "alert" });
    const wide = (label) => make("div", { class: "mm-wide-table", tabindex: 0, role: "region", "aria-label": label });
    this.engines = wide(t("Engines"));
    this.runs = wide(t("Runs of this lab, newest first"));
    this.others = make("p", { class: "mm-lab-others" });
    const growing = make("span", { class: "mm-lab-grow" }, this.wanted, this.growing);
    this.node.append(make("div", { class: "mm-line" }, this.state, this.line, growing, this.closing, this.said), this.reason, this.engines, this.runs, this.others);
  }

  grow() {
    const engines = Number(this.wanted.value || this.wanted.placeholder);
    this.ask("grow", { engines }, () => put(this.said, t("the kernel runs a cell and starts them afterwards; from a terminal: mmlab grow {0} {1}", this.frame.id, engines))).then(
      () => { put(this.said, t("starting engines until there are {0}", engines)); this.wanted.value = ""; }, (refusal) => put(this.said, refusal.message));
  }

  close() {
    put(this.said, t("closing"));
    this.closing.disabled = true;
    this.ask("close", {}, () => put(this.said, t("the kernel runs a cell and closes the lab afterwards; from a terminal: mmlab close {0}", this.frame.id))).then(
      () => put(this.said, t("closed")), (refusal) => { put(this.said, refusal.message); this.closing.disabled = false; });
  }

  update() {
    const { id = "", state = "", engines = 0, ready = 0, job = "", reason = "", rows = [], runs = [], others = [] } = this.frame;
    this.state.dataset.state = { ready: "running", failed: "failed", ended: "" }[state] ?? "";
    put(this.state, `${LAB_ICONS[state] ?? ""} ${t(state)}`);
    put(this.line, t("lab {0}: {1} of {2} engines ready", id, ready, engines) + (job ? t(", job {0}", job) : ""));
    put(this.reason, reason);
    const cell = (value, kind) => make("td", { class: kind }, value);
    const alive = { true: `✓ ${t("alive")}`, false: `✕ ${t("dead")}`, null: t("another host") };
    const up = rows.map((row) => [String(row.engine), row.rank ?? "–", row.role ?? "–", row.phase ? t(row.phase) : "–", String(row.pid), cell(row.host, "mm-host"),
      bytes(row.memory), row.cpu === null ? "–" : `${row.cpu} %`, cell(alive[String(row.alive)], row.alive === false ? "mm-bad" : null)]);
    const none = (text, columns) => [[make("td", { colspan: columns }, text)]];
    this.engines.replaceChildren(table([t("engine"), t("rank"), t("role"), t("does"), t("process"), t("host"), t("memory"), t("processor"), t("alive")],
      rows.length ? up : none(state === "ended" ? t("the lab has ended") : t("no engine is up yet"), 9), { caption: t("Engines"), named: true }));
    const known = runs.map((run) => [make("th", { scope: "row", class: "mm-host" }, run.name), `${ICONS[run.state] ?? ""} ${t(run.state)}`,
      t("{0} of {1}", number(run.step, 9), number(run.steps, 9)), cell(run.reason || "–", "mm-host")]);
    this.runs.replaceChildren(table([t("run"), t("state"), t("step"), t("reason")], runs.length ? known : none(t("no run yet"), 4), { caption: t("Runs of this lab, newest first"), named: true }));
    put(this.others, others.length ? t("other live labs: {0}", others.map((lab) => `${lab.id} (${t(lab.state)}, ${lab.ready}/${lab.engines})`).join(", ")) : "");
    if (engines) this.wanted.placeholder = String(engines + 1);
    for (const each of [this.wanted, this.growing]) each.disabled = state === "ended";
    if (state === "ended") this.closing.disabled = true;
  }
};
