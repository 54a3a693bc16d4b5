/* What ranks print: all or one, filtered, followed; colours of terminals are shown or left out. */
const LOG_NEAR = 24; // px from the end within which a reader follows it
const LOG_SHOWN = 2_000; // lines in the page
const LOG_COLOURS = { 31: "red", 32: "green", 33: "orange", 34: "blue", 35: "violet", 36: "blue", 90: "grey", 91: "red", 92: "green", 93: "orange", 94: "blue", 95: "violet", 96: "blue" };

function withoutCodes(text) { return text.replace(/\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*(\x07|\x1b\\)|\x1b./g, ""); }

/* A line's text with its terminal colours as spans. */
function coloured(text) {
  const parts = [];
  let style = {};
  text.split(/\x1b\[([0-9;]*)m/).forEach((part, index) => {
    if (index % 2 === 0) {
      const plain = withoutCodes(part);
      if (plain) parts.push(style.colour || style.bold ? make("span", { style: `${style.colour ? `color:var(--mm-${style.colour});` : ""}${style.bold ? "font-weight:700" : ""}` }, plain) : plain);
      return;
    }
    for (const code of part.split(";").map(Number)) {
      if (code === 0) style = {};
      else if (code === 1) style = { ...style, bold: true };
      else if (code === 22) style = { ...style, bold: false };
      else if (code === 39) style = { ...style, colour: null };
      else if (LOG_COLOURS[code]) style = { ...style, colour: LOG_COLOURS[code] };
    }
  });
  return parts;
}

PANELS.log = class extends Panel {
  static title = "Log";

  constructor(store, name) {
    super(store, name);
    this.seen = 0; // number of the line that comes next
    this.lines = []; // [rank, text], as they came
    this.kept = null; // lines of one rank that were asked for, with what came since
    this.rank = chooser({ "aria-label": t("Rank"), onchange: () => this.choose() }, make("option", { value: "all" }, t("all ranks")));
    this.filter = field({ type: "search", placeholder: t("filter"), "aria-label": t("Show only lines with this text"), oninput: () => this.again() });
    this.count = chooser({ "aria-label": t("Last lines"), onchange: () => this.choose() }, ...[200, 500, 2000].map((count) => make("option", { value: count }, t("last {0}", count))));
    this.follow = field({ type: "checkbox", checked: true, onchange: () => { if (this.follow.checked) this.toEnd(); } });
    this.colours = field({ type: "checkbox", checked: true, onchange: () => this.again() });
    this.wrap = field({ type: "checkbox", checked: true, onchange: () => this.list.classList.toggle("mm-nowrap", !this.wrap.checked) });
    this.said = make("span", { class: "mm-log-said", role: "status" });
    this.list = make("div", { class: "mm-lines", role: "log", "aria-live": "off", "aria-label": t("What ranks print"), tabindex: 0, onscroll: () => this.scrolled(), onkeydown: (event) => event.stopPropagation() });
    this.node.append(make("div", { class: "mm-tools" }, this.rank, this.count, this.filter,
      ...[[this.follow, t("follow")], [this.colours, t("colours")], [this.wrap, t("wrap lines")]].map(([input, label]) => make("label", { class: "mm-check" }, input, label)), this.said), this.list);
  }

  get chosen() { return this.rank.value === "all" ? null : Number(this.rank.value); }

  update(changed) {
    if ("roles" in changed) this.showRanks();
    const { first = 0, lines = [] } = this.frame;
    const fresh = lines.slice(Math.max(0, this.seen - first));
    this.seen = first + lines.length;
    if (!fresh.length) { this.say(); return; }
    this.lines = [...this.lines, ...fresh].slice(-LOG_SHOWN);
    if (this.kept) this.kept = [...this.kept, ...fresh.filter(([rank]) => rank === this.chosen)].slice(-LOG_SHOWN);
    this.add(fresh);
  }

  showRanks() {
    const chosen = this.rank.value;
    this.rank.replaceChildren(make("option", { value: "all" }, t("all ranks")), ...(this.frame.roles ?? []).map((role, rank) => make("option", { value: rank }, `${rank}  ${role}`)));
    this.rank.value = [...this.rank.options].some((option) => option.value === chosen) ? chosen : "all";
  }

  choose() { // one rank: its last lines come from its files, so that a talkative rank does not push out the others
    const rank = this.chosen;
    this.kept = null;
    this.again();
    if (rank === null) return;
    put(this.said, t("reading"));
    this.ask("read", { rank, lines: Number(this.count.value) }, () => put(this.said, t("the kernel runs a cell; these are the lines that came so far"))).then(
      ({ lines }) => { if (this.chosen === rank) { this.kept = lines.map((text) => [rank, text]); this.again(); } },
      (refusal) => put(this.said, refusal.message));
  }

  wanted([rank, text]) {
    const filter = this.filter.value.toLowerCase();
    return (this.chosen === null || rank === this.chosen) && (!filter || withoutCodes(text).toLowerCase().includes(filter));
  }

  line([rank, text]) {
    return make("div", { class: "mm-log-line" }, make("b", { style: `color:var(--mm-${["blue", "orange", "green", "violet"][rank % 4]})` }, `[${rank}] `), ...(this.colours.checked ? coloured(text) : [withoutCodes(text)]));
  }

  again() {
    this.list.replaceChildren();
    this.add(this.kept ?? this.lines);
  }

  add(lines) {
    const shown = lines.filter((line) => this.wanted(line)).slice(-Number(this.count.value));
    this.list.append(...shown.map((line) => this.line(line)));
    const extra = this.list.childElementCount - Number(this.count.value);
    if (extra > 0 && (this.follow.checked || extra > LOG_SHOWN)) for (let i = 0; i < extra; i++) this.list.firstChild.remove();
    this.say();
    if (this.follow.checked) this.toEnd();
  }

  say() {
    const standing = this.follow.checked ? "" : t(", not following: scroll to the end or tick follow");
    put(this.said, this.list.childElementCount ? (this.list.childElementCount === 1 ? t("1 line") : t("{0} lines", number(this.list.childElementCount, 9))) + standing : this.lines.length ? t("no line has that text") : t("no rank has printed anything yet"));
  }

  toEnd() { this.list.scrollTop = this.list.scrollHeight; }

  scrolled() { // who scrolls up reads: the text stands still until the end is in sight again
    const near = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < LOG_NEAR;
    if (near !== this.follow.checked) { this.follow.checked = near; this.say(); }
  }

  restyle() { if (this.follow.checked) this.toEnd(); }
};
