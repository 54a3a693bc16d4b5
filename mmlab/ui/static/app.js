/* Mounts a view's panels: stacked, or as the board with tabs for what is not always in sight. */
const ALWAYS = ["head", "controls"];
const OVERVIEW = ["charts", "phases", "events"];
const FOCUSABLE = "button, input, select, textarea, summary, a[href], [tabindex]";
const FOCUS_KEPT = 5_000; // ms after its last use for which a renewed view gives the keyboard back to what had it
const THEMES = ["data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind", "class", "theme"];

class App {
  constructor(store, el) {
    this.store = store;
    const { label, arrangement, panels } = store.layout;
    this.root = make("div", { class: "mm-board", role: "region", lang: spoken, "aria-label": t(label) });
    this.panels = Object.fromEntries(panels.map((name) => [name, new PANELS[name](store, name)]));
    this.notice = make("p", { class: "mm-notice", role: "status" });
    this.reading = make("b");
    this.root.append(this.notice, make("div", { class: "mm-reading" }, this.reading)); // of no height: nothing moves when it comes and goes
    if (arrangement === "board") this.board(panels); else this.stack(panels);
    el.append(this.root);
    this.listen();
  }

  stack(panels) { this.sight = panels; this.root.append(...panels.map((name) => this.panels[name].node)); }

  board(panels) {
    const there = (names) => names.filter((name) => panels.includes(name));
    const others = panels.filter((name) => !ALWAYS.includes(name) && !OVERVIEW.includes(name));
    this.root.append(...there(ALWAYS).map((name) => this.panels[name].node));
    const overview = make("div", { class: "mm-grid" }, ...there(OVERVIEW).map((name) => this.panels[name].node));
    if (!others.length) { this.sight = panels; this.root.append(overview); return; }
    const pages = [[t("Overview"), there(OVERVIEW), overview], ...others.map((name) => [t(PANELS[name].title), [name], this.panels[name].node])];
    const key = `mm-${Math.random().toString(36).slice(2)}`;
    this.tabs = pages.map(([title], index) => make("button", { type: "button", role: "tab", id: `${key}-tab-${index}`, "aria-controls": `${key}-page-${index}`,
      onclick: () => this.turn(index), onkeydown: (event) => this.arrow(event, index) }, title));
    this.pages = pages.map(([, names, node], index) => ({ names, node: make("div", { role: "tabpanel", id: `${key}-page-${index}`, "aria-labelledby": `${key}-tab-${index}`, class: "mm-page" }, node) }));
    this.root.append(make("div", { class: "mm-tabs", role: "tablist", "aria-label": t("Parts of the dashboard") }, ...this.tabs), ...this.pages.map((page) => page.node));
    this.always = there(ALWAYS);
    this.turn(this.store.tab ?? 0, false);
  }

  arrow(event, index) {
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: this.tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = (to + this.tabs.length) % this.tabs.length;
    this.turn(next);
    this.tabs[next].focus();
  }

  turn(index, tell = true) {
    this.store.tab = index;
    this.tabs.forEach((tab, each) => { tab.setAttribute("aria-selected", each === index); tab.tabIndex = each === index ? 0 : -1; });
    this.pages.forEach((page, each) => { page.node.hidden = each !== index; });
    this.sight = [...this.always, ...this.pages[index].names];
    if (!tell) return;
    this.store.here();
    this.restyle();
    this.each((panel) => panel.resize());
    this.update(this.store.frames, true);
  }

  shown() { return this.sight; }

  listen() {
    this.sizes = new ResizeObserver(() => {
      if (!this.root.clientWidth) return;
      this.restyle();
      this.each((panel) => panel.resize());
    });
    this.sizes.observe(this.root);
    this.themes = new MutationObserver(() => this.restyle());
    for (const node of [document.documentElement, document.body]) this.themes.observe(node, { attributes: true, attributeFilter: THEMES });
    for (const kind of ["focusin", "keydown", "click"]) this.root.addEventListener(kind, () => this.use());
    this.root.addEventListener("focusout", ({ relatedTarget }) => { if (relatedTarget && !this.root.contains(relatedTarget)) this.store.used = null; });
    this.timer = setInterval(() => { this.store.here(); this.quiet(); }, HERE_EVERY);
    this.store.views.add(this);
    this.store.here();
    if (Object.keys(this.store.frames).length) this.update(this.store.frames, true);
    else this.silence = setTimeout(() => this.silent(), BUSY_AFTER);
    requestAnimationFrame(() => this.refocus());
  }

  places() { return [...this.root.querySelectorAll(FOCUSABLE)].map((node) => [node.closest(".mm-panel")?.getAttribute("aria-label") ?? "", node]); }

  use() { // the kernel replaces the cell's output when a run pauses: note what has the keyboard
    const places = this.places();
    const index = places.findIndex(([, node]) => node === document.activeElement);
    if (index < 0) return;
    const [panel] = places[index];
    this.store.used = { panel, nth: places.slice(0, index).filter(([name]) => name === panel).length, at: Date.now() };
  }

  refocus() {
    const { panel, nth, at } = this.store.used ?? { at: -Infinity };
    if (Date.now() - at > FOCUS_KEPT || document.activeElement !== document.body) return;
    this.places().filter(([name]) => name === panel)[nth]?.[1].focus({ preventScroll: true });
  }

  silent() { // no kernel, or one that runs a cell
    const still = this.store.model.get("still");
    put(this.notice, still ? t("No kernel answers; this is how it stood last.") : t("no data from the kernel yet; it answers after the cell that it is running"));
    if (still) { this.still = make("div", { class: "mm-still" }); this.still.innerHTML = still; this.notice.after(this.still); }
  }

  quiet() { // what is shown may be old: nothing has come, not even an answer
    const { unanswered, heard } = this.store;
    if (this.silence || unanswered === null || Date.now() - unanswered < GONE_AFTER) return;
    const since = new Date(heard).toLocaleTimeString("en-GB");
    put(this.notice, t("The kernel has not answered since {0}: it runs a cell, or it is gone.", since));
  }

  answered() { if (!this.silence) put(this.notice, ""); }

  each(action) { for (const name of this.sight) action(this.panels[name], name); }

  update(changed, curves) {
    this.answered();
    if (this.silence) { clearTimeout(this.silence); this.silence = null; put(this.notice, ""); this.still?.remove(); }
    if (changed.part) this.tellReading(changed.part.reading);
    this.each((panel, name) => {
      if (changed[name] && "problem" in changed[name]) panel.trouble(changed[name].problem);
      if (!this.store.frames[name]) return; // turned to before the first message
      if (changed[name] || (curves && panel.constructor.curved)) panel.update(changed[name] ?? {}, curves);
    });
  }

  tellReading(percent) { // of a long log; what panels show meanwhile is as far as it has been read
    put(this.reading, percent === null ? "" : t("reading the log: {0} %", percent));
  }

  restyle() { // panels in sight that have not been drawn in this theme yet
    const style = getComputedStyle(this.root);
    const [r, g, b] = (style.backgroundColor.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
    this.root.classList.toggle("mm-dark", 0.3 * r + 0.59 * g + 0.11 * b < 128);
    if (!this.root.clientWidth) return;
    const theme = `${style.backgroundColor} ${style.color}`;
    this.each((panel) => { if (panel.theme !== theme) { panel.theme = theme; panel.restyle(style); } });
  }

  dispose() {
    this.store.views.delete(this);
    this.store.here();
    this.sizes.disconnect();
    this.themes.disconnect();
    clearInterval(this.timer);
    clearTimeout(this.silence);
    Object.values(this.panels).forEach((panel) => panel.dispose());
  }
}

function mount(store, el) {
  store.speak();
  el.append(make("style", {}, STYLE));
  const app = new App(store, el);
  return () => app.dispose();
}

export { Store, mount };
