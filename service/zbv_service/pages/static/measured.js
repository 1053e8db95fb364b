// Planned above measured: hovering an action of one says what it was in the other.
"use strict";

(() => {
  const { zbv } = globalThis;

  zbv.showLanes((timelines, lane, action) => {
    const [mine, other] = [timelines[lane], timelines[1 - lane]];
    const same = other.find(mine.text(action));
    if (same === undefined || same === null || same < 0) {
      return [];
    }
    const took = (timeline, at) => timeline.end[at] - timeline.start[at];
    const [planned, measured] = lane === 0 ? [took(mine, action), took(other, same)] : [took(other, same), took(mine, action)];
    const ratio = planned > 0 ? ` (${zbv.number(measured / planned)} ×)` : "";
    return [
      ["planned to take", zbv.time(planned, mine.facts)],
      ["took", `${zbv.time(measured, mine.facts)}${ratio}`],
    ];
  });
})();
