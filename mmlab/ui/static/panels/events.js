/* The last events of a run. */
PANELS.events = class extends Panel {
  static title = "Last events";

  constructor(store, name) {
    super(store, name);
    this.list = make("ol", { class: "mm-list", role: "log", "aria-label": t("Last events"), tabindex: 0 });
    this.node.append(make("h4", {}, t("Last events")), this.list);
  }

  update() {
    this.list.replaceChildren(...(this.frame.events ?? []).map((event) => make("li", { class: event.bad ? "mm-bad" : null }, make("time", {}, event.time), make("span", {}, event.text))));
    this.list.scrollTop = this.list.scrollHeight;
  }
};
