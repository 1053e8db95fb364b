// Numbers as people read them, in the same format as quantities.py: four significant digits, narrow spaces between
// thousands, a true minus.

const NARROW_SPACE = "\u202f";

/**
 * Like toFixed, but ties round to even, as in Python.
 * @param {number} value
 * @param {number} decimals
 */
function fixed(value, decimals) {
  const scaled = Math.abs(value) * 10 ** decimals;
  const isExact = Number.isInteger(value * 2 ** (decimals + 1)); // otherwise it only looks like a tie
  const isTie = isExact && scaled % 1 === 0.5 && Math.floor(scaled) % 2 === 0;
  return (isTie ? (Math.sign(value) * Math.floor(scaled)) / 10 ** decimals : value).toFixed(decimals);
}

/** @param {number} value */
const magnitudeOf = (value) => (value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value))));

/** @param {number} value */
export function number(value, digits = 4) {
  if (!Number.isFinite(value)) {
    return value > 0 ? "∞" : "−∞";
  }
  const magnitude = magnitudeOf(value);
  if (magnitude >= 12 || magnitude < -6) {
    return value.toExponential(digits - 1).replace(/\.?0+(?=e)/, "").replaceAll("-", "−");
  }
  const [whole, fraction = ""] = fixed(value, Math.max(0, digits - 1 - magnitude)).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, NARROW_SPACE).replace("-", "−");
  const rest = fraction.replace(/0+$/, "");
  return rest === "" ? grouped : `${grouped}.${rest}`;
}

/** @param {number} fraction */
export function percent(fraction, digits = 2) {
  if (!Number.isFinite(fraction)) {
    return fraction > 0 ? "∞" : "−∞";
  }
  let text = fixed(100 * fraction, digits);
  if (/^-?0*\.?0*$/.test(text)) {
    text = text.replace("-", "");
  }
  return `${text}${NARROW_SPACE}%`.replace("-", "−");
}

/** Units of time whose size is known, in nanoseconds. */
const TIME_UNITS = { s: 1e9, ms: 1e6, µs: 1e3, ns: 1 };

/**
 * A number with its unit; times in the unit that suits.
 * @param {number} value
 * @param {string} [unit]
 */
export function amount(value, unit) {
  const size = Object.entries(TIME_UNITS).find(([name]) => name === unit)?.[1];
  const time = Math.abs(value) * (size ?? 0);
  const [name, scale] = Object.entries(TIME_UNITS).find(([, least]) => time >= least) ?? ["ns", 1];
  if (size !== undefined && time > 0 && Number.isFinite(time)) {
    return `${number(value / (scale / size))} ${name}`;
  }
  return unit ? `${number(value)} ${unit}` : number(value);
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/**
 * An amount of memory; bytes in the binary unit that suits.
 * @param {number} value
 * @param {string} [unit]
 */
export function storage(value, unit) {
  if (unit === undefined || !["bytes", "byte", "B"].includes(unit)) {
    return amount(value, unit);
  }
  let exponent = 0;
  while (Math.abs(value) >= 1024 ** (exponent + 1) && exponent < BYTE_UNITS.length - 1) {
    exponent += 1;
  }
  return amount(value / 1024 ** exponent, BYTE_UNITS[exponent]);
}

/**
 * A time of a schedule, with nine digits: two actions may differ only in the last ones.
 * @param {number} value
 * @param {{ time_unit: string }} facts
 */
export const time = (value, { time_unit: unit }) => (unit ? `${number(value, 9)} ${unit}` : number(value, 9));

/**
 * @param {number} value
 * @param {{ memory: { scale: number, unit: string } }} facts
 */
export const memory = (value, facts) => amount(value / facts.memory.scale, facts.memory.unit);

/**
 * Seconds as a clock on a page shows them, with tenths below 100.
 * @param {number} seconds
 */
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

/**
 * Round values that divide [low, high] into about `count` parts.
 * @param {number} low
 * @param {number} high
 * @param {number} count
 */
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) {
    return [low];
  }
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 2.5, 5].find((factor) => factor * power >= raw * 0.999) ?? 10);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + span * 1e-9; at += 1) {
    found.push(at * step);
  }
  return found;
}

/**
 * The numbers of an axis, with as many digits as it takes to tell neighbours apart.
 * @param {number[]} values
 */
export function axisNumbers(values) {
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(values[0] ?? 0);
  return values.map((value) => {
    const digits = magnitudeOf(value) - magnitudeOf(step) + 2; // one more than the first digit of the step
    return digits < 1 ? "0" : number(value, Math.min(15, digits));
  });
}
