/* One timeline as lanes of ops, a rank each; drawn in the shapes and colours of the still pictures (mmlab/plan/picture.py). */
const LANE_PAD = 6; // px left and right of the plot, so that ticks and bars at its ends are whole
const LANE_INK = "#1a202c"; // on bars, which keep their colours in both themes
const LANE_HEIGHT = { compute: 1, move: 0.66, wait: 0.3 };

function laneTicks(span, width) { // round distances, 64 px at least for a label such as "1,200 ms"
  const raw = span / Math.max(1, Math.min(12, width / 80));
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * size).find((each) => each >= raw * 0.999);
  return Array.from({ length: Math.floor(span / step + 1e-6) + 1 }, (_, index) => index * step);
}

class Lanes {
  /* `owner` (the panel) is told what is pointed at: owner.point(lanes, op or null), and asked for keys of its own. */
  constructor(owner, title) {
    this.owner = owner;
    this.key = `mm-lanes-${Math.random().toString(36).slice(2)}`;
    this.title = make("h4", {}, title);
    this.labels = make("div", { class: "mm-lane-labels", "aria-hidden": "true" });
    this.shares = make("div", { class: "mm-lane-shares", "aria-hidden": "true" });
    this.plot = make("div", { class: "mm-lane-plot", tabindex: 0, role: "group", "aria-label": title, "aria-roledescription": t("timeline"),
      onkeydown: (event) => this.typed(event), onmousemove: (event) => this.pointed(event), onmouseleave: () => owner.point(this, null), onscroll: () => owner.scrolled(this),
      onblur: () => owner.point(this, null), onfocus: () => this.plot.matches(":focus-visible") && this.select(this.at ?? { row: 0, index: 0 }) });
    this.node = make("div", { class: "mm-lane-block" }, this.title, make("div", { class: "mm-lane-grid" }, this.labels, this.plot, this.shares));
    this.at = null;
  }

  /* `data` {ops, span, bubble, idle}; `look` {rows, kinds, scale (to the axis), span (of the axis), time (formats), width, after}. */
  show(data, look) {
    this.data = data;
    this.look = look;
    this.pitch = look.rows.length > 12 ? 19 : 27;
    this.node.style.setProperty("--mm-pitch", `${this.pitch}px`);
    this.labels.replaceChildren(...look.rows.map(([rank, label]) => make("div", { title: `${t("rank {0}", rank)}: ${label}` }, make("b", {}, String(rank)), ` ${label}`)));
    this.shares.replaceChildren(...data.idle.map((share, row) => make("div", { class: look.rows[row][2] ? "mm-soft" : null,
      title: look.rows[row][2] ? t("does not compute for this share of the stages' time; not counted in the bubble") : t("does not compute for this share of the stages' time") },
      look.rows[row][2] ? `(${lanePercent(share)})` : lanePercent(share))));
    this.draw();
  }

  x(time) { return LANE_PAD + (time * this.look.scale / this.look.span) * (this.width - 2 * LANE_PAD); }

  middle(row) { return row * this.pitch + this.pitch / 2; }

  draw() {
    const { rows, span, time } = this.look;
    this.width = Math.max(120, Math.floor(this.look.width * this.owner.zoom));
    const bottom = rows.length * this.pitch, height = bottom + 20;
    const ops = drawn("g", { id: `${this.key}-ops` });
    this.data.ops.forEach((line, row) => {
      ops.append(drawn("line", { x1: LANE_PAD, x2: this.width - LANE_PAD, y1: this.middle(row), y2: this.middle(row), class: "mm-lane-idle", "stroke-width": (this.pitch - 5) * 0.3 }));
      const waits = line.filter(([kind]) => this.look.kinds[kind][4] === "wait");
      const others = line.filter(([kind]) => this.look.kinds[kind][4] !== "wait");
      for (const op of [...waits, ...others]) if (op[4] > op[3]) ops.append(...this.bar(op, row)); // waits first, so that short transfers beside them stay visible
    });
    const grid = drawn("g", {});
    for (const tick of laneTicks(span, this.width)) {
      const x = this.x(tick / this.look.scale);
      grid.append(drawn("line", { x1: x, x2: x, y1: 0, y2: bottom + 3, class: "mm-lane-rule" }),
        drawn("text", { x, y: bottom + 15, class: "mm-lane-tick", "text-anchor": tick === 0 ? "start" : x > this.width - 24 ? "end" : "middle" }, time(tick, true)));
    }
    this.ghost = drawn("use", { href: `#${this.key}-ops` });
    this.clip = drawn("rect", { x: 0, y: 0, width: this.width, height });
    this.full = drawn("use", { href: `#${this.key}-ops`, "clip-path": `url(#${this.key}-clip)` });
    this.over = drawn("g", {});
    this.cursor = drawn("line", { y1: 0, y2: bottom + 3, class: "mm-lane-cursor" });
    this.plot.replaceChildren(drawn("svg", { width: this.width, height, viewBox: `0 0 ${this.width} ${height}`, "aria-hidden": "true" },
      drawn("defs", {}, ops, drawn("clipPath", { id: `${this.key}-clip` }, this.clip)), grid, this.ghost, this.full, this.over, this.cursor));
    this.moveTo(this.owner.cursor);
    this.mark();
  }

  bar([kind, microbatch, chunk, start, end], row) {
    const [, , colour, letter, shape] = this.look.kinds[kind];
    const x = this.x(start), width = Math.max(0.6, this.x(end) - x), full = this.pitch - 5, height = full * LANE_HEIGHT[shape];
    const fill = chunk ? `color-mix(in srgb, ${colour} ${Math.max(30, 100 * 0.55 ** chunk)}%, white)` : colour;
    const rect = drawn("rect", { x: x.toFixed(2), y: (this.middle(row) - height / 2).toFixed(1), width: width.toFixed(2), height: height.toFixed(1),
      class: shape === "wait" ? "mm-lane-wait" : width > 2.5 ? "mm-lane-bar" : null, style: shape === "wait" ? null : `fill:${fill}` });
    if (shape !== "compute" || microbatch < 0) return [rect];
    const text = [`${letter}${microbatch}`, String(microbatch)].find((each) => width >= 7 * each.length + 3);
    return text ? [rect, drawn("text", { x: (x + width / 2).toFixed(1), y: this.middle(row) + 4, "text-anchor": "middle", class: "mm-lane-name", fill: LANE_INK }, text)] : [rect];
  }

  /* What has run by a time of the axis is drawn whole, what is to come is pale; null: everything is drawn. */
  moveTo(time) {
    if (!this.data) return;
    const playing = time !== null;
    this.ghost.setAttribute("opacity", playing ? 0.16 : 1);
    this.full.setAttribute("display", playing ? "inline" : "none");
    this.cursor.setAttribute("display", playing ? "inline" : "none");
    if (!playing) return;
    const x = this.x(time / this.look.scale);
    this.clip.setAttribute("width", x);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }

  pointed(event) {
    const box = this.plot.firstChild.getBoundingClientRect();
    const x = event.clientX - box.left, row = Math.floor((event.clientY - box.top) / this.pitch);
    const line = this.data.ops[row] ?? [];
    let best = null, least = 5; // px beside an op that still count, so that a short one can be hit
    line.forEach(([, , , start, end], index) => {
      const off = Math.max(this.x(start) - x, x - this.x(end), 0);
      if (off < least || (off === least && best !== null && end - start < line[best][4] - line[best][3])) { best = index; least = off; }
    });
    this.select(best === null ? null : { row, index: best });
  }

  select(at) { this.at = at ?? this.at; this.owner.point(this, at); }

  typed(event) {
    if (this.owner.typed(event)) return;
    const at = this.at ?? { row: 0, index: 0 }, line = this.data.ops[at.row];
    const to = { ArrowLeft: () => ({ row: at.row, index: at.index - 1 }), ArrowRight: () => ({ row: at.row, index: at.index + 1 }), Home: () => ({ row: at.row, index: 0 }),
      End: () => ({ row: at.row, index: line.length - 1 }), ArrowUp: () => this.beside(at, -1), ArrowDown: () => this.beside(at, 1) }[event.key]?.();
    if (!to) return;
    event.preventDefault();
    event.stopPropagation(); // notebooks move between cells on arrows
    if (!this.data.ops[to.row]?.[to.index]) return;
    this.select(to);
    this.reveal(this.x(this.data.ops[to.row][to.index][3]));
  }

  beside(at, by) { // the op of the next lane that runs at the same time
    const line = this.data.ops[at.row + by];
    if (!line) return at;
    const [, , , start, end] = this.data.ops[at.row][at.index], middle = (start + end) / 2;
    const off = ([, , , from, to]) => Math.max(from - middle, middle - to, 0);
    return { row: at.row + by, index: line.reduce((best, op, index) => (off(op) < off(line[best]) ? index : best), 0) };
  }

  reveal(x) {
    const { scrollLeft, clientWidth } = this.plot;
    if (x < scrollLeft + 20 || x > scrollLeft + clientWidth - 60) this.plot.scrollLeft = Math.max(0, x - clientWidth / 3);
  }

  /* Frame the op pointed at, and draw where it got from what it waited for. */
  mark() {
    const at = this.owner.marked(this);
    this.over.replaceChildren();
    const op = at && this.data.ops[at.row]?.[at.index];
    if (!op) return;
    const x = this.x(op[3]), width = Math.max(3, this.x(op[4]) - x);
    for (const { row, op: other } of this.owner.sources(this, at.row, op)) {
      if (this.look.kinds[other[0]][0].startsWith("send")) this.over.append(drawn("path", { class: "mm-lane-link", d: `M${this.x(other[4])},${this.middle(row)} L${x + width},${this.middle(at.row)}` }));
    }
    this.over.append(drawn("rect", { class: "mm-lane-mark", x: x - 1, y: at.row * this.pitch + 1, width: width + 2, height: this.pitch - 2, rx: 2 }));
  }
}

function lanePercent(share) { return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`; }
