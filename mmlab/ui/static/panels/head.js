/* State, progress and figures of a run. */
const ICONS = { running: "▶", paused: "❚❚", finished: "✓", failed: "✕", stopped: "■", deleted: "∅", queued: "…", starting: "…" };

PANELS.head = class extends Panel {
  static title = "State";

  constructor(store, name) {
    super(store, name);
    this.state = make("span", { class: "mm-state", role: "status" }, "…");
    this.run = make("span", { class: "mm-name" });
    this.fill = make("i");
    this.bar = make("div", { class: "mm-bar", role: "progressbar", "aria-label": t("Steps"), "aria-valuemin": 0 }, this.fill);
    this.count = make("span", {}, t("step {0} of {1}", "–", "–"));
    this.reason = make("p", { class: "mm-reason", role: "alert" });
    this.figures = {};
    const figures = [["loss", t("loss")], ["held_out", t("held-out loss")], ["tokens_per_s", t("tokens/s")], ["images_per_s", t("images/s")],
      ["seconds", t("s a step")], ["data", t("data wait, steps ahead")], ["left", t("time left")]].map(([key, label]) => {
      this.figures[key] = make("b", {}, "–");
      return make("div", { class: "mm-figure" }, this.figures[key], make("span", {}, label));
    });
    this.node.append(make("div", { class: "mm-line" }, this.state, this.run, this.bar, this.count), this.reason,
      make("div", { class: "mm-figures" }, ...figures), this.coded = make("p", { class: "mm-coded" }));
  }

  update() {
    const frame = this.frame;
    this.state.dataset.state = frame.state;
    put(this.state, `${ICONS[frame.state] ?? ""} ${t(frame.state)}`);
    put(this.run, frame.name ?? "");
    put(this.reason, ["failed", "deleted"].includes(frame.state) ? frame.reason : "");
    const doing = frame.doing === frame.state ? "" : `, ${t(frame.doing)}`;
    put(this.count, t("step {0} of {1}", number(frame.step, 9), number(frame.steps, 9)) + doing);
    this.fill.style.width = `${Math.min(100, (100 * frame.step) / Math.max(1, frame.steps))}%`;
    this.bar.setAttribute("aria-valuemax", frame.steps);
    this.bar.setAttribute("aria-valuenow", frame.step);
    for (const key of ["loss", "held_out", "tokens_per_s", "images_per_s", "seconds"]) put(this.figures[key], number(frame[key]));
    put(this.figures.data, frame.data ?? "–");
    put(this.figures.left, ENDED.includes(frame.state) ? "–" : duration(frame.left));
    put(this.coded, frame.compression ?? "");
  }
};
