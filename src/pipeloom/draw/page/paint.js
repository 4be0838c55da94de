// Drawing of one schedule: on a canvas, or as SVG text through the same calls. Where boxes are narrower than a few pixels
// every column of pixels gets the mean colour of what runs in it, written straight into the pixels.

const GUTTER = 62, RIGHT = 44, RULER = 38, MOST_ROW = 240, BAND = 0.5; // of a row: the height of its memory
/** The least heights of a row and of its memory: up to 16 ranks have room for their numbers, hundreds take few windows. */
const leastHeights = ({ ranks, hasPairs, talks }) => (ranks <= 16 ? [hasPairs ? (talks ? 30 : 26) : 21, 10] : ranks <= 64 ? [12, 9] : [7, 6]);
const LEAST_NUMBER = 8; // height of the smallest digits that are drawn
const MOST_BOXES = 5000; // more boxes, and boxes of less than 4 pixels, are drawn as columns of pixels: 5,000 boxes take 10 ms

const THEMES = {
  light: {
    paper: "#ffffff", ink: "#1f2430", faint: "#667085", line: "#d0d5dd", accent: "#101828", late: "#b42318", early: "#067647",
    idle: ["#eef0f4", "#dfe7f3", "#f3e6ec", "#f8f9fb", "#e4e4e4"], hatch: "#aeb6c4", memory: "#8a94a6", glow: "#ffffff",
  },
  dark: {
    paper: "#14171d", ink: "#e6e9ef", faint: "#98a2b3", line: "#39404d", accent: "#f2f4f7", late: "#fda29b", early: "#75e0a7",
    idle: ["#262b34", "#253044", "#3a2932", "#1b1f26", "#303030"], hatch: "#566072", memory: "#7c879b", glow: "#14171d",
  },
};

const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
const mixed = (text, other, share) =>
  "#" + rgb(text).map((part, at) => Math.round(part + (rgb(other)[at] - part) * share).toString(16).padStart(2, "0")).join("");

/** Lines of a hatched tile of 8 x 8, by cause: they differ in direction, so no colour is needed to tell them apart. */
const HATCHES = [
  [[-1, 9, 9, -1], [-1, 1, 1, -1], [7, 9, 9, 7]],
  [[4, 0, 4, 8]],
  [[-1, 9, 9, -1], [-1, -1, 9, 9]],
  [],
  [[0, 4, 8, 4]],
];

class CanvasPainter {
  constructor(context, ratio, theme) {
    this.context = context;
    this.ratio = ratio;
    this.theme = theme;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "alphabetic";
  }

  hatch(cause) {
    const key = `${this.theme.paper}${cause}`;
    if (!CanvasPainter.tiles.has(key)) {
      const tile = new OffscreenCanvas(8, 8), context = tile.getContext("2d");
      context.fillStyle = this.theme.idle[cause];
      context.fillRect(0, 0, 8, 8);
      context.strokeStyle = this.theme.hatch;
      for (const [x0, y0, x1, y1] of HATCHES[cause]) {
        context.beginPath();
        context.moveTo(x0, y0);
        context.lineTo(x1, y1);
        context.stroke();
      }
      CanvasPainter.tiles.set(key, tile);
    }
    return this.context.createPattern(CanvasPainter.tiles.get(key), "repeat");
  }

  rect(x, y, width, height, fill) {
    this.context.fillStyle = fill;
    this.context.fillRect(x, y, width, height);
  }

  idle(x, y, width, height, cause) {
    this.rect(x, y, width, height, this.hatch(cause));
  }

  outline(x, y, width, height, stroke, line) {
    this.context.strokeStyle = stroke;
    this.context.lineWidth = line;
    this.context.strokeRect(x, y, width, height);
  }

  line(points, stroke, width, dash = []) {
    this.context.strokeStyle = stroke;
    this.context.lineWidth = width;
    this.context.setLineDash(dash);
    this.context.beginPath();
    points.forEach(([x, y], at) => (at ? this.context.lineTo(x, y) : this.context.moveTo(x, y)));
    this.context.stroke();
    this.context.setLineDash([]);
  }

  text(x, y, content, fill, { size = 12, align = "start", weight = 400 } = {}) {
    const font = `${weight} ${size}px ${FONT}`;
    if (this.context.font !== font && this.font !== font) this.context.font = this.font = font;
    this.context.textAlign = align;
    this.context.fillStyle = fill;
    this.context.fillText(content, x, y);
  }

  /** Write an image in device pixels, from (x, y) on. */
  pixels(x, y, image) {
    this.context.putImageData(image, Math.round(x * this.ratio), Math.round(y * this.ratio));
  }
}
CanvasPainter.tiles = new Map();

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const escaped = (text) =>
  String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`).replace(/[\u0000-\u0008\u000b-\u001f]/g, " ");
const short = (value) => String(Math.round(value * 100) / 100);

class SvgPainter {
  constructor(theme) {
    this.theme = theme;
    this.ratio = 1;
    this.out = [];
    this.used = new Set();
  }

  rect(x, y, width, height, fill) {
    this.out.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="${fill}"/>`);
  }

  idle(x, y, width, height, cause) {
    this.used.add(cause);
    this.rect(x, y, width, height, `url(#idle${cause})`);
  }

  outline(x, y, width, height, stroke, line) {
    this.out.push(
      `<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="none" stroke="${stroke}" stroke-width="${line}"/>`,
    );
  }

  line(points, stroke, width, dash = []) {
    const path = points.map(([x, y]) => `${short(x)},${short(y)}`).join(" ");
    const dashes = dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : "";
    this.out.push(`<polyline points="${path}" fill="none" stroke="${stroke}" stroke-width="${width}"${dashes}/>`);
  }

  text(x, y, content, fill, { size = 12, align = "start", weight = 400 } = {}) {
    const anchor = { start: "start", center: "middle", end: "end" }[align];
    this.out.push(
      `<text x="${short(x)}" y="${short(y)}" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}" fill="${fill}">${escaped(content)}</text>`,
    );
  }

  pixels(x, y, image) {
    const canvas = document.createElement("canvas");
    canvas.width = image.width;
    canvas.height = image.height;
    canvas.getContext("2d").putImageData(image, 0, 0);
    this.out.push(
      `<image x="${short(x)}" y="${short(y)}" width="${image.width}" height="${image.height}" href="${canvas.toDataURL("image/png")}"/>`,
    );
  }

  document(width, height) {
    const tiles = [...this.used].map((cause) => {
      const lines = HATCHES[cause].map(([a, b, c, d]) => `<path d="M${a} ${b}L${c} ${d}" stroke="${this.theme.hatch}"/>`);
      return `<pattern id="idle${cause}" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="${this.theme.idle[cause]}"/>${lines.join("")}</pattern>`;
    });
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${short(width)} ${short(height)}" width="${short(width)}" height="${short(height)}" font-family="${FONT.replace(/"/g, "&#34;")}">\n` +
      `<defs>${tiles.join("")}</defs>\n<rect width="100%" height="100%" fill="${this.theme.paper}"/>\n${this.out.join("\n")}\n</svg>\n`
    );
  }
}

/** Positions of a schedule's rows on a drawing of a given width; `view` is the interval of time that is shown. */
class Layout {
  constructor(schedule, width, row, showsMemory) {
    this.schedule = schedule;
    this.width = width;
    this.row = row;
    this.gap = row > 12 ? 3 : 1;
    this.lane = Math.max(6, Math.round(row * 0.5)); // of a queue beside computation
    this.above = row + schedule.lanes.length * (this.lane + 1); // of a rank, without its memory
    this.band = showsMemory ? Math.max(leastHeights(schedule)[1], Math.floor(row * BAND)) : 0;
    this.each = this.above + this.band * schedule.pools.length + this.gap;
    this.height = RULER + schedule.ranks * this.each + 4;
  }

  top(row) {
    const { ranks, rows, lanes } = this.schedule;
    if (row < ranks) return RULER + row * this.each;
    return RULER + rows[row].rank * this.each + this.row + 1 + lanes.indexOf(rows[row].queue) * (this.lane + 1);
  }

  high(row) {
    return row < this.schedule.ranks ? this.row : this.lane;
  }

  bandTop(rank, pool) {
    return this.top(rank) + this.above + pool * this.band;
  }

  /** The row, or the rank and the pool of a curve, at a height; null where there is none. */
  placeAt(y) {
    const { ranks, lanes } = this.schedule;
    const rank = Math.floor((y - RULER) / this.each);
    if (rank < 0 || rank >= ranks) return null;
    const inside = y - this.top(rank);
    if (inside <= this.row) return { rank };
    const lane = Math.floor((inside - this.row - 1) / (this.lane + 1));
    if (lane < lanes.length) return { rank: ranks + rank * lanes.length + Math.max(0, lane) };
    return this.band ? { rank, pool: Math.min(this.schedule.pools.length - 1, Math.floor((inside - this.above) / this.band)) } : null;
  }

  scale(view) {
    return (this.width - GUTTER - RIGHT) / (view.end - view.start);
  }

  x(time, view) {
    return GUTTER + (time - view.start) * this.scale(view);
  }

  time(x, view) {
    return view.start + (x - GUTTER) / this.scale(view);
  }
}

/** The smallest of …, .5, 1, 2, 5, 10, … that cuts `span` into at most `most` parts. */
function niceStep(span, most) {
  if (!(span > 0)) return 1;
  const rough = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => power * factor).find((step) => step >= rough * (1 - 1e-9));
}

/** By rank of a schedule: the times at which its warm-up begins, its steady phase and its cool-down, and the end. */
function phasesOf(schedule, rank) {
  const { start, end } = schedule.programs[rank], count = schedule.reached[rank];
  const any = (at, event) => schedule.codesAt(rank, at).some((code) => schedule.kindOf(code).produces.includes(event));
  let first = 0, last = count - 1;
  while (first < count && !any(first, 1)) first++;
  while (last >= 0 && !any(last, 0)) last--;
  const steady = Math.max(first, last + 1);
  return [[0, first, "warm-up"], [first, steady, "steady"], [steady, count, "cool-down"]]
    .filter(([from, to]) => to > from).map(([from, to, name]) => [start[from], end[to - 1], name]);
}

/** Drawing of one schedule with a painter. `options`: view, theme, follow (micro-batch or -1), critical, unit, most (the
 * memory at the top of a band), limit, phases (the rank whose phases are bracketed), deviation (of each cell, or null). */
class Drawing {
  constructor(layout, painter, options) {
    Object.assign(this, { layout, painter, schedule: layout.schedule }, options);
    const { kinds, document } = this.schedule;
    this.colours = kinds.map((kind) => document.colours[kind.letter]);
    this.inks = kinds.map((kind) => document.inks[kind.letter]);
  }

  draw() {
    const { layout, painter, theme } = this;
    painter.rect(0, 0, layout.width, layout.height, theme.paper);
    const boxes = this.visible().reduce((sum, [low, high]) => sum + high - low, 0);
    const room = (layout.width - GUTTER - RIGHT) * this.schedule.ranks;
    const dense = boxes > MOST_BOXES || (boxes > 200 && room / boxes < 4);
    if (dense) this.drawColumns();
    else this.drawBoxes();
    if (this.critical) this.drawPath(this.schedule.criticalPath, theme.accent, dense);
    this.drawLabels();
    this.drawRuler();
    this.drawPhases();
    return { dense, boxes };
  }

  /** By rank: the first cell in view, and the one after the last. */
  visible() {
    return this.schedule.programs.map((program, rank) => {
      const count = this.schedule.reached[rank];
      return [lowerBound(program.end, this.view.start, 0, count), lowerBound(program.start, this.view.end, 0, count)];
    });
  }

  colour(code) {
    const { schedule } = this;
    const colour = this.colours[Math.floor(code / schedule.stride)][schedule.chunkOf[schedule.stageOf(code)]];
    return this.follow >= 0 && schedule.unitOf(code) !== this.follow ? mixed(colour, this.theme.paper, 0.78) : colour;
  }

  clip(low, high) {
    const left = Math.max(GUTTER, this.layout.x(low, this.view));
    const right = Math.min(this.layout.width - RIGHT, this.layout.x(high, this.view));
    return [left, right - left];
  }

  drawBoxes() {
    const { schedule, painter, layout, theme } = this;
    const cache = new Map();
    const colour = (code) => {
      const key = this.follow >= 0 ? code : Math.floor(code / schedule.m);
      if (!cache.has(key)) cache.set(key, this.colour(code));
      return cache.get(key);
    };
    const texts = [];
    this.visible().forEach(([low, high], rank) => {
      const program = schedule.programs[rank], y = layout.top(rank), row = layout.high(rank);
      const foot = rank < schedule.ranks && row >= 14 && schedule.talks ? Math.max(4, row * 0.18) : 0;
      if (rank >= schedule.ranks) painter.rect(...this.clipped(row, y), theme.idle[3]);
      this.drawGaps(rank, y, row);
      for (let at = low; at < high; at++) {
        const [x, width] = this.clip(program.start[at], program.end[at]);
        if (width <= 0) continue;
        const edge = Math.min(1, 0.12 * width), off = this.deviation ? this.deviation(rank, at) : 0;
        const codes = schedule.codesAt(rank, at);
        const part = (row - foot) / codes.length;
        codes.forEach((code, half) => {
          const top = y + half * part;
          painter.rect(x, top, width - edge, part - (half + 1 < codes.length ? 0.5 : 0), colour(code));
          if (width > 6 && part >= 8 && !schedule.kindOf(code).of_stage) texts.push([code, x + (width - edge) / 2, top, part, width - edge]);
        });
        if (Math.abs(off) > 0.05) {
          const tint = off > 0 ? theme.late : theme.early, strength = Math.min(1, 0.35 + Math.abs(off));
          painter.rect(x, y, width - edge, Math.max(3, row * strength * 0.3), tint);
        }
        const talk = foot ? schedule.talk(codes) : null;
        if (foot) painter.rect(x, y + row - foot, width, foot, theme.paper);
        if (talk) this.drawTalk(talk, x, y + row - foot + 1, width - edge, foot - 1);
      }
      if (layout.band && rank < schedule.ranks) schedule.pools.forEach((pool, at) => this.drawMemory(pool, rank, layout.bandTop(rank, at) + 1, layout.band - 1));
    });
    for (const [code, x, top, part, width] of texts) {
      const label = schedule.unitName(code), most = Math.max(12, Math.min(16, part * 0.2));
      const beside = Math.min(most, part * 0.72, (width - 1) / (0.62 * label.length));
      // digits that have no room beside one another stand under one another, so that no number vanishes for its length alone
      const upright = beside < LEAST_NUMBER, size = upright ? Math.min(11, (part - 1) / label.length, (width - 1) / 0.62) : beside;
      if (size < LEAST_NUMBER) continue;
      const dim = this.follow >= 0 && schedule.unitOf(code) !== this.follow;
      const ink = this.inks[Math.floor(code / schedule.stride)][schedule.chunkOf[schedule.stageOf(code)]];
      const lines = upright ? [...label] : [label], middle = top + part / 2 + size * (0.36 - (lines.length - 1) / 2);
      lines.forEach((line, at) => painter.text(x, middle + at * size, line, dim ? theme.faint : ink, { size: Math.floor(size * 2) / 2, align: "center" }));
    }
  }

  /** x, y, width and height of a row over the whole step. */
  clipped(height, y) {
    const [x, width] = this.clip(...this.schedule.span);
    return [x, y, Math.max(0, width), height];
  }

  drawGaps(rank, y, height) {
    const gaps = this.schedule.gaps[rank];
    for (let i = lowerBound(gaps.end, this.view.start); i < gaps.cause.length && gaps.start[i] < this.view.end; i++) {
      const [x, width] = this.clip(gaps.start[i], gaps.end[i]);
      if (width > 0) this.painter.idle(x, y, width, height, gaps.cause[i]);
    }
  }

  /** Draw the all-to-all of a box in a row at its foot, for the part of the box's time in which the links are busy. */
  drawTalk(talk, x, y, width, height) {
    let left = x;
    for (const [code, share] of talk) {
      const wide = Math.min(share * width, x + width - left);
      this.painter.rect(left, y, wide, height, this.colour(code));
      left += wide;
    }
  }

  drawMemory(pool, rank, y, height) {
    const { times, levels, peak } = pool.ranks[rank];
    const { view, layout, painter, theme } = this;
    const first = pool === this.schedule.pools[0], most = first ? this.most : pool.most, limit = first && this.limit;
    if (!times.length || !(most > 0)) return;
    const [origin, finish] = this.schedule.span;
    // the curve runs in program order: at equal times the last value counts
    let at = lowerBound(times, view.start), level = at ? levels[at - 1] : 0;
    let from = Math.max(origin, view.start);
    const bar = (to) => {
      const [x, width] = this.clip(from, to);
      const high = (level / most) * height;
      if (width > 0 && high > 0) painter.rect(x, y + height - high, width, high, level >= peak - 1e-9 * peak ? theme.faint : theme.memory);
    };
    for (; at < times.length && times[at] < view.end; at++) {
      if (times[at + 1] === times[at] || levels[at] === level) continue;
      if (times[at] > from) {
        bar(times[at]);
        from = times[at];
      }
      level = levels[at];
    }
    bar(Math.min(finish, view.end));
    if (limit && height > 4) {
      const level = y + height - (limit / most) * height;
      painter.line([[GUTTER, level], [layout.width - RIGHT, level]], theme.late, 1, [3, 3]);
    }
  }

  /** Draw brackets over the phases of one rank. */
  drawPhases() {
    const { layout, painter, theme, view } = this;
    if (!(this.phases >= 0)) return;
    for (const [from, to, name] of phasesOf(this.schedule, this.phases)) {
      const [x, width] = this.clip(Math.max(from, view.start), Math.min(to, view.end)), y = RULER - 3;
      if (width < 4) continue;
      painter.line([[x + 1, y], [x + 1, y - 4], [x + width - 1, y - 4], [x + width - 1, y]], theme.faint, 1);
      const words = width > 110 ? `${name} of rank ${this.phases}` : name, wide = 5.6 * words.length + 6;
      if (width < wide + 8) continue;
      painter.rect(x + width / 2 - wide / 2, y - 9, wide, 9, theme.paper);
      painter.text(x + width / 2, y - 1, words, theme.faint, { align: "center", size: 10 });
    }
  }

  /** Draw rows as columns of pixels, each in the mean colour of the actions that run in it. */
  drawColumns() {
    const { schedule, layout, painter, theme, view } = this;
    const ratio = painter.ratio;
    const left = Math.round(GUTTER * ratio), columns = Math.round((layout.width - RIGHT) * ratio) - left;
    const image = new ImageData(columns, Math.round((layout.height - RULER) * ratio));
    const pixels = new Uint32Array(image.data.buffer);
    const word = (text) => {
      const [red, green, blue] = rgb(text);
      return 0xff000000 | (blue << 16) | (green << 8) | red;
    };
    pixels.fill(word(theme.paper));
    const scale = columns / (view.end - view.start);
    const palette = new Map();
    const colour = (code) => {
      const dim = this.follow >= 0 && schedule.unitOf(code) !== this.follow;
      const key = 2 * Math.floor(code / schedule.m) + dim;
      let parts = palette.get(key);
      if (!parts) palette.set(key, (parts = rgb(this.colour(code))));
      return parts;
    };
    const idle = theme.idle.map(rgb), paper = rgb(theme.paper);
    const halves = schedule.hasPairs ? 2 : 1;
    const sums = Array.from({ length: halves }, () => new Float32Array(4 * (columns + 1)));
    const spread = (sum, from, to, parts) => {
      let low = (from - view.start) * scale, high = (to - view.start) * scale;
      if (low < 0) low = 0;
      if (high > columns) high = columns;
      if (!(high > low)) return;
      let column = low | 0;
      const last = high | 0, [red, green, blue] = parts;
      let share = (last === column ? high : column + 1) - low;
      for (;;) {
        const i = 4 * column;
        sum[i] += share * red;
        sum[i + 1] += share * green;
        sum[i + 2] += share * blue;
        sum[i + 3] += share;
        if (++column > last) break;
        share = column === last ? high - column : 1;
      }
    };
    this.visible().forEach(([low, high], rank) => {
      for (const sum of sums) sum.fill(0);
      const { first, second, start, end } = schedule.programs[rank];
      for (let at = low; at < high; at++) {
        const edge = (end[at] - start[at]) * scale > 3 ? 0.8 / scale : 0;
        const parts = colour(first[at]);
        spread(sums[0], start[at], end[at] - edge, parts);
        if (edge) spread(sums[0], end[at] - edge, end[at], paper);
        if (halves > 1) {
          spread(sums[1], start[at], end[at] - edge, second[at] < 0 ? parts : colour(second[at]));
          if (edge) spread(sums[1], end[at] - edge, end[at], paper);
        }
      }
      const gaps = schedule.gaps[rank];
      for (let i = lowerBound(gaps.end, view.start); i < gaps.cause.length && gaps.start[i] < view.end; i++)
        for (const sum of sums) spread(sum, gaps.start[i], gaps.end[i], idle[gaps.cause[i]]);
      const top = Math.round((layout.top(rank) - RULER) * ratio), rows = Math.max(1, Math.round(layout.high(rank) * ratio));
      sums.forEach((sum, half) => {
        const y = top + Math.round((half * rows) / halves), high = Math.round(((half + 1) * rows) / halves) - Math.round((half * rows) / halves);
        const line = y * columns;
        for (let column = 0, i = 0; column < columns; column++, i += 4) {
          const rest = Math.max(0, 1 - sum[i + 3]);
          pixels[line + column] =
            0xff000000 |
            (Math.min(255, sum[i + 2] + rest * paper[2]) << 16) |
            (Math.min(255, sum[i + 1] + rest * paper[1]) << 8) |
            Math.min(255, sum[i] + rest * paper[0]);
        }
        for (let below = 1; below < high; below++) pixels.copyWithin((y + below) * columns, line, line + columns);
      });
      if (layout.band && rank < schedule.ranks)
        schedule.pools.forEach((pool, at) => this.memoryColumns(pool, rank, pixels, columns, Math.round((layout.bandTop(rank, at) - RULER) * ratio) + 1, Math.round(layout.band * ratio) - 1, scale, word(theme.memory)));
    });
    painter.pixels(GUTTER, RULER, image);
  }

  memoryColumns(pool, rank, pixels, columns, top, height, scale, ink) {
    const { times, levels } = pool.ranks[rank];
    const { view } = this, most = pool === this.schedule.pools[0] ? this.most : pool.most;
    if (!(most > 0) || height < 1) return;
    const peaks = new Float32Array(columns);
    const [origin, finish] = this.schedule.span;
    let at = lowerBound(times, view.start), level = at ? levels[at - 1] : 0, from = Math.max(origin, view.start);
    const until = (time) => {
      const low = Math.max(0, Math.floor((from - view.start) * scale)), high = Math.min(columns - 1, Math.floor((time - view.start) * scale));
      for (let column = low; column <= high; column++) if (peaks[column] < level) peaks[column] = level;
      from = time;
    };
    for (; at < times.length && times[at] < view.end; at++) {
      if (times[at] > from) until(times[at]);
      level = levels[at];
    }
    until(Math.min(finish, view.end));
    for (let column = 0; column < columns; column++) {
      const high = Math.round((peaks[column] / most) * height);
      for (let y = height - high; y < height; y++) pixels[(top + y) * columns + column] = ink;
    }
  }

  /** Draw a chain: its cells outlined, with lines from rank to rank; one line through all where boxes are columns. */
  drawPath(path, stroke, dense) {
    const { schedule, layout, view, painter } = this;
    const lines = [];
    let last = null;
    for (const [rank, at] of path) {
      const program = schedule.programs[rank];
      if (program.end[at] < view.start || program.start[at] > view.end) {
        last = null;
        continue;
      }
      const [x, width] = this.clip(program.start[at], program.end[at]);
      const y = layout.top(rank) + layout.high(rank) / 2;
      const key = `${Math.round(x)},${rank}`;
      if (last && last.key !== key && (dense || last.rank !== rank)) lines.push([[last.right, last.y], [x + Math.min(width / 2, 2), y]]);
      if (!dense && width > 3) painter.outline(x + 0.5, layout.top(rank) + 0.5, Math.max(1, width - 2), layout.high(rank) - 1, stroke, 2);
      if (!last || last.key !== key) last = { rank, key, y, right: dense ? x : x + width - Math.min(width / 2, 3) };
      else last.right = dense ? x : x + width - Math.min(width / 2, 3);
    }
    for (const line of lines) painter.line(line, this.theme.glow, 4);
    for (const line of lines) painter.line(line, stroke, 1.6);
  }

  drawLabels() {
    const { schedule, layout, painter, theme } = this;
    const every = Math.max(1, Math.ceil(13 / layout.each));
    const named = (name, y, high) => high >= 8 && painter.text(GUTTER - 8, y + high / 2 + 3.5, name, theme.faint, { align: "end", size: Math.min(10, high + 1) });
    for (let row = schedule.ranks; row < schedule.rows.length; row++) named(schedule.rows[row].queue, layout.top(row), layout.lane);
    for (let rank = 0; rank < schedule.ranks; rank += every) {
      const middle = layout.top(rank) + layout.row / 2 + 4;
      const size = Math.min(12, Math.max(9, layout.row + 2));
      painter.text(GUTTER - 8, middle, `rank ${rank}`, theme.ink, { align: "end", size });
      if (!layout.band) continue;
      schedule.pools.forEach(({ pool, ranks }, at) => {
        const below = layout.band >= 9 ? layout.bandTop(rank, at) + layout.band - 1 : middle;
        if (at && layout.band < 9) return;
        painter.text(layout.width - RIGHT + 5, below, schedule.amount(ranks[rank].peak, 3).replace(/ (.).*/, "$1"), theme.faint, { size: Math.min(size, 11) });
        named(pool, layout.bandTop(rank, at), layout.band);
      });
    }
  }

  drawRuler() {
    const { layout, painter, theme, view, unit } = this;
    const span = view.end - view.start, step = niceStep(span * unit.factor, (layout.width - GUTTER - RIGHT) / 80) / unit.factor;
    painter.text(GUTTER - 8, 14, unit.name ? `time, ${unit.name}` : "time", theme.faint, { align: "end", size: 11 });
    for (let count = Math.ceil(view.start / step - 1e-9); count * step <= view.end + 1e-9 * span; count++) {
      const x = layout.x(count * step, view);
      painter.line([[x, 18], [x, 22]], theme.faint, 1);
      painter.text(x, 14, number(plain(count * step * unit.factor), 6), theme.faint, { align: "center", size: 11 });
    }
  }
}
