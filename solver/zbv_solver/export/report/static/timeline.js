// The actions of a schedule, unpacked from what timeline_data.py packed, and what each of them waited for.
// An action is its index in the flat order: rank after rank, each in the order of execution.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const [F, I, W] = [0, 1, 2]; // codes of letters; 3 is B

  class Timeline {
    // facts: timeline_facts(); buffer: an ArrayBuffer with timeline_bytes()
    constructor(facts, buffer) {
      this.facts = facts;
      this.count = facts.count;
      this.offset = facts.offset;
      this.ranks = facts.offset.length - 1;
      let at = 0;
      const column = (Type) => {
        const found = new Type(buffer, at, this.count);
        at += found.byteLength;
        return found;
      };
      this.start = column(Float64Array);
      this.end = facts.is_measured ? column(Float64Array) : new Float64Array(this.count);
      this.microbatch = column(facts.microbatch_bytes === 2 ? Uint16Array : Uint32Array);
      this.letter = column(Uint8Array);
      this.chunk = column(Uint8Array);
      this.stage = new Uint16Array(this.count);
      this.kind = new Uint8Array(this.count); // index of the fill
      for (let rank = 0; rank < this.ranks; rank += 1) {
        const stages = facts.stages[rank];
        for (let action = this.offset[rank]; action < this.offset[rank + 1]; action += 1) {
          const [letter, chunk] = [this.letter[action], this.chunk[action]];
          this.stage[action] = stages[chunk];
          this.kind[action] = facts.shades * letter + (chunk % facts.shades);
          if (!facts.is_measured) {
            this.end[action] = this.start[action] + facts.durations[letter][stages[chunk]];
          }
        }
      }
      this.last = -1; // the action that ends last, on the lowest of such ranks
      for (let action = 0; action < this.count; action += 1) {
        if (this.last < 0 || this.end[action] > this.end[this.last]) {
          this.last = action;
        }
      }
      this.makespan = this.last < 0 ? 0 : this.end[this.last];
    }

    text(action) {
      return `${this.stage[action]}${this.facts.letters[this.letter[action]]}${this.microbatch[action]}`;
    }

    name(action) {
      return this.facts.names[this.letter[action]];
    }

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

    // The first action of a rank that starts at `time` or later, as a position in the flat order.
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

    // Actions of a rank that may overlap [begin, end): the first, and where they stop.
    window(rank, begin, end) {
      return [Math.max(this.offset[rank], this.firstFrom(rank, begin) - 1), this.firstFrom(rank, end)];
    }

    // The same of every rank.
    visible(begin, end) {
      return Array.from({ length: this.ranks }, (_, rank) => this.window(rank, begin, end));
    }

    // The action that a rank runs at a time, or the nearest within `slack`; -1 where there is none.
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

    // The action written as `7I3`, or -1.
    find(text) {
      const found = /^\s*(\d+)\s*([FIWB])\s*(\d+)\s*$/i.exec(text);
      if (found === null) {
        return -1;
      }
      const [stage, letter, microbatch] = [Number(found[1]), found[2].toUpperCase(), Number(found[3])];
      return this.cell(this.facts.letters.indexOf(letter), stage, microbatch);
    }

    // The action of a letter, stage and microbatch, or -1.
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

    // What the action's rank ran before it, or -1.
    previous(action) {
      return action > this.offset[this.rankOf(action)] ? action - 1 : -1;
    }

    // The action whose output it needs from the stage before (F) or after (I, B), or -1.
    input(action) {
      const [stage, microbatch] = [this.stage[action], this.microbatch[action]];
      const letter = this.letter[action];
      if (letter === W) {
        return -1;
      }
      if (letter === F) {
        return this.cell(F, stage - 1, microbatch);
      }
      const whole = this.cell(3, stage + 1, microbatch);
      return whole >= 0 ? whole : this.cell(I, stage + 1, microbatch);
    }

    // When its input arrives, -Infinity where it needs none.
    arrival(action) {
      const input = this.input(action);
      if (input < 0) {
        return -Infinity;
      }
      return this.end[input] + this.facts.transfers[Math.min(this.stage[input], this.stage[action])];
    }

    // How long its rank idled before it; null for a rank's first action.
    idle(action) {
      const previous = this.previous(action);
      return previous < 0 ? null : this.start[action] - this.end[previous];
    }

    // What it waited for: the later of its input and of its rank, of two at the same time its rank.
    // { by: "input" | "rank" | "nothing", action, late }; late is what is left between that and its start, which
    // only measured times have.
    wait(action) {
      const previous = this.previous(action);
      const free = previous < 0 ? -Infinity : this.end[previous];
      const arrival = this.arrival(action);
      const start = this.start[action];
      if (arrival > free) {
        return { by: "input", action: this.input(action), late: start - arrival };
      }
      if (previous >= 0) {
        return { by: "rank", action: previous, late: start - free };
      }
      return { by: "nothing", action: -1, late: start };
    }

    // The critical path to an action: the actions from the beginning, each the one that the next waited for.
    criticalPath(action) {
      const path = [];
      for (let at = action; at >= 0; at = this.wait(at).action) {
        path.push(at);
      }
      return path.reverse();
    }

    // Where the time of a path goes: { letters: time by code, transfers, late }; they add up to its end.
    spent(path) {
      const letters = Array.from(this.facts.letters, () => 0);
      let [transfers, late] = [0, 0];
      for (const action of path) {
        letters[this.letter[action]] += this.end[action] - this.start[action];
        const wait = this.wait(action);
        late += wait.late;
        if (wait.by === "input") {
          transfers += this.arrival(action) - this.end[wait.action];
        }
      }
      return { letters, transfers, late };
    }

    // Memory of its rank while an action runs and after it, in the problem's unit.
    memory(action) {
      const { during, after } = this.profile();
      return { during: during[action], after: after[action] };
    }

    // What a rank holds before the action at a position of the flat order.
    heldBefore(rank, position) {
      return position > this.offset[rank] ? this.profile().after[position - 1] : this.facts.memory.static[rank];
    }

    // The same of all actions: { during, after }, Float64Arrays.
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
          const delta = deltas[this.letter[action]][this.stage[action]];
          sum += delta;
          after[action] = fixed[rank] + sum;
          during[action] = after[action] - delta + Math.max(0, delta);
        }
      }
      return { during, after };
    }
  }

  // A timeline from what a page has of it: facts, and either `data` (Base64) or the address of the data.
  zbv.loadTimeline = async function loadTimeline(facts, { url = null, data = null }) {
    if (url === null) {
      return new Timeline(facts, Uint8Array.from(atob(data), (character) => character.charCodeAt(0)).buffer);
    }
    const answer = await fetch(url);
    if (!answer.ok) {
      throw new Error(`the service answered ${answer.status} for the actions`);
    }
    return new Timeline(facts, await answer.arrayBuffer());
  };
  zbv.Timeline = Timeline;
})();
