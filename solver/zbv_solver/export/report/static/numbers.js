// Numbers as people read them, the same as quantities.py: four significant digits, narrow spaces between
// thousands, a true minus.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const NARROW = "\u202f";

  // Like toFixed, but what lies exactly between two numbers becomes the even one, as it does in Python.
  function fixed(value, decimals) {
    const scaled = Math.abs(value) * 10 ** decimals;
    const isExact = Number.isInteger(value * 2 ** (decimals + 1)); // else it only looks like a tie
    const isTie = isExact && scaled % 1 === 0.5 && Math.floor(scaled) % 2 === 0;
    return (isTie ? (Math.sign(value) * Math.floor(scaled)) / 10 ** decimals : value).toFixed(decimals);
  }

  const magnitudeOf = (value) => (value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value))));

  zbv.number = function number(value, digits = 4) {
    if (!Number.isFinite(value)) {
      return value > 0 ? "∞" : "−∞";
    }
    const magnitude = magnitudeOf(value);
    if (magnitude >= 12 || magnitude < -6) {
      return value.toExponential(digits - 1).replace(/\.?0+(?=e)/, "").replaceAll("-", "−");
    }
    const [whole, fraction = ""] = fixed(value, Math.max(0, digits - 1 - magnitude)).split(".");
    const grouped = whole.replace(/\B(?=(\d{3})+$)/g, NARROW).replace("-", "−");
    const rest = fraction.replace(/0+$/, "");
    return rest === "" ? grouped : `${grouped}.${rest}`;
  };

  zbv.percent = function percent(fraction, digits = 2) {
    if (!Number.isFinite(fraction)) {
      return fraction > 0 ? "∞" : "−∞";
    }
    let text = fixed(100 * fraction, digits);
    if (/^-?0*\.?0*$/.test(text)) {
      text = text.replace("-", "");
    }
    return `${text}${NARROW}%`.replace("-", "−");
  };

  zbv.amount = (value, unit) => (unit ? `${zbv.number(value)} ${unit}` : zbv.number(value));
  // Bytes in the binary unit that suits.
  const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  zbv.storage = function storage(value, unit) {
    if (!["bytes", "byte", "B"].includes(unit)) {
      return zbv.amount(value, unit);
    }
    let exponent = 0;
    while (Math.abs(value) >= 1024 ** (exponent + 1) && exponent < BYTE_UNITS.length - 1) {
      exponent += 1;
    }
    return zbv.amount(value / 1024 ** exponent, BYTE_UNITS[exponent]);
  };
  // More digits: times of a schedule are told apart by their ends.
  zbv.time = (value, { time_unit: unit }) => (unit ? `${zbv.number(value, 9)} ${unit}` : zbv.number(value, 9));
  zbv.memory = (value, facts) => zbv.amount(value / facts.memory.scale, facts.memory.unit);

  // Numbers of an axis, with as many digits as tell them apart; Bokeh's own formatter groups with commas.
  zbv.axisNumbers = function axisNumbers(ticks) {
    const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(ticks[0] ?? 0);
    return ticks.map((tick) => {
      const digits = magnitudeOf(tick) - magnitudeOf(step) + 2; // one more than the step's first
      return digits < 1 ? "0" : zbv.number(tick, Math.min(15, digits));
    });
  };
  zbv.formatAxis = function formatAxis(axis) {
    axis.formatter.doFormat = (ticks) => zbv.axisNumbers(ticks);
  };
})();
