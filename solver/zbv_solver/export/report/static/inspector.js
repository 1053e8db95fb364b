// An action that was chosen: its microbatch through the stages, its critical path, and the same in words.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const STEPS = { ArrowLeft: ["rank", -1], ArrowRight: ["rank", 1], ArrowUp: ["microbatch", -1], ArrowDown: ["microbatch", 1] };
  const MOVED = 4; // px that a pointer may move and still click
  const AROUND = 40; // px kept free above and below a chosen action

  class Inspector {
    // preview: zbv.Preview, which stands for the chart until there is one; panel: the element with the parts below
    constructor(preview, panel) {
      this.gantt = preview;
      this.timeline = preview.timeline;
      this.draw = () => preview.draw();
      this.panel = panel;
      this.parts = Object.fromEntries(
        ["head", "facts", "waited", "path"].map((name) => [name, panel.querySelector(`[data-part="${name}"]`)]),
      );
      this.showsWhole = false;
      this.field = document.getElementById("find-action");
      this.complaint = document.getElementById("find-complaint");
      this.summary = document.getElementById("critical-path");
      this.listen();
      this.listenTo(preview);
    }

    // From now on point out in a chart, beginning with what is pointed out already; draw: redraws it.
    adopt(gantt, draw) {
      const { showsIdle, emphasis, marked, chosen, path } = this.gantt;
      Object.assign(gantt, { showsIdle, emphasis, marked, chosen, path });
      [this.gantt, this.draw] = [gantt, draw];
      this.listenTo(gantt);
    }

    listenTo({ view: { el } }) {
      let pressed = null;
      el.addEventListener("pointerdown", (event) => {
        pressed = event;
      });
      el.addEventListener("click", (event) => {
        const moved = pressed === null ? 0 : Math.hypot(event.clientX - pressed.clientX, event.clientY - pressed.clientY);
        const action = moved > MOVED ? -1 : this.gantt.pointedAt(event);
        if (action >= 0) {
          this.choose(action === this.gantt.chosen ? -1 : action);
        }
      });
    }

    listen() {
      document.addEventListener("keydown", (event) => this.press(event));
      for (const button of this.panel.querySelectorAll("[data-step]")) {
        button.addEventListener("click", () => this.step(...STEPS[button.dataset.step]));
      }
      this.panel.querySelector("[data-close]").addEventListener("click", () => this.close());
      this.field.form.addEventListener("submit", (event) => {
        event.preventDefault();
        this.find(this.field.value);
      });
      this.field.addEventListener("input", () => this.complain(""));
    }

    press(event) {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) {
        return;
      }
      if (event.key === "Escape" && this.gantt.chosen >= 0) {
        this.close();
        return;
      }
      const step = STEPS[event.key];
      const inField = event.target === this.field;
      const isOurs = event.target.closest?.("#chart, #inspector") != null || (inField && step?.[0] === "microbatch");
      if (step !== undefined && isOurs) {
        event.preventDefault();
        this.step(...step);
      }
    }

    find(text) {
      const action = this.timeline.find(text);
      if (action >= 0) {
        this.complain("");
        this.choose(action);
      } else if (text.trim() === "") {
        this.close();
      } else {
        const example = this.timeline.count > 0 ? this.timeline.text(0) : "0F0";
        this.complain(`There is no ${text.trim().slice(0, 20)} here. An action is a stage, a letter and a microbatch, as ${example}.`);
      }
    }

    complain(text) {
      this.complaint.textContent = text;
      this.complaint.hidden = text === "";
      this.field.setAttribute("aria-invalid", String(text !== ""));
    }

    // The next (1) or previous (-1) action of the chosen one's rank or microbatch; with none chosen, the first.
    step(along, by) {
      const { chosen } = this.gantt;
      if (chosen < 0) {
        this.choose(this.timeline.count > 0 ? 0 : -1);
        return;
      }
      const all = along === "rank" ? this.ofRank(chosen) : this.ofMicrobatch(chosen);
      const next = all[all.indexOf(chosen) + by];
      if (next !== undefined) {
        this.choose(next);
      }
    }

    ofRank(action) {
      const { offset } = this.timeline;
      const rank = this.timeline.rankOf(action);
      return Array.from({ length: offset[rank + 1] - offset[rank] }, (_, at) => offset[rank] + at);
    }

    // In the order of time; of two that start together the lower stage first.
    ofMicrobatch(action) {
      const { microbatch, start, stage, count } = this.timeline;
      const found = [];
      for (let other = 0; other < count; other += 1) {
        if (microbatch[other] === microbatch[action]) {
          found.push(other);
        }
      }
      return found.sort((one, other) => start[one] - start[other] || stage[one] - stage[other] || one - other);
    }

    choose(action) {
      const { gantt, timeline } = this;
      gantt.chosen = action;
      gantt.marked = action < 0 ? [] : this.ofMicrobatch(action);
      gantt.emphasis = action < 0 ? null : new Uint8Array(timeline.count);
      for (const other of gantt.marked) {
        gantt.emphasis[other] = 1;
      }
      this.panel.hidden = action < 0;
      this.trace();
      if (action >= 0) {
        this.field.value = timeline.text(action);
        this.complain("");
        this.describe(action);
        this.reveal(action);
      }
      this.draw();
    }

    close() {
      const hadFocus = this.panel.contains(document.activeElement);
      this.field.value = "";
      this.choose(-1);
      if (hadFocus) {
        this.field.focus();
      }
    }

    showIdle(isOn) {
      this.gantt.showsIdle = isOn;
      this.draw();
    }

    showWhole(isOn) {
      this.showsWhole = isOn;
      this.trace();
      this.draw();
    }

    // The path that is drawn: the chosen action's, or else the whole one where that is asked for.
    trace() {
      const { gantt, timeline } = this;
      const end = gantt.chosen >= 0 ? gantt.chosen : this.showsWhole ? timeline.last : -1;
      gantt.path = end < 0 ? [] : timeline.criticalPath(end);
      this.summary.hidden = !this.showsWhole;
      if (this.showsWhole) {
        const path = timeline.last < 0 ? [] : timeline.criticalPath(timeline.last);
        const of = timeline.facts.objective === "span" ? " It is that of the iteration drawn; the span, from one iteration to the next, may be bound elsewhere." : "";
        this.summary.textContent =
          `Critical path: ${actions(path.length)} from ${path.length > 0 ? timeline.text(path[0]) : "nothing"} to the last end at ` +
          `${zbv.time(timeline.makespan, timeline.facts)}${timeSpent(timeline, path)}.${of}`;
      }
    }

    // Bring an action into view without changing the zoom.
    reveal(action) {
      const { range } = this.gantt;
      const [from, to] = [this.timeline.start[action], this.timeline.end[action]];
      if (from < range.start || to > range.end) {
        zbv.show(range, (from + to) / 2, range.end - range.start);
      }
      // Nor may the panel, which stays at the bottom of the window, lie over it.
      const { y } = this.gantt.place(action);
      const bottom = Math.min(window.innerHeight, this.panel.getBoundingClientRect().top) - AROUND;
      if (y < AROUND || y > bottom) {
        window.scrollBy({ top: y < AROUND ? y - AROUND : y - bottom });
      }
    }

    describe(action) {
      const { timeline } = this;
      const { facts } = timeline;
      const rank = timeline.rankOf(action);
      const { during, after } = timeline.memory(action);
      const name = document.createElement("b");
      name.textContent = timeline.text(action);
      this.parts.head.replaceChildren(
        name,
        ` ${timeline.name(action)}, rank ${rank}, stage ${timeline.stage[action]} (chunk ${timeline.chunk[action]}), microbatch ${timeline.microbatch[action]}`,
      );
      this.parts.facts.replaceChildren(
        zbv.terms([
          ["Start", zbv.time(timeline.start[action], facts)],
          ["End", zbv.time(timeline.end[action], facts)],
          ["Takes", zbv.time(timeline.end[action] - timeline.start[action], facts)],
          ["Idle before", zbv.idledBefore(timeline, action)],
          ...(facts.memory.is_known
            ? [[`Memory of rank ${rank}`, `${zbv.memory(during, facts)}, then ${zbv.memory(after, facts)}`]]
            : []),
        ]),
      );
      this.parts.waited.replaceChildren(...this.waitInWords(action));
      const path = this.gantt.path;
      this.parts.path.textContent =
        path.length === 1
          ? "Nothing led to it: its critical path is itself."
          : `Its critical path: ${actions(path.length)} from ${timeline.text(path[0])}${timeSpent(timeline, path)}.`;
    }

    waitInWords(action) {
      const { timeline } = this;
      const { by, action: awaited } = timeline.wait(action);
      if (by === "nothing") {
        return ["It waited for nothing."];
      }
      const link = document.createElement("button");
      link.type = "button";
      link.className = "link";
      link.textContent = timeline.text(awaited);
      link.addEventListener("click", () => this.choose(awaited));
      const at = zbv.time(timeline.end[awaited], timeline.facts);
      if (by === "rank") {
        return ["It waited for its rank, which ran ", link, ` until ${at}.`];
      }
      const transfer = timeline.arrival(action) - timeline.end[awaited];
      const way = transfer > 0 ? ` and was ${zbv.time(transfer, timeline.facts)} on the way` : "";
      return ["It waited for its input from ", link, ` on rank ${timeline.rankOf(awaited)}, which ended at ${at}${way}.`];
    }
  }

  const actions = (count) => (count === 1 ? "1 action" : `${zbv.number(count)} actions`);
  const timeSpent = (timeline, path) => {
    const words = zbv.spentInWords(timeline, path);
    return words === "" ? "" : `; its time goes to ${words}`;
  };
  zbv.Inspector = Inspector;
})();
