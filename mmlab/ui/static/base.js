/* What all panels share. Data comes as custom messages (see mmlab/ui/view.py); nothing of a run is a synced trait. */
const HERE_EVERY = 10_000; // ms between signs of life to the kernel, which slows down without them
const BUSY_AFTER = 2_000; // ms after which an unanswered request means that the kernel runs a cell
const GONE_AFTER = 15_000; // ms after which an unanswered sign of life means that the kernel runs a cell or is gone
const ASK_AGAIN = 1_000; // ms until a history that has not come is asked for again; doubles each time
const MOST_POINTS = 9_000; // points of a curve beyond which the view asks for the decimated history again
const ENDED = ["finished", "stopped", "failed", "deleted"];

/* ---- words: each text that a person reads goes through t(), with {0}, {1} for values ---- */
let words = {};
let spoken = "en"; // the language of words, for screen readers
function speak(language) { // zh, zh-CN, zh_Hans_CN: the catalogue of that language, whatever the place; without one English
  const main = (code) => code.toLowerCase().split(/[-_.]/)[0];
  spoken = Object.keys(CATALOGUES).find((key) => main(key) === main(language ?? "")) ?? "en";
  words = CATALOGUES[spoken] ?? {};
}
function t(text, ...values) { return (words[text] ?? text).replace(/\{(\d)\}/g, (_, index) => values[index]); }

function dressed(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function make(tag, attributes = {}, ...children) { return dressed(document.createElement(tag), attributes, children); }

function drawn(tag, attributes = {}, ...children) { return dressed(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children); }

function put(node, text) { if (node.textContent !== text) node.textContent = text; }

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size === 0 || size >= 1e-3) return String(Number(value.toPrecision(digits)));
  return Number(value.toPrecision(3)).toExponential();
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return t("{0} s", whole);
  if (whole < 3600) return t("{0} min {1} s", Math.floor(whole / 60), String(whole % 60).padStart(2, "0"));
  return t("{0} h {1} min", Math.floor(whole / 3600), String(Math.floor((whole % 3600) / 60)).padStart(2, "0"));
}

function bytes(count) {
  if (count === null || count === undefined) return "–";
  const [unit, many] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]].find(([, size]) => count >= size) ?? ["B", 1];
  return `${Number((count / many).toPrecision(3))} ${unit}`;
}

/* A button; what cannot be undone takes a second click within four seconds (`sure`). */
function button(label, action, { title = null, sure = false, ...extra } = {}) {
  const node = make("button", { type: "button", title, ...extra }, label);
  let timer = null;
  const calm = () => { clearTimeout(timer); timer = null; put(node, label); };
  node.addEventListener("click", (event) => {
    if (!sure) { action(event); return; }
    if (timer !== null) { calm(); action(event); return; }
    put(node, t("Really {0}", label.toLowerCase()));
    timer = setTimeout(calm, 4000);
  });
  return node;
}

/* Notebooks have keyboard commands of their own: what is typed into a field stays there. */
function field(attributes, enter = null) {
  const node = make("input", attributes);
  node.addEventListener("keydown", (event) => { event.stopPropagation(); if (event.key === "Enter" && enter) enter(); });
  return node;
}

/* A choice, as field(). */
function chooser(attributes, ...options) { return make("select", { onkeydown: (event) => event.stopPropagation(), ...attributes }, ...options); }

/* A table of texts, nodes, or whole cells; `named`: the first cell of a row is its name. */
function table(headers, rows, { caption = "", named = false } = {}) {
  const cell = (content, tag = "td", attributes = {}) => (content instanceof HTMLTableCellElement ? content : make(tag, attributes, content));
  const cells = ([first, ...rest]) => [named ? cell(first, "th", { scope: "row" }) : cell(first), ...rest.map((each) => cell(each))];
  return make("table", {}, ...(caption ? [make("caption", {}, caption)] : []), make("thead", {}, make("tr", {}, ...headers.map((text) => cell(text, "th", { scope: "col" })))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row)))));
}

/* ---- curves: bounded by asking for the decimated history when they grow too long ---- */
class Curves {
  constructor() { this.all = {}; this.names = []; }

  take(sizes, buffers, replace) {
    if (replace) { this.all = {}; this.names = []; }
    sizes.forEach(([name, count], index) => {
      const known = typeof name === "number";
      if (!known) this.names.push(name);
      const copy = (view) => view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
      const x = new Float64Array(copy(buffers[2 * index]));
      const y = new Float32Array(copy(buffers[2 * index + 1]));
      const curve = (this.all[known ? this.names[name] : name] ??= { x: [], y: [] });
      for (let i = 0; i < count; i++) { curve.x.push(x[i]); curve.y.push(y[i]); }
    });
  }

  get(name) { const curve = this.all[name] ?? { x: [], y: [] }; return [curve.x, curve.y]; }

  longest() { return Math.max(0, ...Object.values(this.all).map((curve) => curve.x.length)); }
}

/* ---- what a widget has got from the kernel, shared by all its views: a new view shows it at once ---- */
class Store {
  constructor(model) {
    this.model = model;
    this.frames = {};
    this.curves = new Curves();
    this.seq = null; // number of the last message taken; null while the history is on its way
    this.views = new Set();
    this.asked = new Map(); // token -> {resolve, reject, timer}
    this.page = Math.random().toString(36).slice(2); // which page says what is in sight
    this.heard = Date.now();
    this.unanswered = null; // since when a sign of life has had no answer
    this.onMessage = (message, buffers) => this.receive(message, buffers ?? []);
    model.on("msg:custom", this.onMessage);
    this.speak();
    this.hello();
  }

  dispose() {
    this.model.off("msg:custom", this.onMessage);
    clearTimeout(this.again);
    this.asked.forEach(({ timer }) => clearTimeout(timer));
  }

  get layout() { return this.model.get("layout_"); }

  shown() { return [...new Set([...this.views].flatMap((view) => view.shown()))]; }

  here() {
    this.unanswered ??= Date.now();
    this.post({ kind: "here", ...this.sight() });
  }

  post(content) { // refused when the kernel was started anew: it does not know the view
    try { this.model.send(content); return true; } catch { return false; }
  }

  sight() { // the extension's renderer takes a new picture without drawing the view anew
    const renewable = [...this.views].some(({ root }) => root.closest(".mmlab-outlives"));
    return { page: this.page, shown: this.shown(), renewable };
  }

  speak() { speak(this.model.get("language") || document.documentElement.lang); }

  hello(wait = ASK_AGAIN) { // a page that is just reconnecting loses messages, so ask until the history is here
    this.seq = null;
    this.post({ kind: "hello", language: spoken, ...(this.views.size ? this.sight() : {}) });
    clearTimeout(this.again);
    this.again = setTimeout(() => { if (this.seq === null) this.hello(Math.min(2 * wait, 60_000)); }, wait);
  }

  /* A request to a panel; resolves with its answer, rejects with an Error that says the refusal. `busy` is called when
     the kernel has not answered for a while: it runs a cell and will answer afterwards. */
  ask(panel, verb, args = {}, busy = null) {
    const token = Math.random().toString(36).slice(2);
    return new Promise((resolve, reject) => {
      this.asked.set(token, { resolve, reject, timer: busy && setTimeout(busy, BUSY_AFTER) });
      if (this.post({ kind: "ask", token, panel, verb, args })) return;
      clearTimeout(this.asked.get(token).timer);
      this.asked.delete(token);
      reject(new Error(t("the kernel that had this view is gone; run the cell again")));
    });
  }

  receive(message, buffers) {
    this.heard = Date.now();
    this.unanswered = null;
    if (message.kind === "here") { for (const view of this.views) view.answered(); return; }
    if (message.kind === "reply") { this.reply(message, buffers); return; }
    const history = message.kind === "history";
    if (!history && this.seq === null) return;
    if (!history && message.seq !== this.seq + 1) { this.hello(); return; }
    this.seq = message.seq;
    const changed = this.moved(message);
    for (const [name, frame] of Object.entries(changed)) this.frames[name] = history ? frame : { ...this.frames[name], ...frame };
    this.curves.take(message.curves, buffers, history);
    if (this.curves.longest() > MOST_POINTS) this.hello();
    for (const view of this.views) view.update(history ? this.frames : changed, history || message.curves.length > 0);
  }

  moved({ frames, moved = {} }) { // lists that only moved on are told by what went at the front and came at the end
    const all = { ...frames };
    for (const [name, lists] of Object.entries(moved)) {
      all[name] = { ...all[name] };
      for (const [key, [gone, came]] of Object.entries(lists)) all[name][key] = [...this.frames[name][key].slice(gone), ...came];
    }
    return all;
  }

  reply({ token, value, refusal }, buffers) {
    const asked = this.asked.get(token);
    if (!asked) return; // another page's
    this.asked.delete(token);
    clearTimeout(asked.timer);
    if (refusal === undefined) asked.resolve(buffers.length ? { ...value, buffers } : value); else asked.reject(new Error(refusal));
  }
}

/* ---- one panel; each file in panels/ registers a class in PANELS under the name of its Python side ---- */
const PANELS = {};

class Panel {
  static title = ""; // its heading, and its tab's name
  static curved = false; // whether it draws curves: else messages with nothing but points, five a second, are not its own

  constructor(store, name) {
    this.store = store;
    this.name = name;
    this.node = make("section", { class: `mm-panel mm-${name}`, "aria-label": t(this.constructor.title) });
  }

  get frame() { return this.store.frames[this.name] ?? {}; }

  get curves() { return this.store.curves; }

  ask(verb, args = {}, busy = null) { return this.store.ask(this.name, verb, args, busy); }

  trouble(text) { // its kernel side failed: the others go on
    this.node.querySelector(":scope > .mm-trouble")?.remove();
    if (text) this.node.prepend(make("p", { class: "mm-trouble mm-bad", role: "alert" }, t("{0} cannot be shown right now: {1}", t(this.constructor.title), text)));
  }

  update(changed, curves) {} // `changed`: the keys of the frame that have changed; `curves`: whether points came

  restyle(style) {} // the theme has changed, or the panel has come into sight for the first time: computed style

  resize() {}

  dispose() {}
}
