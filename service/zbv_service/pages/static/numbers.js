// Numbers as the server writes them, for modules; those with charts have the same as `zbv.number`.
import "../numbers.js";

export const { number: figure, percent, amount: withUnit, storage } = globalThis.zbv;

// Seconds as a clock on a page: tenths while they matter.
export function duration(seconds) {
  if (seconds < 100) {
    return `${seconds.toFixed(1)} s`;
  }
  const whole = Math.floor(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) {
    return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  }
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

// Round values that divide [low, high] into about `count` parts.
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) {
    return [low];
  }
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + span * 1e-9; at += 1) {
    found.push(at * step);
  }
  return found;
}
