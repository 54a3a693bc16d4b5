/* The last events of a run. */
const EVENTS_NEAR = 24; // px from the end within which a reader follows it

PANELS.events = class extends Panel {
  static title = "Last events";

  constructor(store, name) {
    super(store, name);
    this.list = make("ol");
    this.log = make("div", { class: "mm-list", role: "log", "aria-label": t("Last events"), tabindex: 0, onscroll: () => this.scrolled() }, this.list);
    this.follows = true;
    this.node.append(make("h4", {}, t("Last events")), this.log);
  }

  update() {
    const { events = [] } = this.frame;
    const told = JSON.stringify(events);
    if (told !== this.told) { // all comes again when another page opens the view: who reads here is left in peace
      this.told = told;
      this.list.replaceChildren(...events.map((event) => make("li", { class: event.bad ? "mm-bad" : null }, make("time", {}, event.time), make("span", {}, event.text))));
    }
    this.toEnd();
  }

  toEnd() { if (this.follows) this.log.scrollTop = this.log.scrollHeight; }

  scrolled() { // who scrolls up reads: the list stands still until its end is in sight again
    if (this.log.clientHeight) this.follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < EVENTS_NEAR;
  }

  restyle() { this.toEnd(); }
};
