// Copies of activations to the host and back: when they run, what memory they change, and who waits for them.

/** @typedef {import("./timeline.js").Timeline} Timeline */

/**
 * What the server says about copies: Copied of timeline.py.
 * @typedef {object} CopyFacts
 * @property {[number, number, number, number][]} entries the action after it, letter, stage and microbatch
 * @property {[number, number][]} times start and end
 * @property {number[]} moved memory by stage
 */

/**
 * @typedef {object} Copy
 * @property {number} rank
 * @property {number} stage
 * @property {number} microbatch
 * @property {boolean} isBack
 * @property {number} start
 * @property {number} end
 * @property {number} next the action after its entry
 * @property {Copy | null} behind the copy before it on its engine
 * @property {Copy | null} after the copy that its rank has waited for since the last action
 */

/** @typedef {{ time: number, delta: number, held: number }} Change of a rank's memory; held from then on */

const [O, D] = [4, 5]; // codes of entries; the third is R

export class Copies {
  /**
   * @param {CopyFacts | null} facts
   * @param {Timeline} timeline
   */
  constructor(facts, timeline) {
    this.timeline = timeline;
    /** @type {Copy[]} */
    this.all = [];
    /** @type {Map<number, Change[]>} */
    this.changes = new Map(); // by the action after them
    /** @type {Map<number, Copy>} */
    this.awaited = new Map(); // by action: the last of the copies that its rank waits for just before it
    /** @type {Map<number, [Copy, Copy | null]>} */
    this.ofCell = new Map(); // out and back
    this.#read(facts ?? { entries: [], times: [], moved: [] });
  }

  /** @param {CopyFacts} facts */
  #read({ entries, times, moved }) {
    const { timeline } = this;
    /** @type {Map<string, Copy>} */
    const engines = new Map();
    entries.forEach(([next, letter, stage, microbatch], at) => {
      const [start, end] = times[at];
      const rank = timeline.rankOf(next);
      const after = this.awaited.get(next) ?? null;
      const free = next > timeline.offset[rank] ? timeline.end[next - 1] : 0;
      if (letter === D) {
        const [out] = /** @type {[Copy, null]} */ (this.of(stage, microbatch));
        this.#waits(next, out);
        this.#change(next, end, -moved[stage]);
        return;
      }
      const isBack = letter !== O;
      const engine = `${rank} ${isBack}`;
      const behind = engines.get(engine) ?? null;
      const copy = { rank, stage, microbatch, isBack, start, end, next, behind, after };
      engines.set(engine, copy);
      this.all.push(copy);
      if (isBack) {
        this.#change(next, Math.max(free, after?.end ?? 0), moved[stage]);
      }
      const [out] = this.of(stage, microbatch) ?? [copy];
      this.ofCell.set(this.#key(stage, microbatch), [out, isBack ? copy : null]);
    });
    for (const copy of this.all.filter(({ isBack }) => isBack)) {
      this.#waits(timeline.backwardOf(copy.stage, copy.microbatch), copy);
    }
  }

  /**
   * @param {number} stage
   * @param {number} microbatch
   */
  #key(stage, microbatch) {
    return stage * this.timeline.facts.microbatches + microbatch;
  }

  /**
   * The copies out and back of what an F keeps; undefined if there are none.
   * @param {number} stage
   * @param {number} microbatch
   */
  of(stage, microbatch) {
    return this.ofCell.get(this.#key(stage, microbatch));
  }

  /**
   * @param {number} action
   * @param {Copy} copy
   */
  #waits(action, copy) {
    const other = this.awaited.get(action);
    if (other === undefined || other.end < copy.end) {
      this.awaited.set(action, copy);
    }
  }

  /**
   * @param {number} next
   * @param {number} time
   * @param {number} delta
   */
  #change(next, time, delta) {
    const changes = this.changes.get(next) ?? [];
    changes.push({ time, delta, held: NaN });
    this.changes.set(next, changes);
  }

  /**
   * The action after which nothing but copies led to the end of a copy; -1 if no action did.
   * @param {Copy} copy
   */
  root(copy) {
    const { timeline } = this;
    for (let at = copy; ; ) {
      const free = at.next > timeline.offset[at.rank] ? timeline.end[at.next - 1] : -Infinity;
      if (at.behind !== null && at.behind.end >= at.start) {
        at = at.behind;
      } else if (at.after !== null && at.after.end >= at.start && at.after.end > free) {
        at = at.after;
      } else {
        return free === -Infinity ? -1 : at.next - 1;
      }
    }
  }
}
