// What an action waited for, in words: the same in the tooltip and in the panel of a selected action.

import { number, time } from "./numbers.js";

/** @typedef {import("./timeline.js").Timeline} Timeline */

/**
 * @param {Timeline} timeline
 * @param {number} action
 */
export function waitedFor(timeline, action) {
  const { by, action: awaited } = timeline.wait(action);
  if (by === "copy") {
    return `a copy ${timeline.copies.awaited.get(action)?.isBack === true ? "back from" : "to"} the host`;
  }
  if (by === "input") {
    return `input ${timeline.text(awaited)} from rank ${timeline.rankOf(awaited)}`;
  }
  return by === "rank" ? `the end of ${timeline.text(awaited)} on its rank` : "nothing";
}

/**
 * @param {Timeline} timeline
 * @param {number} action
 */
export function idleBefore(timeline, action) {
  const idle = timeline.idle(action);
  if (idle === null) {
    return "first of its rank";
  }
  return idle > 0 ? time(idle, timeline.facts) : "none";
}

/**
 * The features of an action's microbatch: "tokens 4 096, images 2"; empty if microbatches do not differ.
 * @param {Timeline} timeline
 * @param {number} action
 */
export function featuresInWords(timeline, action) {
  const microbatch = timeline.microbatch[action];
  return timeline.facts.features.map(([name, values]) => `${name} ${number(values[microbatch])}`).join(", ");
}

/**
 * How the time of a path is spent: "F 5 000 µs, I 2 200 µs, transfers 100 µs"; empty if it took none. Only measured
 * times have a part "other".
 * @param {Timeline} timeline
 * @param {number[]} path
 */
export function spentInWords(timeline, path) {
  const { letters, transfers, copies, late } = timeline.spent(path);
  /** @type {[string, number][]} */
  const parts = letters.map((spent, letter) => [timeline.facts.letters[letter], spent]);
  parts.push(["transfers", transfers], ["copies", copies], ["other", late]);
  return parts
    .filter(([, spent]) => spent > 0)
    .map(([what, spent]) => `${what} ${time(spent, timeline.facts)}`)
    .join(", ");
}
