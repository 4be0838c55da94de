// The page: panes on one axis of time, handlers of the pointer and the keys, edits, and files to save.

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const make = (name, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
};

const unit = data.unit;
const show = (time) => `${number(plain(time * unit.factor))}${unit.name ? ` ${unit.name}` : ""}`;
const state = {
  theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
  critical: false, memory: true, edit: false, ruler: false, deviation: false, follow: -1,
  selected: null, // {pane, rank, at}
  active: 0, // the pane that edits, exports and keys apply to
  pointer: null, // time under the pointer
  drag: null,
  measure: null, // {pane, from, to}: times at the ends of the ruler
};
const FULL = "micro-batches of 1/p of the model";
/** What a stage's activations of one micro-batch are of those of 1/p of the model: `full`, but of all its slices. */
const shareOf = ({ full, slices }) => full * (slices || 1);
const memoryUnit = (schedule) => {
  const each = (size) => schedule.document.costs.activation.every((other) => other === size);
  if (schedule.inBytes) return `in ${schedule.pools[0].pool}`;
  return each(shareOf(schedule.document)) ? FULL : each(1) ? "stage micro-batches" : "units of activation memory";
};

/** The top of the memory rows of a schedule: one for all timelines in bytes, and one for those that count micro-batches. */
const mostBeside = (schedule) => Math.max(...panes.filter((pane) => pane.schedule.inBytes === schedule.inBytes).map((pane) => pane.schedule.most), data.limit || 0);

const LEAST_BESIDE = 30; // height of a row that leaves room for what is below the timelines
const SNAP = 8; // pixels from an edge at which the ruler holds on to it
const STILL = "Actions cannot be moved: the page does not simulate bytes, recomputed blocks, queues beside computation, or senders that wait";

// ---- panes ----

class Pane {
  constructor(document, number) {
    this.number = number;
    this.schedule = new Schedule(document, data.kinds);
    this.canvas = make("canvas");
    this.overlay = make("canvas");
    this.stage = make("div", { className: "stage", tabIndex: 0 }, this.canvas, this.overlay);
    this.stage.setAttribute("role", "application");
    this.stage.setAttribute("aria-label", `${document.heading}: timeline; arrows select actions, ? lists the keys`);
    this.tiles = make("div", { className: "tiles" });
    this.facts = make("p", { className: "facts" });
    this.table = make("table");
    const heading = make("h2", { textContent: document.heading, dir: "auto", hidden: document.heading === data.title });
    this.summary = make("summary", { textContent: "All figures, assumptions, and a table per rank" });
    const details = make("details", {}, this.summary, this.facts, make("div", { className: "scroll" }, this.table));
    this.node = make("section", { className: "pane" }, heading, this.tiles, this.stage, details);
    element("panes").append(this.node);
    this.report();
  }

  /** The layout for a width, with rows as high as the window has room for. */
  layoutFor(width) {
    const { ranks, lanes, pools } = this.schedule, place = (node) => node.getBoundingClientRect();
    const above = place(element("panes")).top + window.scrollY; // header, legend, comparison
    const own = place(this.stage).top - place(this.node).top + place(this.summary).height + 28; // of a pane, beside its rows
    const rowAbove = (below) => {
      const room = (window.innerHeight - above - below - 28) / panes.length - own - RULER - 4;
      return (room / ranks - 3 - lanes.length) / (1 + 0.5 * lanes.length + (state.memory ? BAND * pools.length : 0));
    };
    const beside = rowAbove(place(document.querySelector("figure")).height);
    const row = beside < LEAST_BESIDE ? rowAbove(0) : beside; // what is below the timelines is scrolled to where they would be low
    return new Layout(this.schedule, width, Math.floor(Math.min(MOST_ROW, Math.max(leastHeights(this.schedule)[0], row))), state.memory);
  }

  resize() {
    const width = Math.max(320, Math.floor(this.stage.clientWidth || this.node.clientWidth));
    const layout = this.layoutFor(width), ratio = window.devicePixelRatio || 1;
    this.layout = layout;
    for (const canvas of [this.canvas, this.overlay]) {
      const [w, h] = [Math.round(width * ratio), Math.round(layout.height * ratio)];
      if (canvas.width !== w || canvas.height !== h) {
        canvas.width = w;
        canvas.height = h;
        canvas.style.width = `${width}px`;
        canvas.style.height = `${layout.height}px`;
      }
    }
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.above = this.overlay.getContext("2d");
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, theme = THEMES[state.theme];
    const painter = new CanvasPainter(this.context, ratio, theme);
    const drawing = new Drawing(this.layout, painter, this.options(theme));
    this.drawn = drawing.draw();
    this.drawOver();
  }

  /** What a drawing of this pane shows. */
  options(theme) {
    const { selected } = state, phases = selected && selected.pane === this ? selected.rank : 0;
    const most = mostBeside(this.schedule);
    return { view, theme, follow: state.follow, critical: state.critical, unit, most, limit: data.limit, phases, deviation: state.deviation && !this.schedule.edited && this.deviates };
  }

  /** Draw what depends on the pointer and the selection, on a separate canvas above the drawing. */
  drawOver() {
    const ratio = window.devicePixelRatio || 1, theme = THEMES[state.theme], { schedule, layout, above } = this;
    above.setTransform(ratio, 0, 0, ratio, 0, 0);
    above.clearRect(0, 0, layout.width, layout.height);
    const painter = new CanvasPainter(above, ratio, theme);
    const drawing = new Drawing(layout, painter, { view, theme, follow: -1, critical: false, unit });
    above.save();
    above.beginPath();
    above.rect(GUTTER - 2, 0, layout.width - GUTTER - RIGHT + 4, layout.height);
    above.clip();
    const box = (rank, at, stroke, width) => {
      const program = schedule.programs[rank];
      const x = layout.x(program.start[at], view), wide = Math.max(2, (program.end[at] - program.start[at]) * layout.scale(view));
      painter.outline(x, layout.top(rank), wide - 1, layout.high(rank), stroke, width);
    };
    if (state.follow >= 0) {
      const points = schedule.cellsOf(Math.min(state.follow, schedule.m - 1)).map(([rank, at]) => {
        const program = schedule.programs[rank];
        return [layout.x((program.start[at] + program.end[at]) / 2, view), layout.top(rank) + layout.high(rank) / 2];
      });
      if (points.length > 1) painter.line(points, theme.faint, 1.2, [4, 3]);
    }
    const { selected } = state;
    if (selected && selected.pane === this && selected.at < schedule.reached[selected.rank]) {
      drawing.drawPath(schedule.chain(selected.rank, selected.at), theme.late, this.drawn.dense);
      box(selected.rank, selected.at, theme.ink, 2.5);
    }
    if (this.hovered) box(this.hovered.rank, this.hovered.at, theme.ink, 1.5);
    if (state.drag && state.drag.pane === this && state.drag.rank !== undefined) {
      const { rank, mark } = state.drag, x = layout.x(mark, view), y = layout.top(rank);
      painter.line([[x, y - 3], [x, y + layout.row + 3]], theme.late, 3);
    }
    const { measure } = state;
    if (measure) {
      const ends = [measure.from, measure.to].map((time) => layout.x(time, view));
      for (const x of ends) painter.line([[x, 22], [x, layout.height]], theme.late, 1, [4, 3]);
      painter.rect(Math.min(...ends), 23, Math.abs(ends[1] - ends[0]), 14, theme.paper); // over the phases
      painter.line([[ends[0], 30], [ends[1], 30]], theme.late, 1.5);
      const words = show(Math.abs(measure.to - measure.from)), wide = 7 * words.length + 8, middle = (ends[0] + ends[1]) / 2;
      painter.rect(middle - wide / 2, 22, wide, 16, theme.paper);
      painter.text(middle, 34, words, theme.late, { align: "center", weight: 600 });
    }
    above.restore();
  }

  /** The cell, or the interval of idle time, under a point of the canvas. */
  find(x, y) {
    const place = this.layout.placeAt(y);
    if (!place || x < GUTTER) return null;
    const { rank, pool } = place;
    const time = this.layout.time(x, view), program = this.schedule.programs[rank], count = this.schedule.reached[rank];
    const at = lowerBound(program.end, time, 0, count);
    const inside = y - this.layout.top(rank);
    const half = inside > this.layout.high(rank) / 2 ? 1 : 0;
    if (pool !== undefined) return { rank, at: -1, time, pool, place: "memory" };
    if (at < count && program.start[at] <= time) return { rank, at, time, half, place: "box" };
    const [origin, finish] = this.schedule.span;
    return rank < this.schedule.ranks && time >= origin && time <= finish ? { rank, at, time, place: "idle" } : null;
  }

  /** The time at a point of the canvas; where an action of the row, or of any row beside them, begins or ends near it, that time. */
  edgeAt(x, y) {
    const place = this.layout.placeAt(y), { programs, reached } = this.schedule;
    const time = this.layout.time(x, view), near = SNAP / this.layout.scale(view);
    let best = time, off = near;
    for (const row of place ? [place.rank] : programs.keys())
      for (const edges of [programs[row].start, programs[row].end])
        for (let at = lowerBound(edges, time - near, 0, reached[row]); at < reached[row] && edges[at] <= time + near; at++)
          if (Math.abs(edges[at] - time) < off) [best, off] = [edges[at], Math.abs(edges[at] - time)];
    return best;
  }

  report() {
    const { schedule } = this, { document } = schedule, figures = schedule.figures;
    const fact = (name, value) => [make("b", { textContent: value }), ` ${name} · `];
    const tile = (value, name, bad = false) => make("div", { className: bad ? "bad" : "" }, make("b", { textContent: value }), make("span", { textContent: name }));
    const peak = Math.max(...figures.peak_memory), gap = gapOf(schedule);
    this.tiles.replaceChildren(
      tile(show(figures.makespan), "makespan"),
      tile(figures.bubble_rate.toFixed(4), "bubble rate, idle / (p · makespan)"),
      tile(schedule.amount(peak) + (data.limit ? ` of ${schedule.amount(data.limit)}` : ""), `peak memory, ${memoryUnit(schedule)}`, Boolean(data.limit) && peak > data.limit * (1 + 1e-9)),
      tile(gap === null ? "–" : `${(100 * gap).toFixed(1)} %`, gap === null ? "no lower bound" : `above the lower bound ${show(document.lower_bound)}`),
      ...(this.worst ? [tile(`${this.worst.off > 0 ? "+" : "−"}${Math.abs(100 * this.worst.off).toFixed(0)} %`, `over the simulation: ${this.worst.words}`)] : []),
    );
    comparison();
    this.facts.replaceChildren(
      ...fact("bubble ratio (idle / busy)", figures.bubble_ratio.toFixed(4)),
      ...fact("span bubble rate (1 − busy / largest span)", figures.span_bubble_rate.toFixed(4)),
      ...fact("peak activations", schedule.activations(Math.max(...figures.peak_activations))),
      ...fact("peak memory", schedule.amount(Math.max(...figures.peak_memory))),
      ...(schedule.still ? [`${STILL} · `] : []),
      ...fact(`messages between ranks${document.messages.words && `, ${document.messages.words}`}`, String(document.messages.count)),
      document.assumptions,
    );
    const row = (name, values) => make("tr", {}, ...values.map((value) => make(name, { textContent: value })));
    const [heads, ...rows] = tableOf(schedule, unit).rows;
    this.table.replaceChildren(make("thead", {}, row("th", heads)), make("tbody", {}, ...rows.map((cells) => row("td", cells))));
    if (unit.name) this.table.prepend(make("caption", { textContent: `times in ${unit.name}` }));
  }
}

/** The table per rank, as text: its headings, then a row for each rank; and the makespan. */
function tableOf(schedule, { factor, name }) {
  const { figures } = schedule;
  const time = (value) => number(plain(value * factor));
  const kinds = [...new Set(figures.byKind.flatMap((times) => Object.keys(times)))];
  const order = (kind) => data.kinds.findIndex(({ letter }) => letter === kind.split("|")[0]) + (kind.includes("|") ? 100 : 0);
  kinds.sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
  const causes = CAUSES.map((_, cause) => cause).filter((cause) => schedule.idleByCause.some((row) => row[cause] > 0));
  // Communications inside actions were measured: they are part of "busy", of the step that ran, and not of an edited one.
  const exposed = schedule.edited ? [] : schedule.document.exposed;
  const talks = [...new Set(exposed.flatMap((times) => Object.keys(times)))].filter((kind) => exposed.some((times) => times[kind] > 0)).sort();
  const heads = ["rank", ...kinds, "busy", ...talks.map((kind) => `busy: ${kind}`), "idle", ...causes.map((cause) => `idle: ${CAUSES[cause]}`), "span", "peak activations", "peak memory", "messages sent"];
  const cells = (_, rank) => [
    String(rank), ...kinds.map((kind) => time(figures.byKind[rank][kind] || 0)), time(figures.busy[rank]),
    ...talks.map((kind) => time(exposed[rank][kind] || 0)), time(figures.idle[rank]),
    ...causes.map((cause) => time(schedule.idleByCause[rank][cause])), time(figures.spans[rank]),
    schedule.activations(figures.peak_activations[rank]), schedule.amount(figures.peak_memory[rank]), String(schedule.document.messages.sent[rank]),
  ];
  return { rows: [heads, ...figures.busy.map(cells)], makespan: `${time(figures.makespan)}${name ? ` ${name}` : ""}` };
}

/** The makespan over the lower bound, less 1; null where there is none. */
function gapOf({ figures, document }) {
  return document.lower_bound ? figures.makespan / document.lower_bound - 1 : null;
}

const top = (values) => Math.max(...values);
/** Columns of the comparison: a heading, a value to sort by (negative: there is none), and its text. */
const COLUMNS = [
  ["schedule", ({ document }) => document.heading, (text) => text],
  ["makespan", ({ figures }) => figures.makespan, show],
  ["bubble rate", ({ figures }) => figures.bubble_rate, (value) => value.toFixed(4)],
  ["gap", (schedule) => gapOf(schedule) ?? -1, (value) => `${(100 * value).toFixed(1)} %`],
  ["peak activations", ({ figures }) => top(figures.peak_activations), (value, schedule) => schedule.activations(value)],
  ["peak memory", ({ figures, inBytes }) => (inBytes || !anyInBytes() ? top(figures.peak_memory) : -1), (value, schedule) => schedule.amount(value)],
  ["largest idle", ({ figures }) => top(figures.idle), show],
  ["messages", ({ document }) => document.messages.count, String],
];
const order = { column: -1, down: false };
const anyInBytes = () => compared().some(({ inBytes }) => inBytes);
/** The schedules of the comparison: those of the panes, then those that are rows alone. */
const compared = () => [...panes.map(({ schedule }) => schedule), ...rows];

/** Fill the table of several schedules: a click on a heading sorts, one on a row shows its pane. */
function comparison() {
  const box = element("compare"), all = compared();
  box.hidden = all.length < 2;
  if (box.hidden) return;
  const columns = COLUMNS.filter(([name, value]) => name !== "peak memory" || anyInBytes() || all.some((each) => each.amount(value(each)) !== each.activations(top(each.figures.peak_activations))));
  const heads = columns.map(([name], at) => {
    const button = make("button", { textContent: name + (order.column === at ? (order.down ? " ↓" : " ↑") : "") });
    button.addEventListener("click", () => {
      order.down = order.column === at && !order.down;
      order.column = at;
      comparison();
    });
    return make("th", {}, button);
  });
  const value = order.column >= 0 ? columns[order.column][1] : (schedule) => all.indexOf(schedule);
  const sorted = [...all].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (order.down ? -1 : 1));
  const lines = sorted.map((schedule) => {
    const cells = columns.map(([, read, print]) => make("td", { textContent: read(schedule) < 0 ? "–" : print(read(schedule), schedule) }));
    const row = make("tr", {}, ...cells), pane = panes.find((each) => each.schedule === schedule);
    if (!pane) return row;
    row.tabIndex = 0;
    const go = () => {
      pane.node.scrollIntoView({ block: "start", behavior: "smooth" });
      pane.stage.focus({ preventScroll: true });
    };
    row.addEventListener("click", go);
    row.addEventListener("keydown", (event) => event.key === "Enter" && go());
    return row;
  });
  const units = new Set(all.filter(({ inBytes }) => !inBytes).map(memoryUnit));
  const caption = make("caption", { textContent: `peaks in ${[...units].join(" or ")}` });
  box.replaceChildren(make("table", {}, caption, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines)));
}

/** Where stages are of several sizes, have all schedules count memory as micro-batches of 1/p of the model: activations, and
 * memory where every activation counts 1 or is given in that unit already. */
function shareUnit(documents) {
  const mixed = new Set(documents.map(({ full }) => full)).size > 1;
  const counts = (each) => (each.still && each.still.curves[0].pool) || each.costs.activation.every((size) => size === 1 || size === shareOf(each));
  const shared = mixed && documents.every(counts);
  for (const each of documents) {
    each.unit = mixed ? each.full : 1;
    if (!shared || each.costs.activation.some((size) => size !== 1)) continue;
    each.costs.activation = each.costs.activation.map(() => shareOf(each));
    for (const { pool, ranks } of each.still ? each.still.curves : [])
      if (!pool) for (const curve of ranks) for (const point of curve) point[1] *= shareOf(each);
  }
}

shareUnit([...data.panes, ...data.rows]);
const panes = [], rows = data.rows.map((document) => new Schedule(document, data.kinds));
data.panes.forEach((document, at) => panes.push(new Pane(document, at)));
comparison();

/** How much longer the cells of a measured pane took than those of the simulation of the same schedule below it. */
const measuredPane = panes.find(({ schedule }) => schedule.document.source === "measured");
const simulatedPane = measuredPane && panes.find(({ schedule: { document } }) => document.source === "simulated" && JSON.stringify(document.codes) === JSON.stringify(measuredPane.schedule.document.codes));
if (simulatedPane) {
  const took = ({ start, end }, at) => end[at] - start[at];
  const [real, wanted] = [measuredPane, simulatedPane].map((pane) => pane.schedule.programs);
  measuredPane.deviates = (rank, at) => (took(wanted[rank], at) > 0 ? took(real[rank], at) / took(wanted[rank], at) - 1 : 0);
  const lost = (rank, at) => Math.abs(took(real[rank], at) - took(wanted[rank], at));
  let worst = [0, 0];
  real.forEach((program, rank) => {
    for (let at = 0; at < program.length; at++) if (lost(rank, at) > lost(...worst)) worst = [rank, at];
  });
  measuredPane.worst = { off: measuredPane.deviates(...worst), words: `${measuredPane.schedule.cellWords(...worst)} on rank ${worst[0]}` };
  element("deviation").hidden = false;
  measuredPane.report();
}

// ---- the view, one for all panes ----

const longest = Math.max(0, ...panes.map((pane) => pane.schedule.span[1])) || 1;
const view = { start: 0, end: longest };

function setView(start, end) {
  const least = longest * 1e-5, most = longest * 1.1;
  const span = Math.min(most, Math.max(least, end - start));
  const middle = (start + end) / 2;
  view.start = Math.min(Math.max(middle - span / 2, -0.05 * longest), 1.05 * longest - span);
  if (span >= most) view.start = -0.05 * longest;
  view.end = view.start + span;
  redraw();
}

function zoom(factor, time) {
  const span = view.end - view.start;
  const next = Math.min(longest * 1.1, Math.max(longest * 1e-5, span * factor));
  const share = (time - view.start) / span;
  const start = time - share * next;
  view.start = start;
  view.end = start + next;
  setView(view.start, view.end);
}

const pan = (time) => setView(view.start + time, view.end + time);
const fit = () => setView(0, longest);

let pending = 0;
function redraw() {
  if (!pending) pending = requestAnimationFrame(drawNow);
}

function drawNow() {
  cancelAnimationFrame(pending);
  pending = 0;
  for (const pane of panes) pane.draw();
}

function resize() {
  for (const pane of panes) pane.resize();
  drawNow();
}

// ---- theme and legend ----

function setTheme(name) {
  state.theme = name;
  document.documentElement.classList.toggle("dark", name === "dark");
  legend();
  redraw();
}

function legend() {
  const nodes = [];
  const used = new Set(panes.flatMap((pane) => pane.schedule.figures.byKind.flatMap((times) => Object.keys(times).flatMap((name) => name.split("|")))));
  const most = panes.reduce((a, b) => (b.schedule.chunks > a.schedule.chunks ? b : a), panes[0]);
  for (const kind of data.kinds) {
    if (!used.has(kind.letter)) continue;
    const swatches = most.schedule.document.colours[kind.letter].map((colour) => {
      const swatch = make("i");
      swatch.style.background = colour;
      return swatch;
    });
    nodes.push(make("span", {}, ...swatches, `${kind.letter} ${kind.words}`));
  }
  const causes = new Set(panes.flatMap((pane) => pane.schedule.gaps.flatMap((gaps) => Array.from(gaps.cause))));
  for (const cause of [...causes].sort()) {
    const tile = make("canvas", { width: 32, height: 28 });
    new CanvasPainter(tile.getContext("2d"), 2, THEMES[state.theme]).idle(0, 0, 16, 14, cause);
    nodes.push(make("span", {}, tile, `idle: ${CAUSES[cause]}`));
  }
  const notes = [panes.some(({ schedule }) => schedule.slices > 1) ? "numbers: micro-batch.slice" : "numbers: micro-batch"];
  if (most && most.schedule.chunks > 1) notes.push("chunk 0 is the darkest");
  if (panes.some((pane) => pane.schedule.hasPairs)) notes.push("a pair: forward above, backward below");
  if (panes.some((pane) => pane.schedule.talks)) notes.push("foot of a box: its all-to-all");
  if (most && state.memory) {
    const others = panes.find((pane) => pane.schedule.inBytes !== most.schedule.inBytes);
    const tops = [most, others].filter(Boolean).map(({ schedule }) => `${schedule.amount(mostBeside(schedule))} ${memoryUnit(schedule)}`);
    notes.push(`below a row: memory, 0 to ${tops.join(" or ")} in all rows, peak at the right${data.limit ? `, dashed: the limit ${most.schedule.amount(data.limit)}` : ""}`);
  }
  if (state.deviation) notes.push("edge of a box: longer (red) or shorter (green) than simulated");
  if (panes.length) nodes.push(make("span", { textContent: notes.join(" · ") }));
  element("legend").replaceChildren(...nodes);
}

// ---- selection, hover card, words ----

function cardLines(pane, hit) {
  const { schedule } = pane, program = schedule.programs[hit.rank];
  if (hit.place === "memory") {
    const { pool, ranks } = schedule.pools[hit.pool], curve = ranks[hit.rank];
    const at = lowerBound(curve.times, hit.time);
    return [`memory of rank ${hit.rank}${pool && `, ${pool}`}: ${schedule.amount(at ? curve.levels[at - 1] : 0)}`, `at ${show(hit.time)}; peak ${schedule.amount(curve.peak)}`];
  }
  if (hit.place === "idle") {
    const words = schedule.waited(hit.rank, hit.at, show);
    const next = hit.at < schedule.reached[hit.rank] ? `before ${schedule.cellWords(hit.rank, hit.at)}` : "";
    return [`rank ${hit.rank} is idle`, words, next];
  }
  const start = program.start[hit.at], end = program.end[hit.at];
  const chunks = schedule.codesAt(hit.rank, hit.at).map((code) => schedule.chunkOf[schedule.stageOf(code)]);
  const lines = [
    schedule.cellWords(hit.rank, hit.at),
    `rank ${schedule.rows[hit.rank].rank}${hit.rank < schedule.ranks ? "" : `, queue ${schedule.rows[hit.rank].queue}`}${schedule.chunks > 1 ? `, chunk ${chunks.join(" and ")}` : ""}; ${show(start)} to ${show(end)}, takes ${show(end - start)}`,
    schedule.waited(hit.rank, hit.at, show),
  ];
  const talk = schedule.talk(schedule.codesAt(hit.rank, hit.at));
  for (const code of schedule.codesAt(hit.rank, hit.at)) lines.push(...schedule.valuesOf(code));
  if (talk) lines.push(`all-to-all ${talk.map(([code, share]) => `${show(share * (end - start))} of ${schedule.kindOf(code).letter}`).join(", ")}`);
  return lines;
}

function sentence(pane, hit) {
  return cardLines(pane, hit).filter(Boolean).join("; ");
}

function showCard(pane, hit, event) {
  const card = element("card");
  if (!hit) {
    card.hidden = true;
    return;
  }
  const [head, ...rest] = cardLines(pane, hit).filter(Boolean);
  card.replaceChildren(make("b", { textContent: head }), ...rest.map((line) => make("span", { textContent: line })));
  card.hidden = false;
  const { width, height } = card.getBoundingClientRect();
  card.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  card.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
}

const MOST_LINKS = 30;

function select(pane, rank, at, half = 0) {
  if (!pane) {
    state.selected = null;
    state.follow = -1;
    element("details").hidden = true;
    resize();
    return;
  }
  const { schedule } = pane, codes = schedule.codesAt(rank, at), program = schedule.programs[rank];
  state.selected = { pane, rank, at };
  state.active = pane.number;
  changes(pane);
  state.follow = schedule.unitOf(codes[Math.min(half, codes.length - 1)]);
  const link = ([r, i]) => {
    const item = make("li", { textContent: `${show(schedule.programs[r].start[i])}: ${schedule.cellWords(r, i)} on rank ${schedule.rows[r].rank}` });
    item.addEventListener("click", () => goTo(pane, r, i));
    return item;
  };
  const list = (cells) => {
    const items = cells.slice(0, MOST_LINKS).map(link);
    if (cells.length > MOST_LINKS) items.push(make("li", { className: "more", textContent: `and ${cells.length - MOST_LINKS} more before` }));
    return make("ol", {}, ...items);
  };
  const chain = schedule.chain(rank, at).reverse().slice(1);
  const lines = cardLines(pane, { rank, at, place: "box" }).filter(Boolean);
  const path = schedule.criticalPath.some(([r, i]) => r === rank && i === at);
  const late = chain.length
    ? [make("p", { textContent: `It starts at ${show(program.start[at])} because each of these had to end first, the latest first:` }), list(chain)]
    : [make("p", { textContent: "Nothing delays it: it waits for no other action." })];
  const cells = schedule.cellsOf(state.follow);
  element("details").replaceChildren(
    make("h3", { textContent: lines[0] }), ...lines.slice(1).map((line) => make("p", { textContent: line })),
    make("p", { textContent: path ? "On the critical path: a delay here delays the end of the step." : "Not on the critical path." }),
    make("h3", { textContent: "Why is it late?" }), ...late,
    make("h3", { textContent: `Micro-batch ${state.follow}` }), list(cells.map(([r, i]) => [r, i])),
  );
  const wasHidden = element("details").hidden;
  element("details").hidden = false;
  element("spoken").textContent = sentence(pane, { rank, at, place: "box" });
  if (wasHidden) resize();
  buttons();
  redraw();
}

/** Select a cell, and pan there when it is out of view. */
function goTo(pane, rank, at) {
  const program = pane.schedule.programs[rank], span = view.end - view.start;
  if (program.start[at] < view.start || program.end[at] > view.end) setView(program.start[at] - span / 2, program.start[at] + span / 2);
  select(pane, rank, at);
}

// ---- edits ----

function settled(pane) {
  const { schedule } = pane;
  pane.report();
  element("card").hidden = true; // what lies under the pointer may be another action now
  legend();
  changes(pane);
  if (state.selected && state.selected.pane === pane && state.selected.at >= schedule.reached[state.selected.rank]) select(null);
  buttons();
  redraw();
}

/** Show words at the bottom of the window; "": none. */
function tell(words, bad = false) {
  const status = element("status");
  status.hidden = !words;
  status.classList.toggle("bad", bad);
  status.textContent = words;
}

const changes = (pane) => tell(pane.schedule.edited ? changeWords(pane, pane.schedule) : "");

/** The effect of all edits in words: makespan, bubble rate and memory beside those of the original schedule. */
function changeWords(pane, schedule) {
  const before = pane.original, now = schedule.figures;
  const change = (name, was, is, print = number) => `${name} ${print(is)}${plain(is - was) ? ` (was ${print(was)})` : ""}`;
  return [
    "valid", change("makespan", before.makespan, now.makespan, show),
    change("bubble rate", before.bubble_rate, now.bubble_rate, (value) => value.toFixed(4)),
    change("peak activations", top(before.peak_activations), top(now.peak_activations), (value) => schedule.activations(value)),
    change("peak memory", top(before.peak_memory), top(now.peak_memory)),
    ...(schedule.document.source === "measured" ? ["times: simulated with the measured costs"] : []),
  ].join(" · ");
}

const STAYS = "the action stays where it is. Moved, "; // and then the words of check
const LIVE = 20000; // actions up to which a drag shows its outcome at every move of the pointer: 3 ms to simulate

const isLive = ({ programs }) => programs.reduce((sum, program) => sum + program.length, 0) <= LIVE;

function move(pane, rank, from, to) {
  const cycle = pane.schedule.move(rank, from, to);
  settled(pane);
  if (cycle) tell(STAYS + cycle, true);
  else select(pane, rank, to);
}

function undo(again = false) {
  const pane = panes[state.active];
  if (pane && (again ? pane.schedule.redo() : pane.schedule.undo())) {
    select(null);
    settled(pane);
  }
}

/** The position of a dragged cell in its program: after all others whose middle is before `time`. */
function placeAt(drag, time) {
  const { start, end } = drag.times;
  let low = 0, high = start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((start[middle] + end[middle]) / 2 < time) low = middle + 1;
    else high = middle;
  }
  return low > drag.from ? low - 1 : low;
}

function dragTo(drag, time) {
  const to = placeAt(drag, time), { start, end } = drag.times;
  drag.mark = to > drag.from ? end[to] : to < drag.from ? start[to] : start[drag.from];
  if (to === drag.to) return;
  drag.to = to;
  const { schedule } = drag.pane;
  if (isLive(schedule)) {
    putBack(drag);
    if (to !== drag.from) schedule.apply(drag.rank, drag.from, to);
    const cycle = schedule.invalid;
    drag.at = to;
    if (cycle) {
      putBack(drag);
      drag.mark = start[drag.from];
    }
    if (cycle) tell(STAYS + cycle, true);
    else tell(changeWords(drag.pane, schedule));
    redraw();
  }
  drag.pane.drawOver();
}

/** Move a cell that is dragged back to where it comes from. */
function putBack(drag) {
  if (drag.at !== drag.from) drag.pane.schedule.retract(drag.rank, drag.from, drag.at);
  drag.at = drag.from;
}

function endDrag(commit) {
  const { drag } = state;
  state.drag = null;
  if (!drag || drag.rank === undefined) return;
  putBack(drag);
  if (commit && drag.to !== drag.from) move(drag.pane, drag.rank, drag.from, drag.to);
  else settled(drag.pane);
}

// ---- files ----

function save(content, type, suffix) {
  const pane = panes[state.active] || panes[0];
  const name = (pane ? pane.schedule.document.name : "schedule").normalize("NFKD").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|-+$/g, "") || "schedule";
  const link = make("a", { href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type })), download: `${name}.${suffix}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Draw all panes with their headings, figures and assumptions with a painter; return the size. */
function compose(painter, width, theme) {
  let y = 0;
  for (const pane of panes) {
    const { schedule } = pane, figures = schedule.figures;
    const layout = new Layout(schedule, width, Math.min(pane.layout.row, 110), state.memory);
    if (painter) {
      painter.text(16, y + 24, schedule.document.heading, theme.ink, { size: 15, weight: 600 });
      const facts = [
        `makespan ${show(figures.makespan)} · bubble rate ${figures.bubble_rate.toFixed(4)} (idle / p·makespan) · bubble ratio ${figures.bubble_ratio.toFixed(4)} (idle / busy) · peak activations ${schedule.activations(top(figures.peak_activations))} · peak memory ${schedule.amount(top(figures.peak_memory))}`,
        schedule.document.assumptions,
      ];
      facts.forEach((line, at) => painter.text(16, y + 42 + 16 * at, line, theme.faint, { size: 11.5 }));
      painter.within(y + 66, () => new Drawing(layout, painter, pane.options(theme)).draw());
    }
    y += 66 + layout.height + 14;
  }
  return [width, y + legendOn(painter, y, width, theme)];
}

/** Draw the legend at `y`; return its height. */
function legendOn(painter, y, width, theme) {
  let x = 16, line = 0;
  for (const node of element("legend").children) {
    const words = node.textContent, swatches = [...node.querySelectorAll("i,canvas")];
    const wide = 17 * swatches.length + 6.6 * words.length + 22;
    if (x + wide > width && x > 16) {
      x = 16;
      line += 1;
    }
    const top = y + 20 * line;
    if (painter) {
      swatches.forEach((swatch, at) => {
        const cause = CAUSES.indexOf(words.replace("idle: ", ""));
        if (swatch.tagName === "CANVAS") painter.idle(x + 17 * at, top, 16, 14, cause);
        else painter.rect(x + 17 * at, top, 16, 14, swatch.style.background.startsWith("rgb") ? hex(swatch.style.background) : swatch.style.background);
      });
      painter.text(x + 17 * swatches.length + 4, top + 11.5, words, theme.ink, { size: 12 });
    }
    x += wide;
  }
  return 20 * line + 30;
}

const hex = (text) => "#" + text.match(/\d+/g).slice(0, 3).map((part) => Number(part).toString(16).padStart(2, "0")).join("");

SvgPainter.prototype.within = function (y, draw) {
  const outer = this.out;
  this.out = [];
  draw();
  outer.push(`<g transform="translate(0 ${short(y)})">`, ...this.out, "</g>");
  this.out = outer;
};

CanvasPainter.prototype.within = function (y, draw) {
  const { context, pixels, ratio } = this;
  context.setTransform(ratio, 0, 0, ratio, 0, y * ratio);
  this.pixels = (x, top, image) => context.putImageData(image, Math.round(x * ratio), Math.round((y + top) * ratio));
  draw();
  this.pixels = pixels;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
};

function exportSvg() {
  const theme = THEMES[state.theme], painter = new SvgPainter(theme), width = panes[0] ? panes[0].layout.width : 600;
  return painter.document(...compose(painter, Math.max(width, 900), theme));
}

function exportPng() {
  const theme = THEMES[state.theme], width = Math.max(panes[0] ? panes[0].layout.width : 600, 900);
  const [wide, high] = compose(null, width, theme);
  const canvas = make("canvas", { width: wide * 2, height: Math.ceil(high) * 2 });
  const painter = new CanvasPainter(canvas.getContext("2d"), 2, theme);
  painter.rect(0, 0, wide, Math.ceil(high), theme.paper);
  compose(painter, width, theme);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function buttons() {
  const pane = panes[state.active];
  element("undo").disabled = !pane || !pane.schedule.history.length;
  element("redo").disabled = !pane || !pane.schedule.future.length;
  for (const id of ["svg", "png", "csv", "json"]) element(id).disabled = !pane;
  element("edit").disabled = !pane || Boolean(pane.schedule.still);
  element("edit").title = pane && pane.schedule.still ? STILL : "Edit: drag an action along its rank (E)";
  if (!pane) return;
  const missing = pane.schedule.beyondCsv();
  element("csv").disabled = Boolean(missing);
  const which = panes.length > 1 ? ` of ${pane.schedule.document.heading}` : "";
  element("csv").title = missing ? `The CSV form cannot say ${missing}; save JSON` : `The schedule${which} as torch's CSV`;
  element("json").title = `The schedule${which} as JSON, for pipeloom check and train`;
  for (const name of ["critical", "memory", "edit", "ruler", "deviation"]) element(name).setAttribute("aria-pressed", String(state[name]));
  for (const each of panes) each.stage.classList.toggle("editing", state.edit);
}

function toggle(name) {
  state[name] = !state[name];
  buttons();
  if (name === "ruler" && !state.ruler) state.measure = null;
  legend();
  if (name === "memory") resize();
  else redraw();
}

// ---- events ----

const actions = {
  fit, in: () => zoom(1 / 1.5, middle()), out: () => zoom(1.5, middle()),
  critical: () => toggle("critical"), memory: () => toggle("memory"), edit: () => element("edit").disabled || toggle("edit"),
  ruler: () => toggle("ruler"), deviation: () => toggle("deviation"),
  undo: () => undo(), redo: () => undo(true),
  svg: () => save(exportSvg(), "image/svg+xml", "svg"),
  png: async () => save(await exportPng(), "image/png", "png"),
  csv: () => save(panes[state.active].schedule.csv(), "text/csv", "csv"),
  json: () => save(panes[state.active].schedule.json(), "application/json", "json"),
  print: () => window.print(),
  theme: () => setTheme(state.theme === "dark" ? "light" : "dark"),
  help: () => element("keys").showModal(),
};
for (const [id, act] of Object.entries(actions)) element(id).addEventListener("click", act);

/** Select the first action of the micro-batch that is asked for, or say which there are. */
function find() {
  const pane = panes[state.active] || panes[0], text = element("find").value;
  if (!pane || text === "") return;
  const { microbatches } = pane.schedule.document, wanted = Number(text);
  const cells = Number.isInteger(wanted) && wanted >= 0 && wanted < microbatches ? pane.schedule.cellsOf(wanted * pane.schedule.slices) : [];
  if (!cells.length) return tell(`there is no micro-batch ${text}: ${pane.schedule.document.name} has 0 to ${microbatches - 1}`, true);
  const [rank, at] = cells[0], half = pane.schedule.codesAt(rank, at).findIndex((code) => pane.schedule.unitOf(code) === wanted * pane.schedule.slices);
  goTo(pane, rank, at);
  select(pane, rank, at, Math.max(0, half));
}
element("find").addEventListener("input", find);

const middle = () => (state.pointer === null ? (view.start + view.end) / 2 : state.pointer);

for (const pane of panes) {
  const position = (event) => {
    const { left, top } = pane.stage.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  pane.stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [x] = position(event);
    const unitOf = event.deltaMode ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan(((event.deltaX || event.deltaY) * unitOf) / pane.layout.scale(view));
    } else zoom(Math.exp(event.deltaY * unitOf * 0.002), pane.layout.time(Math.max(x, GUTTER), view));
  }, { passive: false });
  pane.stage.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const [x, y] = position(event), hit = pane.find(x, y);
    state.active = pane.number;
    state.drag = { pane, x, y, start: view.start, moved: false, hit };
    if (state.ruler) state.drag.measures = pane.edgeAt(x, y);
    else if (state.edit && !pane.schedule.still && hit && hit.place === "box") {
      const { start, end } = pane.schedule.programs[hit.rank], count = pane.schedule.reached[hit.rank];
      Object.assign(state.drag, { rank: hit.rank, from: hit.at, to: hit.at, at: hit.at, mark: start[hit.at], times: { start: start.slice(0, count), end: end.slice(0, count) } });
    }
    pane.stage.setPointerCapture(event.pointerId);
    showCard(pane, null);
  });
  pane.stage.addEventListener("pointermove", (event) => {
    const [x, y] = position(event), { drag } = state;
    state.pointer = x >= GUTTER ? pane.layout.time(x, view) : null;
    if (drag && drag.pane === pane) {
      if (!drag.moved && Math.abs(x - drag.x) < 4) return;
      drag.moved = true;
      if (drag.measures !== undefined) {
        state.measure = { from: drag.measures, to: pane.edgeAt(x, y) };
        for (const each of panes) each.drawOver();
      } else if (drag.rank !== undefined) dragTo(drag, pane.layout.time(x, view));
      else {
        const span = view.end - view.start;
        const start = drag.start - (x - drag.x) / pane.layout.scale(view);
        setView(start, start + span);
      }
      return;
    }
    const hit = pane.find(x, y);
    const before = pane.hovered;
    pane.hovered = hit && hit.place === "box" ? hit : null;
    if ((before && before.at) !== (pane.hovered && pane.hovered.at) || (before && before.rank) !== (pane.hovered && pane.hovered.rank)) pane.drawOver();
    showCard(pane, hit, event);
  });
  pane.stage.addEventListener("pointerleave", () => {
    state.pointer = null;
    pane.hovered = null;
    showCard(pane, null);
    pane.drawOver();
  });
  pane.stage.addEventListener("pointerup", () => {
    const { drag } = state;
    if (!drag) return;
    if (drag.moved) endDrag(true);
    else {
      state.drag = null;
      if (drag.hit && drag.hit.place === "box") select(pane, drag.hit.rank, drag.hit.at, drag.hit.half);
      else if (state.selected) select(null);
      buttons();
    }
  });
  pane.stage.addEventListener("pointercancel", () => endDrag(false));
  pane.stage.addEventListener("focus", () => {
    state.active = pane.number;
    buttons();
  });
}

/** Move the selection one place along its rank, or to the same time on another rank. */
function step(along, across) {
  const pane = panes[state.active];
  if (!pane) return;
  const { schedule } = pane, { selected } = state;
  const ranks = schedule.programs.map((_, rank) => rank).filter((rank) => schedule.reached[rank]);
  if (!ranks.length) return;
  if (!selected || selected.pane !== pane) {
    const at = lowerBound(schedule.programs[ranks[0]].end, Math.max(view.start, 0), 0, schedule.reached[ranks[0]] - 1);
    goTo(pane, ranks[0], at);
    return;
  }
  let { rank, at } = selected;
  if (across) {
    const next = ranks[ranks.indexOf(rank) + across];
    if (next === undefined) return;
    at = lowerBound(schedule.programs[next].end, schedule.programs[rank].start[at] + 1e-12, 0, schedule.reached[next] - 1);
    rank = next;
  } else at = Math.max(0, Math.min(schedule.reached[rank] - 1, at + along));
  goTo(pane, rank, at);
}

function moveSelected(along) {
  const { selected } = state;
  if (!selected || !state.edit || selected.pane.schedule.still) return;
  const { pane, rank, at } = selected, to = at + along;
  if (to >= 0 && to < pane.schedule.programs[rank].length) move(pane, rank, at, to);
}

const KEYS = {
  w: () => zoom(1 / 1.25, middle()), s: () => zoom(1.25, middle()),
  a: () => pan(-0.12 * (view.end - view.start)), d: () => pan(0.12 * (view.end - view.start)),
  0: fit, r: actions.ruler, v: () => measuredPane && measuredPane.worst && toggle("deviation"), "/": () => element("find").focus(),
  c: actions.critical, m: actions.memory, e: actions.edit, t: actions.theme, "?": actions.help,
  f: () => {
    if (!state.selected) return fit();
    const { pane, rank, at } = state.selected, program = pane.schedule.programs[rank];
    const time = program.end[at] - program.start[at] || longest * 1e-3;
    setView(program.start[at] - 4 * time, program.end[at] + 4 * time);
  },
  arrowleft: () => step(-1, 0), arrowright: () => step(1, 0), arrowup: () => step(0, -1), arrowdown: () => step(0, 1),
  escape: () => {
    state.measure = null;
    if (state.drag) endDrag(false);
    else select(null);
  },
};

window.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.target.id === "find") event.target.blur();
  if (element("keys").open || event.target.closest("input,select,textarea")) return;
  const key = event.key.toLowerCase();
  if (event.ctrlKey || event.metaKey) {
    if (key === "z" || key === "y") {
      event.preventDefault();
      undo(event.shiftKey || key === "y");
    }
    return;
  }
  if (event.altKey) {
    if (state.edit && (key === "arrowleft" || key === "arrowright")) {
      event.preventDefault();
      moveSelected(key === "arrowleft" ? -1 : 1);
    }
    return;
  }
  if (key.startsWith("arrow") && event.target.closest("summary,button,.scroll")) return;
  if (KEYS[key]) {
    event.preventDefault();
    KEYS[key]();
  }
});
window.addEventListener("resize", resize);
window.addEventListener("beforeprint", () => {
  state.screen = state.theme;
  setTheme("light");
  resize();
});
window.addEventListener("afterprint", () => {
  setTheme(state.screen || state.theme);
  resize();
});

for (const pane of panes) pane.original = pane.schedule.figures;
setTheme(state.theme);
buttons();
resize();
if (!panes.length) element("panes").append(make("p", { textContent: "There is nothing to draw." }));

/** For scripts and tests: the panes' schedules, the view, and the functions that the keys call. */
window.pipeloom = {
  panes, view, state, data, Schedule, setView, zoom, fit, select, move, undo, drawNow, exportSvg, exportPng, sentence, number, setTheme, tableOf, phasesOf,
};
