// A box beside the pointer that says what the action under it is.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const DISTANCE = 14; // px from the pointer

  // rowsOf(timeline, action) may add rows, [[term, value], …]. Answers a function that ends it.
  zbv.explain = function explain(gantt, rowsOf = () => []) {
    const box = document.createElement("div");
    box.className = "tip";
    box.hidden = true;
    document.body.append(box);
    const { el } = gantt.view;
    let shown = -1;

    const leave = () => {
      box.hidden = true;
      shown = -1;
    };
    el.addEventListener("pointermove", (event) => {
      const action = event.buttons === 0 ? gantt.pointedAt(event) : -1;
      if (action < 0) {
        leave();
        return;
      }
      if (action !== shown) {
        box.replaceChildren(...contentOf(gantt.timeline, action, rowsOf));
        box.hidden = false;
        shown = action;
      }
      const { width, height } = box.getBoundingClientRect();
      const right = event.clientX + DISTANCE;
      const left = right + width > window.innerWidth ? event.clientX - DISTANCE - width : right;
      const below = event.clientY + DISTANCE;
      const top = below + height > window.innerHeight ? event.clientY - DISTANCE - height : below;
      box.style.left = `${Math.max(4, left)}px`;
      box.style.top = `${Math.max(4, top)}px`;
    });
    el.addEventListener("pointerleave", leave);
    window.addEventListener("scroll", leave, { passive: true });
    return () => {
      window.removeEventListener("scroll", leave);
      box.remove();
    };
  };

  function contentOf(timeline, action, rowsOf) {
    const { facts } = timeline;
    const head = document.createElement("p");
    const name = document.createElement("b");
    name.textContent = timeline.text(action);
    head.append(name, ` ${timeline.name(action)}`);
    return [
      head,
      zbv.terms([
        ["start", zbv.time(timeline.start[action], facts)],
        ["end", zbv.time(timeline.end[action], facts)],
        ["rank", String(timeline.rankOf(action))],
        ["stage", `${timeline.stage[action]} (chunk ${timeline.chunk[action]})`],
        ["microbatch", String(timeline.microbatch[action])],
        ["waited for", zbv.waitedFor(timeline, action)],
        ["idle before", zbv.idledBefore(timeline, action)],
        ...rowsOf(timeline, action),
      ]),
    ];
  }

  // A list of terms and values.
  zbv.terms = function terms(rows) {
    const list = document.createElement("dl");
    for (const [term, value] of rows) {
      const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
      dt.textContent = term;
      dd.append(value);
      list.append(dt, dd);
    }
    return list;
  };
})();
