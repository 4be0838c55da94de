// One schedule with its costs and times, and how it changes under edits. The rules are those of pipeloom.schedule
// (graph.walk, check, PairTimes, Timeline, idle, critical); a test compares both on random schedules and edits.

const DEPENDENCY = 0, MESSAGE = 1, MEMORY = 2, END = 3, OVERHEAD = 4;
const CAUSES = ["dependency", "message", "memory", "end of step", "overhead"];

const plain = (value) => Math.round(value * 1e9) / 1e9 + 0;

/** A number as pipeloom.draw.figures.number prints it. */
function number(value, digits = 4) {
  if (!Number.isFinite(value)) return String(value);
  const fixed = (places) => {
    const [whole, rest] = Math.abs(value).toFixed(Math.min(100, places + 70)).split(".");
    const kept = whole + rest.slice(0, places);
    const tie = /^50*$/.test(rest.slice(places)) && Number(kept[kept.length - 1]) % 2 === 0; // toFixed takes the larger
    return tie ? (Math.sign(value) < 0 ? "-" : "") + whole + (places ? `.${rest.slice(0, places)}` : "") : value.toFixed(places);
  };
  if (value === Math.round(value) || Math.abs(value) >= 10 ** digits) return fixed(0).replace(/^-0$/, "0");
  const text = fixed(Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

/** The cells of one rank: codes of their actions (second: -1 unless it is a pair), what they wait for and produce, and times. */
class Program {
  constructor(length) {
    this.length = length;
    for (const name of ["first", "second", "need", "need2", "event", "event2"]) this[name] = new Int32Array(length);
    for (const name of ["hop", "hop2", "duration", "start", "end", "rise", "change"]) this[name] = new Float64Array(length);
  }

  /** Move the cell at `from`, so that it is at `to` afterwards. */
  move(from, to) {
    for (const column of Object.values(this)) {
      if (!ArrayBuffer.isView(column)) continue;
      const value = column[from];
      if (from < to) column.copyWithin(from, from + 1, to + 1);
      else column.copyWithin(to + 1, to, from);
      column[to] = value;
    }
  }
}

class Schedule {
  /** `document`: one pane of the page's data; `kinds`: the table of kinds. */
  constructor(document, kinds) {
    this.document = document;
    this.kinds = kinds;
    this.ranks = document.ranks;
    this.slices = document.slices || 1;
    this.m = document.microbatches * this.slices; // a unit is a micro-batch, or a slice of one
    this.stages = document.placement.length;
    this.stride = this.stages * this.m;
    this.always = 3 * this.stride;
    this.placement = document.placement;
    this.routes = document.routes;
    this.stagesOf = Array.from({ length: this.ranks }, () => []);
    this.placement.forEach((rank, stage) => this.stagesOf[rank].push(stage));
    this.chunkOf = this.placement.map((rank, stage) => this.stagesOf[rank].indexOf(stage));
    this.chunks = Math.max(...this.stagesOf.map((held) => held.length));
    this.before = new Array(this.stages).fill(-1);
    this.after = new Array(this.stages).fill(-1);
    for (const route of this.routes)
      route.forEach((stage, at) => {
        if (at) this.before[stage] = route[at - 1];
        if (at + 1 < route.length) this.after[stage] = route[at + 1];
      });
    this.tensors = document.tensors || [];
    this.reads = Array.from({ length: this.stages }, () => []); // by stage: [the stage at the other end, name] of what it reads
    this.writes = Array.from({ length: this.stages }, () => []);
    for (const route of this.routes)
      for (const [name, producer, consumers] of this.tensors)
        for (const consumer of consumers) {
          this.reads[route[consumer]].push([route[producer], name]);
          this.writes[route[producer]].push([route[consumer], name]);
        }
    this.history = [];
    this.future = [];
    this.hasPairs = false;
    this.remade = new Set(document.remade); // codes of the forwards whose activations are recomputed
    // Where the page does not simulate, Python gives rows (those of computation first, then other queues), curves and waits.
    this.still = document.still;
    this.rows = this.still ? this.still.rows : document.codes.map((_, rank) => ({ rank, queue: "" }));
    this.lanes = [...new Set(this.rows.slice(this.ranks).map(({ queue }) => queue))];
    this.programs = this.readAll();
    this.settle();
  }

  // ---- codes ----

  kindOf(code) {
    return this.kinds[Math.floor(code / this.stride)];
  }

  stageOf(code) {
    return Math.floor(code / this.m) % this.stages;
  }

  unitOf(code) {
    return code % this.m;
  }

  unitName(code) {
    const unit = this.unitOf(code);
    return this.slices > 1 ? `${Math.floor(unit / this.slices)}.${unit % this.slices}` : String(unit);
  }

  text(code) {
    const { letter, fuses, of_stage: ofStage } = this.kindOf(code), [whole, part] = letter.split(":");
    if (ofStage) return `${this.stageOf(code)}${letter}`;
    if (part) return `${this.stageOf(code)}${whole}${this.unitName(code)}:${part}`;
    const texts = (fuses.length ? fuses : [letter]).map((each) => `${this.stageOf(code)}${each}${this.unitName(code)}`);
    return fuses.length ? `(${texts.join(";")})` : texts[0];
  }

  words(code) {
    const { letter, fuses, of_stage: ofStage } = this.kindOf(code);
    if (ofStage) return `${letter} of stage ${this.stageOf(code)}`;
    return `${fuses.join(";") || letter} of stage ${this.stageOf(code)}, micro-batch ${this.unitName(code)}`;
  }

  codesAt(rank, at) {
    const program = this.programs[rank];
    return program.second[at] < 0 ? [program.first[at]] : [program.first[at], program.second[at]];
  }

  cell(rank, at) {
    return this.textOf(this.codesAt(rank, at));
  }

  cellWords(rank, at) {
    return this.codesAt(rank, at).map((code) => this.words(code)).join(" with ");
  }

  /** The words of check's messages, which name a cell a little differently. */
  checkWords(rank, at) {
    const texts = this.codesAt(rank, at).map((code) => this.words(code).replace(",", ""));
    return texts.length > 1 ? `the pair ${texts.join(" | ")}` : texts[0];
  }

  // ---- reading ----

  readAll() {
    const { codes, starts, ends } = this.document;
    return this.rows.map(({ rank }, row) => {
      const of = (values) => (this.still ? this.still.positions[row].map((at) => values[rank][at]) : values[rank]);
      return this.read(of(codes), of(starts), of(ends));
    });
  }

  read(codes, starts, ends) {
    const program = new Program(codes.length);
    const limit = this.document.most_kinds * this.stride;
    const origin = this.document.origin || 0;
    for (let at = 0; at < codes.length; at++) {
      const code = codes[at];
      const pair = code >= limit;
      const first = pair ? Math.floor(code / limit) - 1 : code;
      const second = pair ? code % limit : -1;
      program.first[at] = first;
      program.second[at] = second;
      program.need[at] = this.needOf(first);
      program.event[at] = this.eventOf(first);
      program.hop[at] = this.hopOf(first);
      program.need2[at] = pair ? this.needOf(second) : this.always;
      program.event2[at] = pair ? this.eventOf(second) : this.always + 1;
      program.hop2[at] = pair ? this.hopOf(second) : 0;
      program.duration[at] = pair ? this.pairTime(first, second) : this.durationOf(first);
      const gained = this.changeOf(first);
      if (pair) {
        this.hasPairs = true;
        const freed = this.changeOf(second);
        program.rise[at] = this.pairOverlaps(first, second) ? Math.max(0, gained + freed) : gained;
        program.change[at] = gained + freed - program.rise[at];
      } else {
        program.rise[at] = NaN; // one step: at its start where it is more, at its end where it is less
        program.change[at] = gained;
      }
      program.start[at] = starts[at] - origin;
      program.end[at] = ends[at] - origin;
    }
    return program;
  }

  needOf(code) {
    const need = this.kindOf(code).need;
    if (!need) return this.always;
    const stage = this.stageOf(code);
    let source = stage, event = need.event;
    if (need.step) {
      source = (need.step < 0 ? this.before : this.after)[stage];
      if (source < 0) {
        if (need.at_end === null) return this.always;
        source = stage;
        event = need.at_end;
      }
    }
    return event * this.stride + source * this.m + this.unitOf(code);
  }

  eventOf(code) {
    const { produces } = this.kindOf(code);
    return produces.length ? produces[0] * this.stride + (code % this.stride) : this.always + 1;
  }

  /** Time of the message that the action waits for. */
  hopOf(code) {
    const need = this.kindOf(code).need;
    if (!need || !need.step) return 0;
    const stage = this.stageOf(code);
    const other = (need.step < 0 ? this.before : this.after)[stage];
    return other < 0 ? 0 : this.hop(this.placement[other], this.placement[stage], this.factor(code));
  }

  hop(source, destination, factor, name = null) {
    const { p2p, message, bandwidth, tensors } = this.document.costs;
    if (source === destination) return 0;
    const latency = Array.isArray(p2p) ? p2p[source][destination] : p2p;
    const size = name !== null && Object.hasOwn(tensors, name) ? tensors[name] : message;
    return latency + (bandwidth === null ? 0 : (factor * size) / bandwidth);
  }

  /** [event, rank that produces it, name] of every tensor that the action waits for by name, or of its gradient. */
  namedOf(code) {
    const need = this.tensors.length ? this.kindOf(code).need : null;
    if (!need || !need.step) return [];
    const stage = this.stageOf(code), event = need.step < 0 ? 0 : 1;
    return (need.step < 0 ? this.reads : this.writes)[stage].map(([other, name]) => [
      event * this.stride + other * this.m + this.unitOf(code), this.placement[other], name,
    ]);
  }

  /** [action's code, event, name] of all that a cell waits for; the name is null where the neighbour in the route sends it. */
  waitsOf(rank, at) {
    const program = this.programs[rank], waits = [];
    for (const [code, need] of [[program.first[at], program.need[at]], [program.second[at], program.need2[at]]]) {
      if (code < 0) continue;
      if (need < this.always) waits.push([code, need, null]);
      for (const [event, , name] of this.namedOf(code)) waits.push([code, event, name]);
    }
    return waits;
  }

  factor(code) {
    const { factors } = this.document.costs;
    return factors.length ? factors[this.unitOf(code)] : 1;
  }

  durationOf(code) {
    const { duration } = this.kindOf(code);
    const base = typeof duration === "string" ? this.document.costs[duration][this.stageOf(code)] : duration;
    return base * this.factor(code);
  }

  changeOf(code) {
    const { activation, held, kept } = this.document.costs;
    const [saved, pending, inputs] = this.kindOf(code).memory;
    const stage = this.stageOf(code);
    const saves = this.remade.has(code) ? 0 : saved * (1 - kept[stage]);
    return (saves + inputs * kept[stage] + pending * held[stage]) * activation[stage] * this.factor(code);
  }

  // ---- pairs (costs.PairTimes) ----

  isSplit(code) {
    return !this.kindOf(code).produces.includes(2);
  }

  pairTime(first, second) {
    const s = this.stageOf(first), t = this.stageOf(second), split = this.isSplit(second);
    const a = this.factor(first), b = this.factor(second), { costs } = this.document;
    const again = this.kindOf(second).fuses.length ? costs.recompute[t] : 0;
    if (a === b) return a * this.evenPair(s, t, split, again);
    const alone = (split ? costs.input_grad : costs.backward)[t] + again;
    if ((split ? costs.pair_split || costs.pair : costs.pair) !== null) {
      const gain = costs.forward[s] + alone - this.evenPair(s, t, split, again);
      return a * costs.forward[s] + b * alone - Math.min(a, b) * gain;
    }
    const x = costs.share[s], y = costs.share[t];
    const talk = a * x * costs.forward[s] + b * y * costs.input_grad[t];
    if (talk === 0) return a * costs.forward[s] + b * alone;
    const compute = a * (1 - x) * costs.forward[s] + b * ((1 - y) * costs.input_grad[t] + again);
    return Math.max(compute + (split ? 0 : b * costs.weight_grad[t]), talk);
  }

  evenPair(s, t, split, again = 0) {
    const { costs } = this.document;
    const weight = costs.weight_grad[t];
    const given = (table) => (Array.isArray(table[s]) ? table[s][t] : table[s]);
    if (split && costs.pair_split !== null) return given(costs.pair_split) + again;
    if (costs.pair !== null) {
      const whole = given(costs.pair) + again;
      return split ? Math.max(costs.forward[s], whole - weight) : whole;
    }
    const x = costs.share[s], y = costs.share[t];
    const talk = x * costs.forward[s] + y * costs.input_grad[t];
    if (talk === 0) return costs.forward[s] + (split ? costs.input_grad : costs.backward)[t] + again;
    const compute = (1 - x) * costs.forward[s] + (1 - y) * costs.input_grad[t] + again;
    return Math.max(compute + (split ? 0 : weight), talk);
  }

  /** Whether the halves run in turns, so that the pair frees memory while it allocates. */
  pairOverlaps(first, second) {
    const s = this.stageOf(first), t = this.stageOf(second), split = this.isSplit(second);
    const { costs } = this.document;
    if (costs.share[s] > 0 && costs.share[t] > 0) return true;
    if (costs.pair === null && (costs.pair_split === null || !split)) return false;
    return this.evenPair(s, t, split) < costs.forward[s] + (split ? costs.input_grad : costs.backward)[t];
  }

  // ---- simulate and check ----

  /** Start every cell as early as order and messages allow. Return, by rank, how many cells could run. */
  simulate() {
    const never = Infinity;
    const endOf = new Float64Array(this.always + 2).fill(never);
    endOf[this.always] = endOf[this.always + 1] = 0;
    const waiting = new Int32Array(this.always + 2).fill(-1);
    const clocks = new Float64Array(this.ranks);
    const reached = new Int32Array(this.ranks);
    const ready = Array.from({ length: this.ranks }, (_, rank) => rank);
    const overlap = this.document.overlap_p2p;
    while (ready.length) {
      const rank = ready.pop();
      const { length, need, need2, event, event2, hop, hop2, duration, start, end } = this.programs[rank];
      let clock = clocks[rank], at = reached[rank];
      for (; at < length; at++) {
        const one = endOf[need[at]], two = endOf[need2[at]];
        if (one === never || two === never) {
          waiting[one === never ? need[at] : need2[at]] = rank;
          break;
        }
        const free = clock;
        clock = overlap
          ? Math.max(free, one + hop[at], two + hop2[at])
          : Math.max(Math.max(free, one) + hop[at], Math.max(free, two) + hop2[at]);
        if (this.tensors.length) // these events have happened: those of the neighbours in the route imply them
          for (const code of this.codesAt(rank, at))
            for (const [made, source, name] of this.namedOf(code)) {
              const leaves = overlap ? endOf[made] : Math.max(free, endOf[made]);
              clock = Math.max(clock, leaves + this.hop(source, rank, this.factor(code), name));
            }
        start[at] = clock;
        clock += duration[at];
        end[at] = clock;
        endOf[event[at]] = clock;
        endOf[event2[at]] = clock;
        for (const made of [event[at], event2[at]])
          if (waiting[made] >= 0) {
            ready.push(waiting[made]);
            waiting[made] = -1;
          }
      }
      clocks[rank] = clock;
      reached[rank] = at;
    }
    return reached;
  }

  /** Set the rank and the place in its program at which each event is produced; -1 for an event that no cell produces. */
  index() {
    this.makerRank = new Int32Array(this.always + 2).fill(-1);
    this.makerAt = new Int32Array(this.always + 2).fill(-1);
    this.programs.forEach((program, rank) => {
      for (let at = 0; at < program.length; at++)
        for (const event of [program.event[at], program.event2[at]])
          if (event < this.always) {
            this.makerRank[event] = rank;
            this.makerAt[event] = at;
          }
    });
  }

  /** Compute what follows from programs and times: the cycle in words, or "", and everything that is drawn. */
  settle(reached = null) {
    this.index();
    this.reached = reached || Int32Array.from(this.programs, (program) => program.length);
    this.invalid = this.programs.some((program, rank) => this.reached[rank] < program.length) ? this.explain() : "";
    this.memo = {};
  }

  /** The shortest cycle among the ranks that are stuck, in the words of `check`. */
  explain() {
    const stuck = (rank) => this.reached[rank] < this.programs[rank].length;
    const waits = new Map();
    for (let rank = 0; rank < this.ranks; rank++) {
      if (!stuck(rank)) continue;
      const at = this.reached[rank], program = this.programs[rank];
      for (const [code, need] of [[program.first[at], program.need[at]], [program.second[at], program.need2[at]]]) {
        if (code < 0 || need === this.always) continue;
        const owner = this.makerRank[need], place = this.makerAt[need];
        if (owner < 0 || !stuck(owner) || place < this.reached[owner]) continue;
        if (owner === rank && place === at)
          return (
            `rank ${rank}, action ${at}: ${this.cell(rank, at)} depends on itself: ${this.text(code)} waits for ` +
            `${this.text(this.makerCode(need))} of the same pair`
          );
        if (!waits.has(rank)) waits.set(rank, []);
        waits.get(rank).push([need, owner]);
      }
    }
    const lines = ["the schedule deadlocks; the shortest cycle:"];
    for (const [rank, need] of this.shortestCycle(waits)) {
      const owner = this.makerRank[need];
      lines.push(
        `  rank ${rank} is at ${this.checkWords(rank, this.reached[rank])} (action ${this.reached[rank]}), which waits for ` +
          `${this.words(this.makerCode(need)).replace(",", "")} on rank ${owner} (its action ${this.makerAt[need]}; that rank ` +
          `has reached action ${this.reached[owner]})`,
      );
    }
    return lines.join("\n");
  }

  /** The code of the action that produces an event. */
  makerCode(event) {
    const program = this.programs[this.makerRank[event]], at = this.makerAt[event];
    return program.event[at] === event ? program.first[at] : program.second[at];
  }

  shortestCycle(waits) {
    let best = [];
    for (const begin of waits.keys()) {
      const paths = [[begin, []]];
      const seen = new Set();
      search: for (let head = 0; head < paths.length; head++) {
        const [rank, path] = paths[head];
        if (best.length && path.length + 1 >= best.length) break;
        for (const [need, owner] of waits.get(rank) || []) {
          if (owner === begin) {
            best = [...path, [rank, need]];
            break search;
          }
          if (!seen.has(owner)) {
            seen.add(owner);
            paths.push([owner, [...path, [rank, need]]]);
          }
        }
      }
    }
    return best;
  }

  // ---- edits ----

  /** Move a cell of a rank's program to another place; times and figures follow. Where that deadlocks, move nothing and return
   * the cycle in words. */
  move(rank, from, to) {
    if (from === to) return "";
    this.apply(rank, from, to);
    const cycle = this.invalid;
    if (cycle) this.retract(rank, from, to);
    else {
      this.history.push([rank, from, to]);
      this.future.length = 0;
    }
    return cycle;
  }

  apply(rank, from, to) {
    this.programs[rank].move(from, to);
    this.settle(this.simulate());
  }

  /** Undo `apply`. Programs and times that nobody has edited are read again: a simulation cannot give those of a measured step. */
  retract(rank, from, to) {
    if (this.edited || this.document.source === "simulated") return this.apply(rank, to, from);
    this.programs = this.readAll();
    this.settle();
  }

  undo() {
    const edit = this.history.pop();
    if (!edit) return false;
    this.future.push(edit);
    this.retract(...edit);
    return true;
  }

  redo() {
    const edit = this.future.pop();
    if (!edit) return false;
    this.apply(...edit);
    this.history.push(edit);
    return true;
  }

  get edited() {
    return this.history.length > 0;
  }

  // ---- figures ----

  once(name, compute) {
    if (!(name in this.memo)) this.memo[name] = compute();
    return this.memo[name];
  }

  get span() {
    return this.once("span", () => {
      let low = Infinity, high = -Infinity;
      this.programs.forEach((program, rank) => {
        if (!this.reached[rank]) return;
        low = Math.min(low, program.start[0]);
        high = Math.max(high, program.end[this.reached[rank] - 1]);
      });
      return low === Infinity ? [0, 0] : [low, high];
    });
  }

  get makespan() {
    return this.span[1] - this.span[0];
  }

  get figures() {
    return this.once("figures", () => {
      const busy = [], idle = [], spans = [], byKind = [];
      this.programs.forEach((program, rank) => {
        const count = this.reached[rank];
        let ends = 0, starts = 0;
        const times = rank < this.ranks ? {} : byKind[this.rows[rank].rank];
        for (let at = 0; at < count; at++) {
          ends += program.end[at];
          starts += program.start[at];
          const taken = program.end[at] - program.start[at];
          const name = this.codesAt(rank, at).map((code) => this.kindOf(code).letter).join("|");
          times[name] = (times[name] || 0) + taken;
        }
        if (rank >= this.ranks) return;
        busy.push(plain(ends - starts));
        idle.push(plain(this.makespan - busy[rank]));
        spans.push(count ? program.end[count - 1] - program.start[0] : 0);
        byKind.push(times);
      });
      const total = (values) => values.reduce((sum, value) => sum + value, 0);
      return {
        makespan: plain(this.makespan), busy, idle, spans: spans.map(plain), byKind,
        bubble_ratio: total(busy) ? total(idle) / total(busy) : 0,
        bubble_rate: this.makespan ? total(idle) / (this.ranks * this.makespan) : 0,
        span_bubble_rate: Math.max(...spans) ? 1 - Math.max(...busy) / Math.max(...spans) : 0,
        peak_activations: this.still ? this.still.peak_activations : this.programs.map((_, rank) => this.peakActivations(rank)),
        peak_memory: this.memory.map((curve) => plain(curve.peak)),
      };
    });
  }

  peakActivations(rank) {
    const program = this.programs[rank];
    let level = 0, peak = -Infinity;
    for (let at = 0; at < this.reached[rank]; at++)
      for (const code of this.codesAt(rank, at)) {
        const [saved, pending] = this.kindOf(code).memory;
        level += (this.remade.has(code) ? 0 : saved) + pending;
        peak = Math.max(peak, level);
      }
    return peak === -Infinity ? 0 : peak;
  }

  /** By rank: times and the level of memory from each on, in program order, and the peak. */
  get memory() {
    return this.pools[0].ranks;
  }

  /** The pools that are drawn: name, most of any rank, and by rank the curve. */
  get pools() {
    return this.once("pools", () => {
      const pools = this.still ? this.still.curves.map(({ pool, ranks }) => ({ pool, ranks: ranks.map(curveOf) })) : [{ pool: "", ranks: this.simulatedMemory() }];
      return pools.map((each) => ({ ...each, most: Math.max(0, ...each.ranks.map((curve) => curve.peak)) }));
    });
  }

  get inBytes() {
    return this.pools[0].pool !== "";
  }

  /** An amount of memory in words: bytes, where the costs have them. */
  amount(value, digits = 4) {
    return this.inBytes ? sizeWords(value) : number(plain(value), digits);
  }

  /** A number of activations: in the unit that all schedules of the page share. */
  activations(value) {
    return number(plain(value * (this.document.unit || 1)));
  }

  simulatedMemory() {
    return (
      this.programs.map((program, rank) => {
        const count = this.reached[rank];
        const times = new Float64Array(2 * count), levels = new Float64Array(2 * count), before = new Float64Array(count);
        let level = 0, size = 0, peak = count ? -Infinity : 0;
        const point = (time) => {
          times[size] = time;
          levels[size++] = level;
          peak = Math.max(peak, level);
        };
        for (let at = 0; at < count; at++) {
          before[at] = level;
          const rise = program.rise[at], change = program.change[at];
          if (Number.isNaN(rise)) {
            level += change;
            point(change > 0 ? program.start[at] : program.end[at]);
          } else {
            level += rise;
            point(program.start[at]);
            level += change;
            point(program.end[at]);
          }
        }
        return { times: times.subarray(0, size), levels: levels.subarray(0, size), before, peak };
      })
    );
  }

  /** The highest level of memory of all ranks. */
  get most() {
    return this.pools[0].most;
  }

  /** Whether any stage declares all-to-all. */
  get talks() {
    return this.once("talks", () => this.document.costs.share.some((share) => share > 0));
  }

  /** [code, share of the box's time] of the all-to-all of its actions; null where none is declared. */
  talk(codes) {
    const { share, forward, input_grad: inputGrad } = this.document.costs;
    if (!this.talks) return null;
    const whole = codes.length > 1 ? this.pairTime(codes[0], codes[1]) : this.durationOf(codes[0]);
    const parts = [];
    for (const code of codes) {
      const { produces } = this.kindOf(code), stage = this.stageOf(code);
      const base = produces.includes(0) ? forward[stage] : produces.includes(1) ? inputGrad[stage] : 0;
      if (base && share[stage] && whole) parts.push([code, (share[stage] * base * this.factor(code)) / whole]);
    }
    return parts.length ? parts : null;
  }

  // ---- idle ----

  /** By rank: start, end, cause and the place of the next cell, of every interval in which it idles. */
  get gaps() {
    return this.once("gaps", () => this.programs.map((_, rank) => this.gapsOf(rank)));
  }

  isForward(code) {
    return code >= 0 && this.kindOf(code).produces.includes(0);
  }

  /** [arrival, end of what produces it, its rank, event] of the last message of these; null where none is waited for. */
  latest(rank, waits, clock) {
    let best = null;
    for (const [code, event, name] of waits) {
      const source = this.makerRank[event];
      if (source < 0 || this.makerAt[event] >= this.reached[source]) continue;
      const end = this.programs[source].end[this.makerAt[event]];
      const leaves = this.document.overlap_p2p ? end : Math.max(clock, end);
      const arrival = leaves + this.hop(source, rank, this.factor(code), name);
      if (!best || (arrival - best[0] || end - best[1] || source - best[2]) > 0) best = [arrival, end, source, event];
    }
    return best;
  }

  /** The last arrival that a cell waits for. */
  lastArrival(rank, at) {
    return this.latest(rank, this.waitsOf(rank, at), at ? this.programs[rank].end[at - 1] : this.span[0]);
  }

  gapsOf(rank) {
    if (this.still) {
      const [start, end, cause, at] = [0, 1, 2, 3].map((column) => (this.still.gaps[rank] || []).map((gap) => gap[column]));
      return { start, end, cause, at };
    }
    const program = this.programs[rank], count = this.reached[rank], curve = this.memory[rank];
    const [origin, finish] = this.span;
    const dust = 1e-9 * (finish - origin);
    const found = { start: [], end: [], cause: [], at: [] };
    const add = (start, end, cause, at) => {
      if (!(end > start + dust)) return;
      found.start.push(start);
      found.end.push(end);
      found.cause.push(cause);
      found.at.push(at);
    };
    const upcoming = new Int32Array(count + 1).fill(-1);
    for (let at = count - 1; at >= 0; at--) upcoming[at] = this.isForward(program.first[at]) ? at : upcoming[at + 1];
    let clock = origin;
    for (let at = 0; at < count; at++) {
      const start = program.start[at];
      if (start > clock + dust) {
        const wait = this.lastArrival(rank, at);
        let cuts;
        if (!wait) cuts = [[clock, start, OVERHEAD]];
        else {
          const computed = Math.min(start, Math.max(clock, wait[1]));
          const moving = wait[2] !== rank && wait[0] > clock;
          cuts = [[clock, computed, DEPENDENCY], [computed, start, moving ? MESSAGE : OVERHEAD]];
        }
        const later = upcoming[at];
        if (later >= 0 && !this.isForward(program.first[at])) {
          const code = program.first[later];
          if (curve.before[at] + this.changeOf(code) > curve.peak + 1e-9 * curve.peak) {
            const input = this.latest(rank, this.waitsOf(rank, later).filter((wait) => wait[0] === code), clock);
            const ready = input ? input[0] : clock;
            const from = Math.max(clock, ready);
            cuts = cuts.filter((cut) => cut[0] < ready).map(([a, b, cause]) => [a, Math.min(b, ready), cause]);
            if (from < start) cuts.push([from, start, MEMORY]);
          }
        }
        for (const [a, b, cause] of cuts) add(a, b, cause, at);
      }
      clock = program.end[at];
    }
    if (finish > clock + dust) add(clock, finish, END, count);
    for (const name of ["start", "end"]) found[name] = Float64Array.from(found[name]);
    return found;
  }

  /** By rank: idle time by cause, in the order of CAUSES. */
  get idleByCause() {
    return this.once("idleByCause", () =>
      this.gaps.slice(0, this.ranks).map((gaps, rank) => {
        const times = CAUSES.map(() => 0);
        for (let i = 0; i < gaps.cause.length; i++) times[gaps.cause[i]] += gaps.end[i] - gaps.start[i];
        const row = times.map(plain);
        const rest = plain(this.figures.idle[rank] - row.reduce((a, b) => a + b, 0));
        row[MESSAGE] = plain(row[MESSAGE] + Math.max(0, rest));
        return row;
      }),
    );
  }

  // ---- chains ----

  /** The chain of cells, first to last, each of which had to wait for the one before, that ends with this one. */
  chain(rank, at) {
    const later = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2] || a[3] - b[3];
    const path = [[rank, at]];
    if (this.still) {
      for (let next = this.still.waited_for[rank][at]; next; next = this.still.waited_for[next[0]][next[1]]) path.push(next);
      return path.reverse();
    }
    for (;;) {
      const program = this.programs[rank];
      let best = null;
      const offer = (candidate) => {
        if (!best || later(candidate, best) > 0) best = candidate;
      };
      for (const [code, event, name] of this.waitsOf(rank, at)) {
        const source = this.makerRank[event], place = this.makerAt[event];
        if (source < 0 || place >= this.reached[source]) continue;
        let arrival = this.programs[source].end[place];
        if (this.document.overlap_p2p) arrival += this.hop(source, rank, this.factor(code), name);
        offer([arrival, source !== rank ? 1 : 0, source, place]);
      }
      if (at) offer([program.end[at - 1], 0, rank, at - 1]);
      if (!best) return path.reverse();
      [, , rank, at] = best;
      path.push([rank, at]);
    }
  }

  get criticalPath() {
    return this.once("criticalPath", () => {
      let last = null;
      this.programs.forEach((program, rank) => {
        const at = this.reached[rank] - 1;
        if (at >= 0 && (!last || program.end[at] >= last[0])) last = [program.end[at], rank, at];
      });
      return last ? this.chain(last[1], last[2]) : [];
    });
  }

  /** The cells of one micro-batch, or slice of one, in order of time. */
  cellsOf(unit) {
    const cells = [];
    for (let event = 0; event < 3; event++)
      for (let stage = 0; stage < this.stages; stage++) {
        const key = event * this.stride + stage * this.m + unit;
        const rank = this.makerRank[key];
        if (rank >= 0 && this.makerAt[key] < this.reached[rank]) cells.push([rank, this.makerAt[key], event, stage]);
      }
    const start = ([rank, at]) => this.programs[rank].start[at];
    return cells.sort((a, b) => start(a) - start(b) || a[2] - b[2]);
  }

  // ---- words ----

  /** How long a cell waited, and for what: "waited 2.1 for rank 1's F of stage 4". */
  waited(rank, at, show) {
    const gaps = this.gaps[rank];
    const parts = [];
    let total = 0;
    for (let i = lowerBound(gaps.at, at); i < gaps.at.length && gaps.at[i] === at; i++) {
      const time = gaps.end[i] - gaps.start[i];
      total += time;
      parts.push(`${CAUSES[gaps.cause[i]]} ${show(time)}`);
    }
    if (!total) return "";
    if (at >= this.reached[rank]) return `idle for ${show(total)} until the end of the step`;
    const by = this.still && this.still.waited_for[rank][at];
    const wait = this.still ? null : this.lastArrival(rank, at);
    const causes = parts.length > 1 || !parts[0].startsWith("dependency") ? ` (${parts.join(", ")})` : "";
    if (by) return `waited ${show(total)} for rank ${this.rows[by[0]].rank}'s ${this.cell(...by)}${causes}`;
    if (!wait) return `waited ${show(total)}${causes}`;
    const code = this.makerCode(wait[3]);
    return `waited ${show(total)} for rank ${wait[2]}'s ${this.kindOf(code).letter} of stage ${this.stageOf(code)}${causes}`;
  }

  /** Sentences on the values that an action needs, makes and frees, with their bytes and the holder of each. */
  valuesOf(code) {
    const kind = this.kindOf(code), stage = this.stageOf(code), left = this.document.left[code] || [];
    const size = (value, at) => {
      const known = this.document.bytes[value];
      return known ? `, ${sizeWords(known[1][at] * this.factor(code))} in ${known[0]}` : "";
    };
    const needs = kind.needs.flatMap(([value, step, atEnd]) => {
      let at = step < 0 ? this.before[stage] : step > 0 ? this.after[stage] : stage;
      const name = at < 0 ? atEnd : value;
      if (name === null) return [];
      if (at < 0) at = stage;
      const rank = this.placement[at];
      const maker = this.document.codes[rank].flatMap((each) => this.codesOf(each)).findLast((each) =>
        this.stageOf(each) === at && this.unitOf(each) === this.unitOf(code) && this.makes(each).includes(name));
      return [`${name} of stage ${at} (rank ${rank}${maker === undefined ? "" : `, made by ${this.text(maker)}`}${size(name, at)})`];
    });
    const here = (values) => values.map((value) => `${value}${size(value, stage)}`).join("; ");
    const makes = kind.makes.filter((value) => !left.includes(value));
    return [
      ...(needs.length ? [`needs ${needs.join("; ")}`] : []),
      ...(makes.length ? [`makes ${here(makes)}, held by rank ${this.placement[stage]}`] : []),
      ...(kind.frees.length ? [`frees ${here(kind.frees)}`] : []),
    ];
  }

  makes(code) {
    const left = this.document.left[code] || [];
    return this.kindOf(code).makes.filter((value) => !left.includes(value));
  }

  /** The codes of the actions of an entry. */
  codesOf(entry) {
    const limit = this.document.most_kinds * this.stride;
    return entry < limit ? [entry] : [Math.floor(entry / limit) - 1, entry % limit];
  }

  // ---- forms ----

  /** By rank: the cells of its program in their text form, those of all queues in one list. */
  cells() {
    if (this.still) return this.document.codes.map((codes) => codes.map((entry) => this.textOf(this.codesOf(entry))));
    return this.programs.map((program, rank) => Array.from(program.first, (_, at) => this.cell(rank, at)));
  }

  textOf(codes) {
    const texts = codes.map((code) => this.text(code));
    return texts.length > 1 ? `(${texts.join(";").replace(/[()]/g, "")})OVERLAP_F_B` : texts[0];
  }

  /** The part of this schedule that the CSV form cannot express; empty if it can express all of it. */
  beyondCsv() {
    if (this.routes.length > 1) return "which micro-batch takes which route";
    if (this.document.slices > 1) return "slices of sequences";
    return this.tensors.length ? "which tensors stages pass by name" : "";
  }

  csv() {
    const missing = this.beyondCsv();
    if (missing) throw new Error(`${this.document.name}: the CSV form cannot say ${missing}; save JSON`);
    return this.cells().map((cells) => cells.join(",") + "\n").join("");
  }

  json() {
    const { document } = this;
    return (
      JSON.stringify({
        format: "pipeloom.schedule/1",
        name: this.edited ? `${document.name}, edited` : document.name,
        options: this.edited ? {} : document.options,
        ranks: this.ranks,
        microbatches: document.microbatches,
        placement: this.placement,
        routes: this.routes,
        route_of: document.route_of || new Array(document.microbatches).fill(0),
        programs: this.cells(),
        ...(this.tensors.length ? { tensors: this.tensors } : {}),
        ...(this.slices > 1 ? { slices: this.slices } : {}),
      }) + "\n"
    );
  }
}

/** A curve from its points (time, level). */
function curveOf(points) {
  const levels = points.map(([, level]) => level);
  return { times: points.map(([time]) => time), levels, peak: levels.reduce((a, b) => Math.max(a, b), 0) };
}

/** A number of bytes, as people write it. */
function sizeWords(count) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (count >= size) return `${number(count / size, 3)} ${unit}`;
  return `${number(count)} B`;
}

/** The first index of a sorted array whose value is not below `value`. */
function lowerBound(values, value, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
