// Numbers as people read them, the same as quantities.py: four significant digits, thin spaces, a real minus.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const NARROW_SPACE = "\u202f";

  zbv.number = function number(value, digits = 4) {
    if (!Number.isFinite(value)) {
      return value > 0 ? "∞" : "−∞";
    }
    const magnitude = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
    if (magnitude >= 12 || magnitude < -6) {
      return value.toExponential(digits - 1).replaceAll("-", "−");
    }
    const text = value.toFixed(Math.max(0, digits - 1 - magnitude));
    const [whole, part = ""] = text.split(".");
    const rest = part.replace(/0+$/, "");
    const grouped = whole.replace(/\B(?=(\d{3})+$)/g, NARROW_SPACE);
    return `${grouped}${rest === "" ? "" : `.${rest}`}`.replace("-", "−");
  };

  zbv.amount = (value, unit) => (unit === "" ? zbv.number(value) : `${zbv.number(value)} ${unit}`);
  // More digits: times of a schedule are told apart by their ends.
  zbv.time = (value, facts) => {
    const text = zbv.number(value, 9);
    return facts.time_unit === "" ? text : `${text} ${facts.time_unit}`;
  };
  zbv.memory = (value, facts) => zbv.amount(value / facts.memory.scale, facts.memory.unit);

  // Numbers of an axis in the same style; Bokeh's own formatter groups with commas.
  zbv.formatAxis = function formatAxis(axis) {
    axis.formatter.doFormat = (ticks) => {
      const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(ticks[0] ?? 1);
      const decimals = step > 0 ? Math.min(12, Math.max(0, 1 - Math.floor(Math.log10(step) + 1e-9))) : 0;
      return ticks.map((tick) => zbv.number(Number(tick.toFixed(decimals)), 15));
    };
  };
})();
