/* Time per phase of each rank. */
const PHASE_COLOURS = ["data", "encode", "forward", "backward", "exchange", "pipeline", "reduce", "optimizer", "idle"];

PANELS.phases = class extends Panel {
  static title = "Time per phase";

  constructor(store, name) {
    super(store, name);
    this.keys = make("div", { class: "mm-keys" });
    this.rows = make("div", { class: "mm-rows", tabindex: 0, role: "group", "aria-label": t("Time per phase for each rank") });
    this.node.append(make("h4", {}, t("Time per phase, mean of the last steps (ms a step)")), this.keys, this.rows);
  }

  update() {
    const { names = [], roles = [], ranks = 0 } = this.frame;
    const rows = Array.from({ length: ranks }, (_, rank) => this.frame[`row ${rank}`]);
    const totals = rows.map((row) => row.reduce((sum, value) => sum + value, 0));
    const most = Math.max(1e-9, ...totals);
    const colour = (name) => `var(--mm-${PHASE_COLOURS.includes(name) ? name : "other"})`;
    this.keys.replaceChildren(...names.map((name) => make("span", {}, make("i", { style: `background:${colour(name)}` }), t(name))));
    this.rows.replaceChildren(...rows.map((row, rank) => {
      const role = roles[rank] ?? "";
      const words = names.map((name, index) => `${t(name)} ${row[index].toFixed(1)} ms`).filter((_, index) => row[index] > 0).join(", ");
      const parts = row.flatMap((value, index) => value <= 0 ? [] : make("i", { style: `width:${(100 * value) / most}%;background:${colour(names[index])}`, title: `${t(names[index])} ${value.toFixed(1)} ms` }));
      return make("div", { class: "mm-row" }, make("span", { title: `${t("rank {0}", rank)}: ${role}` }, `${rank}  ${role}`),
        make("div", { class: "mm-stack", role: "img", "aria-label": `${t("rank {0}", rank)}, ${role}: ${words}` }, ...parts),
        make("span", {}, totals[rank].toFixed(0)));
    }));
  }
};
