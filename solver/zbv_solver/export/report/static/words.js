// What a schedule's actions waited for, in words: the same on hover and in the panel of a chosen action.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});

  zbv.waitedFor = function waitedFor(timeline, action) {
    const { by, action: awaited } = timeline.wait(action);
    if (by === "input") {
      return `its input ${timeline.text(awaited)} from rank ${timeline.rankOf(awaited)}`;
    }
    return by === "rank" ? `the end of ${timeline.text(awaited)} on its rank` : "nothing";
  };

  zbv.idledBefore = function idledBefore(timeline, action) {
    const idle = timeline.idle(action);
    if (idle === null) {
      return "first of its rank";
    }
    return idle > 0 ? zbv.time(idle, timeline.facts) : "none";
  };

  // Where a path's time went: "F 5 000 µs, I 2 200 µs, transfers 100 µs", empty where it took none; `late`,
  // which only measured times have, is "other".
  zbv.spentInWords = function spentInWords(timeline, path) {
    const { letters, transfers, late } = timeline.spent(path);
    const parts = letters
      .map((time, letter) => [`${timeline.facts.letters[letter]}`, time])
      .concat([["transfers", transfers], ["other", late]])
      .filter(([, time]) => time > 0)
      .map(([what, time]) => `${what} ${zbv.time(time, timeline.facts)}`);
    return parts.join(", ");
  };
})();
