// The actions of a schedule, unpacked from the columns that timeline.py packs, and what each of them waited for.
// An action is its index in the flat order: rank after rank, each in the order of execution.

import { Copies } from "./copies.js";

/** @typedef {number | number[]} Cost a number, or one per kind of microbatch if microbatches differ */

/**
 * What the server says about a timeline: timeline_facts() of timeline.py.
 * @typedef {object} Facts
 * @property {number} count
 * @property {boolean} is_measured
 * @property {boolean} has_ends whether the data has the ends of actions
 * @property {number} microbatch_bytes
 * @property {number} microbatches
 * @property {number[] | null} kind_of the kind of every microbatch; null if all are equal
 * @property {[string, number[]][]} features names and the value of every microbatch
 * @property {number[]} offset
 * @property {number[][]} stages
 * @property {Cost[][]} durations by letter and stage
 * @property {Cost[]} transfers by boundary
 * @property {{ deltas: Cost[][], static: number[], limits: number[], is_known: boolean, scale: number, unit: string }} memory
 * @property {import("./copies.js").CopyFacts | null} copies
 * @property {string} time_unit
 * @property {string} objective
 * @property {string} letters
 * @property {string[]} names
 * @property {string[]} fills
 * @property {string[]} inks
 * @property {number} shades
 * @property {number} max_glyphs
 */

/**
 * @typedef {object} Wait
 * @property {"input" | "rank" | "copy" | "nothing"} by
 * @property {number} action -1 for nothing; for a copy, the action after which it began
 * @property {number} late what remains between that and the start, which only measured times have
 */

const [F, I, W, B] = [0, 1, 2, 3]; // codes of letters

export class Timeline {
  /**
   * @param {Facts} facts
   * @param {ArrayBuffer} buffer timeline_bytes() of timeline.py
   */
  constructor(facts, buffer) {
    this.facts = facts;
    this.buffer = buffer;
    this.count = facts.count;
    this.offset = facts.offset;
    this.ranks = facts.offset.length - 1;
    let at = 0;
    /** @param {number} bytes of one value */
    const place = (bytes) => {
      at += bytes * this.count;
      return at - bytes * this.count;
    };
    this.start = new Float64Array(buffer, place(8), this.count);
    this.end = facts.has_ends ? new Float64Array(buffer, place(8), this.count) : new Float64Array(this.count);
    const Microbatches = facts.microbatch_bytes === 2 ? Uint16Array : Uint32Array;
    this.microbatch = new Microbatches(buffer, place(facts.microbatch_bytes), this.count);
    this.letter = new Uint8Array(buffer, place(1), this.count);
    this.chunk = new Uint8Array(buffer, place(1), this.count);
    this.stage = new Uint16Array(this.count);
    this.kind = new Uint8Array(this.count); // index of the fill
    for (let rank = 0; rank < this.ranks; rank += 1) {
      const stages = facts.stages[rank];
      for (let action = this.offset[rank]; action < this.offset[rank + 1]; action += 1) {
        const [letter, chunk] = [this.letter[action], this.chunk[action]];
        this.stage[action] = stages[chunk];
        this.kind[action] = facts.shades * letter + (chunk % facts.shades);
        if (!facts.has_ends) {
          this.end[action] = this.start[action] + this.costOf(facts.durations[letter][stages[chunk]], action);
        }
      }
    }
    this.last = -1; // the action that ends last; of several, the one on the lowest rank
    for (let action = 0; action < this.count; action += 1) {
      if (this.last < 0 || this.end[action] > this.end[this.last]) {
        this.last = action;
      }
    }
    this.makespan = this.last < 0 ? 0 : this.end[this.last];
    /** @type {Int32Array[] | null} */
    this.cells = null;
    /** @type {{ during: Float64Array, after: Float64Array } | null} */
    this.held = null;
    this.copies = new Copies(facts.copies, this);
  }

  /** The same actions at the same times, with everything on the device. */
  withoutCopies() {
    return new Timeline({ ...this.facts, copies: null }, this.buffer);
  }

  /**
   * A cost of an action, which may depend on its microbatch.
   * @param {Cost} cost
   * @param {number} action
   */
  costOf(cost, action) {
    return typeof cost === "number" ? cost : cost[this.facts.kind_of?.[this.microbatch[action]] ?? 0];
  }

  /** @param {number} action */
  text(action) {
    return `${this.stage[action]}${this.facts.letters[this.letter[action]]}${this.microbatch[action]}`;
  }

  /** @param {number} action */
  name(action) {
    return this.facts.names[this.letter[action]];
  }

  /** @param {number} action */
  rankOf(action) {
    let [low, high] = [0, this.ranks - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.offset[middle] <= action) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  /**
   * The first action of a rank that starts at `time` or later, as a position in the flat order.
   * @param {number} rank
   * @param {number} time
   */
  firstFrom(rank, time) {
    let [low, high] = [this.offset[rank], this.offset[rank + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle] < time) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  /**
   * Actions of a rank that may overlap [begin, end): the first, and one past the last.
   * @param {number} rank
   * @param {number} begin
   * @param {number} end
   * @returns {[number, number]}
   */
  window(rank, begin, end) {
    return [Math.max(this.offset[rank], this.firstFrom(rank, begin) - 1), this.firstFrom(rank, end)];
  }

  /**
   * The same for every rank.
   * @param {number} begin
   * @param {number} end
   */
  visible(begin, end) {
    return Array.from({ length: this.ranks }, (_, rank) => this.window(rank, begin, end));
  }

  /**
   * The action that a rank runs at a time, or the nearest one within `slack`; -1 if there is none.
   * @param {number} rank
   * @param {number} time
   */
  at(rank, time, slack = 0) {
    if (rank < 0 || rank >= this.ranks) {
      return -1;
    }
    const next = this.firstFrom(rank, time);
    const before = next > this.offset[rank] ? next - 1 : -1;
    const after = next < this.offset[rank + 1] ? next : -1;
    if (after >= 0 && this.start[after] === time) {
      return after;
    }
    if (before >= 0 && time < this.end[before]) {
      return before;
    }
    const sinceBefore = before < 0 ? Infinity : time - this.end[before];
    const untilAfter = after < 0 ? Infinity : this.start[after] - time;
    if (Math.min(sinceBefore, untilAfter) > slack) {
      return -1;
    }
    return sinceBefore <= untilAfter ? before : after;
  }

  /**
   * The action written as `7I3`, or -1; of an entry of a copy, such as `7O3`, the F whose memory it moves.
   * @param {string} text
   */
  find(text) {
    const found = /^\s*(\d+)\s*([FIWBODR])\s*(\d+)\s*$/i.exec(text);
    if (found === null) {
      return -1;
    }
    const [stage, letter, microbatch] = [Number(found[1]), found[2].toUpperCase(), Number(found[3])];
    if ("ODR".includes(letter)) {
      return this.copies.of(stage, microbatch) === undefined ? -1 : this.cell(F, stage, microbatch);
    }
    return this.cell(this.facts.letters.indexOf(letter), stage, microbatch);
  }

  /**
   * The action of a letter, stage and microbatch, or -1.
   * @param {number} letter
   * @param {number} stage
   * @param {number} microbatch
   */
  cell(letter, stage, microbatch) {
    const { microbatches, transfers } = this.facts;
    if (stage < 0 || stage > transfers.length || microbatch < 0 || microbatch >= microbatches) {
      return -1;
    }
    this.cells ??= this.index();
    return this.cells[letter][stage * microbatches + microbatch];
  }

  index() {
    const { microbatches, transfers, letters } = this.facts;
    const cells = Array.from(letters, () => new Int32Array((transfers.length + 1) * microbatches).fill(-1));
    for (let action = 0; action < this.count; action += 1) {
      cells[this.letter[action]][this.stage[action] * microbatches + this.microbatch[action]] = action;
    }
    return cells;
  }

  /**
   * The action that its rank ran before it, or -1.
   * @param {number} action
   */
  previous(action) {
    return action > this.offset[this.rankOf(action)] ? action - 1 : -1;
  }

  /**
   * The action whose output it needs: on the previous stage for F, on the next one for I and B; or -1.
   * @param {number} action
   */
  input(action) {
    const [stage, microbatch] = [this.stage[action], this.microbatch[action]];
    const letter = this.letter[action];
    if (letter === W) {
      return -1;
    }
    if (letter === F) {
      return this.cell(F, stage - 1, microbatch);
    }
    return this.backwardOf(stage + 1, microbatch);
  }

  /**
   * The B or I of a stage and microbatch, or -1.
   * @param {number} stage
   * @param {number} microbatch
   */
  backwardOf(stage, microbatch) {
    const whole = this.cell(B, stage, microbatch);
    return whole >= 0 ? whole : this.cell(I, stage, microbatch);
  }

  /**
   * When its input arrives; -Infinity if it needs none.
   * @param {number} action
   */
  arrival(action) {
    const input = this.input(action);
    if (input < 0) {
      return -Infinity;
    }
    const boundary = Math.min(this.stage[input], this.stage[action]);
    return this.end[input] + this.costOf(this.facts.transfers[boundary], action);
  }

  /**
   * How long its rank idled before it; null for the first action of a rank.
   * @param {number} action
   */
  idle(action) {
    const previous = this.previous(action);
    return previous < 0 ? null : this.start[action] - this.end[previous];
  }

  /**
   * What it waited for: its input, its rank or a copy, whichever was ready last; its rank if all were ready at once.
   * @param {number} action
   * @returns {Wait}
   */
  wait(action) {
    const previous = this.previous(action);
    const free = previous < 0 ? -Infinity : this.end[previous];
    const arrival = this.arrival(action);
    const start = this.start[action];
    const copy = this.copies.awaited.get(action);
    if (copy !== undefined && copy.end > Math.max(arrival, free, 0)) {
      return { by: "copy", action: this.copies.root(copy), late: start - copy.end };
    }
    if (arrival > free) {
      return { by: "input", action: this.input(action), late: start - arrival };
    }
    if (previous >= 0) {
      return { by: "rank", action: previous, late: start - free };
    }
    return { by: "nothing", action: -1, late: start };
  }

  /**
   * The critical path to an action, from its beginning: each action waited for the one before it.
   * @param {number} action
   */
  criticalPath(action) {
    const path = [];
    for (let at = action; at >= 0; at = this.wait(at).action) {
      path.push(at);
    }
    return path.reverse();
  }

  /**
   * How the time of a path is spent: per letter, in transfers, in copies, and late. The parts add up to the end of
   * the path.
   * @param {number[]} path
   */
  spent(path) {
    const letters = Array.from(this.facts.letters, () => 0);
    let [transfers, copies, late] = [0, 0, 0];
    for (const action of path) {
      letters[this.letter[action]] += this.end[action] - this.start[action];
      const wait = this.wait(action);
      late += wait.late;
      if (wait.by === "input") {
        transfers += this.arrival(action) - this.end[wait.action];
      } else if (wait.by === "copy") {
        copies += this.start[action] - wait.late - (wait.action < 0 ? 0 : this.end[wait.action]);
      }
    }
    return { letters, transfers, copies, late };
  }

  /**
   * Memory of its rank while an action runs and after it, in the problem's unit.
   * @param {number} action
   */
  memory(action) {
    const { during, after } = this.profile();
    return { during: during[action], after: after[action] };
  }

  /**
   * The memory that a rank holds before the action at a position of the flat order.
   * @param {number} rank
   * @param {number} position
   */
  heldBefore(rank, position) {
    return position > this.offset[rank] ? this.profile().after[position - 1] : this.facts.memory.static[rank];
  }

  /** Memory during and after every action. */
  profile() {
    this.held ??= this.computeProfile();
    return this.held;
  }

  computeProfile() {
    const { deltas, static: fixed } = this.facts.memory;
    const [during, after] = [new Float64Array(this.count), new Float64Array(this.count)];
    for (let rank = 0; rank < this.ranks; rank += 1) {
      let sum = 0;
      for (let action = this.offset[rank]; action < this.offset[rank + 1]; action += 1) {
        for (const change of this.copies.changes.get(action) ?? []) {
          sum += change.delta;
          change.held = fixed[rank] + sum;
        }
        const delta = this.costOf(deltas[this.letter[action]][this.stage[action]], action);
        sum += delta;
        after[action] = fixed[rank] + sum;
        during[action] = after[action] - delta + Math.max(0, delta);
      }
    }
    return { during, after };
  }
}

/**
 * Load a timeline, from the data that a page carries (Base64) or from an address.
 * @param {Facts} facts
 * @param {{ url?: string | null, data?: string | null }} source
 */
export async function loadTimeline(facts, { url = null, data = null }) {
  if (data !== null) {
    return new Timeline(facts, Uint8Array.from(atob(data), (character) => character.charCodeAt(0)).buffer);
  }
  if (url === null) {
    throw new Error("found neither data nor an address for the actions of a timeline");
  }
  const answer = await fetch(url);
  if (!answer.ok) {
    throw new Error(`the service answered with status ${answer.status} when asked for the actions`);
  }
  return new Timeline(facts, await answer.arrayBuffer());
}
