// Numbers as the server writes them (zbv_solver/export/quantities.py): four significant digits, narrow spaces
// between thousands, a true minus.

const NARROW = "\u202f";

// Like toFixed, but what lies exactly between two numbers becomes the even one, as it does in Python.
function fixed(value, decimals) {
  const scaled = Math.abs(value) * 10 ** decimals;
  const isExact = Number.isInteger(value * 2 ** (decimals + 1)); // else it only looks like a tie
  const isTie = isExact && scaled % 1 === 0.5 && Math.floor(scaled) % 2 === 0;
  return (isTie ? (Math.sign(value) * Math.floor(scaled)) / 10 ** decimals : value).toFixed(decimals);
}

export function figure(value, digits = 4) {
  if (!Number.isFinite(value)) {
    return value > 0 ? "∞" : "−∞";
  }
  const magnitude = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  if (magnitude >= 12 || magnitude < -6) {
    return value.toExponential(digits - 1).replace(/(?<=e[+-])(?=\d$)/, "0").replaceAll("-", "−");
  }
  let [whole, fraction = ""] = fixed(value, Math.max(0, digits - 1 - magnitude)).split(".");
  whole = whole.replace(/\B(?=(\d{3})+$)/g, NARROW).replace("-", "−");
  fraction = fraction.replace(/0+$/, "");
  return fraction === "" ? whole : `${whole}.${fraction}`;
}

export function withUnit(value, unit) {
  return unit ? `${figure(value)} ${unit}` : figure(value);
}

export function percent(fraction, digits = 2) {
  if (!Number.isFinite(fraction)) {
    return fraction > 0 ? "∞" : "−∞";
  }
  let text = fixed(100 * fraction, digits);
  if (/^-?0*\.?0*$/.test(text)) {
    text = text.replace("-", "");
  }
  return `${text}${NARROW}%`.replace("-", "−");
}

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
