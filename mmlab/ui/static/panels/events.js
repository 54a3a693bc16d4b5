/* The last events of a run. */
PANELS.events = class extends Panel {
  static title = "Last events";

  constructor(store, name) {
    super(store, name);
    this.list = make("ol");
    this.log = make("div", { class: "mm-list", role: "log", "aria-label": t("Last events"), tabindex: 0 }, this.list);
    this.node.append(make("h4", {}, t("Last events")), this.log);
  }

  update() {
    this.list.replaceChildren(...(this.frame.events ?? []).map((event) => make("li", { class: event.bad ? "mm-bad" : null }, make("time", {}, event.time), make("span", {}, event.text))));
    this.log.scrollTop = this.log.scrollHeight;
  }
};
