/* Hosts as boxes, ranks in them, groups as links with bytes a step: rails below a few ranks, lines on demand among many. */
const RANK_STATES = { dead: "✕", failed: "✕", stopped: "■", slow: "▲", waiting: "…", alive: "●", left: "○", absent: "–" };
const RANK_BAD = ["dead", "failed", "stopped", "slow", "waiting"];
const CARD = 62; // px that a rank's card needs at least to be read
const RAILS = 4; // lanes of an axis that are drawn; what is beyond them is told in words

/* Ranks as people write them: 0-3, 5. */
function rankSpans(ranks) {
  const spans = [];
  for (const rank of ranks) if (spans.at(-1)?.[1] === rank - 1) spans.at(-1)[1] = rank; else spans.push([rank, rank]);
  return spans.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join(", ");
}

PANELS.placement = class extends Panel {
  static title = "Placement";

  constructor(store, name) {
    super(store, name);
    this.at = 0; // the rank that is pointed at
    this.pointing = false;
    this.axis = null; // the axis whose groups are drawn among many ranks
    this.alarm = make("div", { class: "mm-ranks-alarm", tabindex: 0, role: "status", "aria-label": t("How the ranks are"), "aria-live": "polite" });
    this.axes = make("div", { class: "mm-lane-tools", role: "group", "aria-label": t("Draw the groups of") });
    this.plot = make("div", { class: "mm-ranks-plot", tabindex: 0, role: "group", "aria-label": t("Ranks on their hosts"), "aria-roledescription": t("map"),
      onkeydown: (event) => this.typed(event), onmousemove: (event) => this.hovered(event), onmouseleave: () => this.point(null),
      onfocus: () => this.plot.matches(":focus-visible") && this.point(this.at), onblur: () => this.point(null) });
    this.detail = make("p", { class: "mm-ranks-detail", role: "status", "aria-live": "polite" });
    this.slowest = make("p", { class: "mm-ranks-slowest" });
    this.asking = button(t("What holds it up?"), () => this.doctor(), { title: t("Look at every rank: which has not joined which call, and where in its code it is") });
    this.findings = make("pre", { class: "mm-ranks-findings", role: "status", tabindex: 0, hidden: true, "aria-label": t("What was found") });
    this.ranks = make("details", {}, make("summary", {}, t("Ranks as a table")), this.rankTable = make("div", { class: "mm-ranks-table" }));
    this.traffic = make("details", {}, make("summary", {}, t("Communication as a table")), this.linkTable = make("div", { class: "mm-ranks-table" }));
    [this.ranks, this.traffic].forEach((node) => node.addEventListener("toggle", () => this.tables()));
    this.node.append(make("div", { class: "mm-ranks-head" }, this.alarm, this.asking), this.findings, this.axes, this.plot, this.detail, this.slowest, this.ranks, this.traffic);
    this.point(null);
  }

  update(changed) {
    if (!this.frame.hosts) return;
    this.tell();
    if (["hosts", "places", "now", "links"].some((key) => key in changed)) this.draw();
    this.tables();
    put(this.slowest, this.frame.slowest ? t("Speed: {0}", this.frame.slowest) : "");
    if (this.pointing) put(this.detail, this.words(this.at));
  }

  label(rank) { return `${t("rank {0}", rank)} (${this.frame.places[rank][1]})`; }

  doing(rank) {
    const [state, phase, step, microbatch, seconds, , why] = this.frame.now[rank];
    if (why) return why;
    if (state === "absent") return t("not there yet");
    const what = t("{0} of step {1}", t(phase), step) + (microbatch >= 0 ? `, ${t("microbatch {0}", microbatch)}` : "") + (seconds && state !== "left" ? `, ${t("for {0}", duration(seconds))}` : "");
    return state === "dead" || state === "left" ? t("last in {0}", what) : what;
  }

  bad(rank) { return RANK_BAD.includes(this.frame.now[rank][0]); }

  tell() {
    const { now, state } = this.frame;
    const found = RANK_BAD.flatMap((each) => now.flatMap(([how], rank) => (how === each ? [rank] : [])));
    const alike = new Map(); // what is said: the ranks of which it is
    for (const rank of found) {
      const said = `${t(now[rank][0])}; ${this.doing(rank)}`;
      alike.set(said, [...(alike.get(said) ?? []), rank]);
    }
    const named = (ranks) => (ranks.length === 1 ? this.label(ranks[0]) : t("ranks {0}", rankSpans(ranks)));
    const groups = [...alike].slice(0, 6);
    const lines = groups.map(([said, ranks]) => `${RANK_STATES[now[ranks[0]][0]]} ${named(ranks)}: ${said}`);
    const rest = found.length - groups.reduce((sum, [, ranks]) => sum + ranks.length, 0);
    if (rest) lines.push(t("and {0} more ranks", rest));
    const alive = now.filter(([how]) => how === "alive").length;
    if (!found.length) lines.push(ENDED.includes(state) || !alive ? t("State of the run: {0}", t(state)) : alive === now.length ? t("All {0} ranks are alive.", alive) : t("{0} of {1} ranks are alive.", alive, now.length));
    if (this.alarm.textContent !== lines.join("")) this.alarm.replaceChildren(...lines.map((line, index) => make("p", { class: found.length && now[groups[index]?.[1][0]]?.[0] !== "waiting" ? "mm-bad" : null }, line)));
  }

  /* ---- the picture ---- */
  draw() {
    const width = this.node.clientWidth;
    if (!width || !this.frame.hosts) return;
    this.few = (width - 90) / this.frame.places.length - 4 >= CARD;
    this.boxes = []; // of ranks: {x, y, w, h}
    this.under = drawn("g", {});
    this.over = drawn("g", {});
    const shapes = this.few ? this.rails(width - 2) : this.tiles(width - 2);
    this.plot.replaceChildren(drawn("svg", { width: width - 2, height: this.height, viewBox: `0 0 ${width - 2} ${this.height}`, "aria-hidden": "true" }, ...shapes, this.over));
    this.offer();
    this.mark();
  }

  fit(text, width, size) { const most = Math.max(2, Math.floor(width / (0.54 * size))); return text.length > most ? `${text.slice(0, most - 1)}…` : text; }

  text(x, y, text, { size = 12, cls = "mm-ranks-text", anchor = "start" } = {}) { return drawn("text", { x, y, "font-size": size, class: cls, "text-anchor": anchor }, text); }

  host(name, x, y, w, h) { return drawn("g", {}, drawn("title", {}, name), drawn("rect", { x, y, width: w, height: h, rx: 7, class: "mm-ranks-host" }), this.text(x + 8, y + 15, this.fit(name, w - 14, 11.5), { size: 11.5, cls: "mm-ranks-soft" })); }

  rails(width) { // a column for each rank; below, a line for each group with a dot under each of its ranks
    const { hosts, places } = this.frame, left = 84, gap = 10, shapes = [];
    const column = (width - left - gap * (hosts.length - 1) - 2) / places.length, top = 22, tall = 110;
    const middle = [];
    let x = left;
    for (const [name, ranks] of hosts) {
      shapes.push(this.host(name, x, 1, column * ranks.length, top + tall + 6));
      for (const rank of ranks) {
        this.boxes[rank] = { x: x + 3, y: top, w: column - 6, h: tall };
        middle[rank] = x + column / 2;
        shapes.push(this.card(rank));
        x += column;
      }
      x += gap;
    }
    let y = top + tall + 14;
    for (const link of this.frame.links) y = this.rail(link, middle, y, left, shapes);
    this.height = y + 4;
    return shapes;
  }

  card(rank) {
    const { x, y, w, h } = this.boxes[rank], [state, phase, step, microbatch, seconds, behind] = this.frame.now[rank], [, role] = this.frame.places[rank];
    const centre = x + w / 2, line = (dy, text, size, cls) => this.text(centre, y + dy, this.fit(text, w - 4, size), { size, cls, anchor: "middle" });
    const doing = state === "absent" ? "" : t(phase) + (microbatch >= 0 ? ` ${microbatch}` : "");
    const words = role.split(" "), whole = role.length * 6 <= w - 4, [above, below] = whole ? [role, ""] : [words.slice(0, 2).join(" "), words.slice(2).join(" ")];
    return drawn("g", { class: `mm-ranks-${state}` }, drawn("title", {}, `${this.label(rank)}: ${t(state)}; ${this.doing(rank)}`), drawn("rect", { x, y, width: w, height: h, rx: 5, class: "mm-ranks-card" }),
      line(19, String(rank), 15, "mm-ranks-number"), line(35, above, 11, "mm-ranks-soft"), line(48, below, 11, "mm-ranks-soft"), line(67, `${RANK_STATES[state]} ${t(state)}`, 12, "mm-ranks-state"), line(84, doing, 11.5), line(100, behind > 0 ? t("{0} behind", behind) : seconds && state !== "left" ? duration(seconds) : state === "absent" ? "" : t("step {0}", step), 11, behind > 0 ? "mm-ranks-text" : "mm-ranks-soft"));
  }

  rail([axis, purpose, groups, counts], middle, y, left, shapes) {
    const lanes = [];
    groups.forEach((group, index) => { // groups whose lines would cross get lanes of their own
      const ends = [Math.min(...group.map((rank) => middle[rank])), Math.max(...group.map((rank) => middle[rank]))];
      let lane = lanes.find((each) => each.every(({ ends: [from, to] }) => ends[1] < from || ends[0] > to));
      if (!lane) lanes.push((lane = []));
      lane.push({ group, ends, count: counts[index] });
    });
    const most = Math.max(1, ...counts);
    shapes.push(drawn("g", {}, drawn("title", {}, t(purpose)), this.text(left - 8, y + 17, axis, { size: 12, anchor: "end" })));
    lanes.slice(0, RAILS).forEach((lane, row) => lane.forEach(({ group, ends, count }) => {
      const at = y + 13 + 25 * row;
      shapes.push(drawn("g", {}, drawn("title", {}, t("{0}: ranks {1}, {2} a step", t(purpose), group.join(", "), bytes(count))),
        drawn("line", { x1: ends[0], x2: ends[1], y1: at, y2: at, class: "mm-ranks-rail", "stroke-width": (1.5 + (3.5 * count) / most).toFixed(1) }), ...group.map((rank) => drawn("circle", { cx: middle[rank], cy: at, r: 5, class: "mm-ranks-stop" })),
        this.text(ends[0] + (ends[1] - ends[0]) / Math.max(1, group.length - 1) / 2, at - 5, bytes(count), { size: 10.5, cls: "mm-ranks-soft", anchor: "middle" })));
    }));
    const rest = lanes.slice(RAILS).flat();
    if (rest.length) shapes.push(this.text(left, y + 17 + 25 * RAILS, t("and {0} more groups, {1} a step", rest.length, bytes(rest.reduce((sum, each) => sum + each.count, 0))), { size: 11, cls: "mm-ranks-soft" }));
    return y + 25 * Math.min(RAILS, lanes.length) + (rest.length ? 20 : 0);
  }

  tiles(width) { // hosts side by side, ranks as small tiles
    const { hosts } = this.frame, size = 34, gap = 10, shapes = [], cards = [];
    const most = Math.max(...hosts.map(([, ranks]) => ranks.length)), room = Math.floor((width - 12) / size);
    const ways = [most, Math.ceil(most / 2), Math.ceil(most / 4)].map((each) => Math.max(2, Math.min(each, room))).map((across) => { // that with the least height
      const wide = across * size + 8, rows = Math.ceil(hosts.length / Math.max(1, Math.floor((width + gap) / (wide + gap))));
      return { across, wide, columns: Math.ceil(hosts.length / rows), height: rows * (Math.ceil(most / across) * size + 28 + gap) };
    });
    const { across, wide, columns } = ways.reduce((best, way) => (way.height < best.height ? way : best));
    let y = 1, tallest = 0;
    hosts.forEach(([name, ranks], index) => {
      if (index % columns === 0 && index) { y += tallest + gap; tallest = 0; }
      const x = 1 + (index % columns) * (wide + gap), tall = 24 + Math.ceil(ranks.length / across) * size + 4;
      shapes.push(this.host(name, x, y, wide, tall));
      ranks.forEach((rank, at) => { this.boxes[rank] = { x: x + 5 + (at % across) * size, y: y + 23 + Math.floor(at / across) * size, w: size - 2, h: size - 2 }; cards.push(this.tile(rank)); });
      tallest = Math.max(tallest, tall);
    });
    this.height = y + tallest + 3;
    return [...shapes, this.under, ...cards]; // links run below the tiles, whose numbers stay readable
  }

  tile(rank) {
    const { x, y, w, h } = this.boxes[rank], [state] = this.frame.now[rank], bad = this.bad(rank);
    return drawn("g", { class: `mm-ranks-${state}` }, drawn("title", {}, `${this.label(rank)}: ${t(state)}; ${this.doing(rank)}`), drawn("rect", { x, y, width: w, height: h, rx: 4, class: "mm-ranks-card" }),
      this.text(x + w / 2, y + (bad ? 14 : 21), String(rank), { size: 12, cls: "mm-ranks-number", anchor: "middle" }), ...(bad ? [this.text(x + w / 2, y + 27, RANK_STATES[state], { size: 12, cls: "mm-ranks-state", anchor: "middle" })] : []));
  }

  /* ---- among many ranks the groups of one axis, or of the rank pointed at ---- */
  offer() {
    const wanted = this.few ? "" : this.frame.links.map(([axis, , groups, counts]) => `${axis} ${groups.length} ${counts.reduce((sum, each) => sum + each, 0)} ${this.axis}`).join();
    if (this.axes.dataset.wanted === wanted) return;
    const focused = this.axes.contains(document.activeElement) ? this.axis : null;
    this.axes.dataset.wanted = wanted;
    this.axes.hidden = this.few || !this.frame.links.length;
    this.axes.replaceChildren(make("span", { class: "mm-soft" }, t("Groups, bytes a step:")), ...(this.few ? [] : this.frame.links.map(([axis, purpose, groups, counts]) => {
      const node = button(`${axis} ${groups.length} × ${groups[0]?.length ?? 0}, ${bytes(counts.reduce((sum, each) => sum + each, 0))}`, () => { this.axis = this.axis === axis ? null : axis; this.offer(); this.mark(); }, { title: t(purpose), "aria-pressed": String(this.axis === axis) });
      if (focused === axis) requestAnimationFrame(() => node.focus());
      return node;
    })));
  }

  mark() {
    if (!this.over) return;
    const lines = [], members = [], centre = (rank) => [this.boxes[rank].x + this.boxes[rank].w / 2, this.boxes[rank].y + this.boxes[rank].h / 2];
    if (!this.few) {
      for (const [axis, , groups] of this.frame.links) for (const group of groups) {
        if (axis !== this.axis && !(this.pointing && group.includes(this.at))) continue;
        lines.push(drawn("polyline", { points: group.map((each) => centre(each).join()).join(" "), class: "mm-ranks-link" }));
        members.push(...group.filter((each) => !this.bad(each)).map((each) => this.boxes[each]).map(({ x, y, w, h }) => drawn("rect", { x: x + 1, y: y + 1, width: w - 2, height: h - 2, rx: 4, class: "mm-ranks-member" })));
      }
    }
    const box = this.pointing && this.boxes[this.at];
    this.under.replaceChildren(...lines);
    this.over.replaceChildren(...members, ...(box ? [drawn("rect", { x: box.x - 1, y: box.y - 1, width: box.w + 2, height: box.h + 2, rx: 5, class: "mm-ranks-mark" })] : []));
  }

  /* ---- pointing ---- */
  point(rank) {
    this.pointing = rank !== null;
    if (this.pointing) this.at = rank;
    put(this.detail, this.pointing ? this.words(rank) : t("Point at a rank, or move with the arrow keys, to read what it is and with whom it talks."));
    this.mark();
  }

  words(rank) {
    const [, , engine, pid, holds] = this.frame.places[rank], [host] = this.frame.hosts.find(([, ranks]) => ranks.includes(rank)), [state, , , , , behind] = this.frame.now[rank];
    const talks = this.frame.links.flatMap(([axis, , groups, counts]) => groups.flatMap((group, index) => (group.includes(rank) ? [`${axis} ${bytes(counts[index])} {${group.length > 8 ? `${group.slice(0, 7).join(", ")}, …` : group.join(", ")}}`] : [])));
    const parts = [`${this.label(rank)}: ${t(state)}, ${this.doing(rank)}`, ...(behind > 0 ? [t("{0} steps behind", behind)] : []), t("host {0}", host) + (engine === null ? "" : `, ${t("engine {0}", engine)}`) + (pid ? `, ${t("process {0}", pid)}` : ""), t("holds {0}", holds)];
    return parts.join("; ") + (talks.length ? `; ${t("groups, bytes a step: {0}", talks.join("; "))}` : "");
  }

  hovered(event) {
    const box = this.plot.firstChild?.getBoundingClientRect();
    if (!box) return;
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const rank = this.boxes.findIndex((each) => each && x >= each.x && x <= each.x + each.w && y >= each.y && y <= each.y + each.h);
    if (rank !== (this.pointing ? this.at : -1)) this.point(rank < 0 ? null : rank);
  }

  typed(event) {
    const order = this.frame.hosts?.flatMap(([, ranks]) => ranks) ?? [], place = order.indexOf(this.at);
    const here = this.boxes?.[this.at];
    const beside = (by) => { // the nearest rank of the next line
      const off = (rank) => Math.abs(this.boxes[rank].x - here.x) + 3 * Math.abs(this.boxes[rank].y - here.y);
      return order.filter((rank) => by * (this.boxes[rank].y - here.y) > 1).sort((a, b) => off(a) - off(b))[0] ?? this.at;
    };
    const to = { ArrowRight: () => order[place + 1], ArrowLeft: () => order[place - 1], Home: () => order[0], End: () => order.at(-1), ArrowUp: () => beside(-1), ArrowDown: () => beside(1) }[event.key];
    if (!to || !here) return;
    event.preventDefault();
    event.stopPropagation();
    const rank = to();
    if (rank !== undefined) this.point(rank);
  }

  /* ---- words ---- */
  async doctor() {
    this.asking.disabled = true;
    this.findings.hidden = false;
    put(this.findings, t("looking at every rank …"));
    try { put(this.findings, (await this.ask("doctor", {}, () => put(this.findings, t("the kernel is busy with a cell and will answer after it")))).lines.join("\n")); } catch (refusal) { put(this.findings, refusal.message); }
    this.asking.disabled = false;
  }

  tables() {
    const { hosts = [], places = [], now = [], links = [] } = this.frame;
    if (this.ranks.open) this.rankTable.replaceChildren(table([t("rank"), t("host"), t("role"), t("state"), t("what it does"), t("behind"), t("holds")], places.map(([rank, role, , , holds]) => [String(rank), hosts.find(([, ranks]) => ranks.includes(rank))[0], role, `${RANK_STATES[now[rank][0]]} ${t(now[rank][0])}`, this.doing(rank), now[rank][5] > 0 ? String(now[rank][5]) : "", holds]), { named: true }));
    if (this.traffic.open) this.linkTable.replaceChildren(links.length ? table([t("axis"), t("what for"), t("ranks"), t("bytes a step")], links.map(([axis, purpose, groups, counts]) => [axis, t(purpose), groups.slice(0, 4).map((group) => `{${group.join(",")}}`).join(" ") + (groups.length > 4 ? ` ${t("and {0} more", groups.length - 4)}` : ""), bytes(counts.reduce((sum, each) => sum + each, 0))]), { named: true }) : t("nothing was counted yet"));
  }

  restyle() { this.resize(); }

  resize() { if (this.node.clientWidth !== this.wide) { this.wide = this.node.clientWidth; this.draw(); } }
};
