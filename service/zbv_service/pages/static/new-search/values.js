// The values of one quantity as typed: one for all, one per chunk, or one each (per stage, stage boundary or rank).
// Values that are hidden, because there are fewer ranks now or another level of detail was chosen, are kept.

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const isValue = (value) => ["number", "string"].includes(typeof value);
export const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

// The value sent for a field: a number, or the text if it is not a number, so that the service reports it. JSON would
// turn numbers that are too large into null, which has another meaning.
export function typed(text) {
  const trimmed = text.trim();
  const value = NUMBER.test(trimmed) ? Number(trimmed) : NaN;
  return Number.isFinite(value) ? value : trimmed;
}

// The numbers of a list, separated by spaces, semicolons, or commas if there is no other separator. A single comma is
// a decimal comma.
export function listed(text) {
  const trimmed = text.trim();
  const separator = /[\s;]/.test(trimmed) ? /\s*;\s*|,?\s+/ : /,.*,/.test(trimmed) ? "," : /$^/;
  return withPoints(trimmed.split(separator).filter(Boolean));
}

// The numbers of pasted spreadsheet rows, one list per row; trailing empty cells are ignored.
export function pasted(text) {
  const lines = text.replace(/^[\r\n]+|[\r\n]+$/g, "").split(/\r?\n/);
  if (!lines.every((line) => line.includes("\t"))) {
    return [listed(text)];
  }
  const rows = lines.map((line) => line.replace(/\t\s*$/, "").split("\t").map((cell) => cell.trim()));
  const points = withPoints(rows.flat());
  return rows.map((row) => points.splice(0, row.length));
}

const WITH_COMMA = /^[+-]?\d*,(\d+)(e[+-]?\d+)?$/i;

// Turns decimal commas into points if they cannot be thousands separators: no number has a point, and some comma is
// not followed by three digits.
function withPoints(texts) {
  const commas = texts.map((text) => WITH_COMMA.exec(text)).filter(Boolean);
  const isDecimal = commas.some(([, digits]) => digits.length !== 3) && !texts.some((text) => text.includes("."));
  return isDecimal ? texts.map((text) => (WITH_COMMA.test(text) ? text.replace(",", ".") : text)) : texts;
}

export class Shape {
  constructor(ranks, placement, chunks) {
    this.ranks = ranks;
    this.placement = placement;
    this.chunks = { v: 2, single: 1 }[placement] ?? chunks;
    this.stages = this.ranks * this.chunks;
  }

  rankOf(stage) {
    const { ranks } = this;
    return this.placement === "v" && stage >= ranks ? 2 * ranks - 1 - stage : stage % ranks;
  }

  // Whether both stages at the boundary after a stage are on one rank, so that nothing is sent.
  isLocal(boundary) {
    return this.rankOf(boundary) === this.rankOf(boundary + 1);
  }

  count(per) {
    return { stage: this.stages, boundary: this.stages - 1, rank: this.ranks }[per];
  }
}

function mostCommon(texts, otherwise = "") {
  const counts = new Map();
  for (const text of texts) {
    counts.set(text, (counts.get(text) ?? 0) + 1);
  }
  return [...counts].reduce((best, entry) => (entry[1] > best[1] ? entry : best), [otherwise, 0])[0];
}

export class Values {
  constructor(per, text = "") {
    this.per = per;
    this.mode = "same";
    this.same = text;
    this.byChunk = [];
    this.each = new Map(); // by "chunk position", so that it stays in place when the number of ranks changes
    this.list = null; // texts pasted at once, more or fewer than there are fields
    this.asIs = undefined; // a value of a file that no field can show
    /** @type {any} */
    this.collapsed = null; // the change of mode that hides values of a more detailed one
  }

  get modes() {
    return this.per === "stage" ? ["same", "chunk", "each"] : ["same", "each"];
  }

  #slot(index, shape) {
    return `${Math.floor(index / shape.ranks)} ${index % shape.ranks}`;
  }

  // The texts of all fields of the mode.
  texts(shape) {
    if (this.mode === "same") {
      return [this.same];
    }
    if (this.mode === "chunk") {
      const usual = mostCommon(this.byChunk, this.same);
      return Array.from({ length: shape.chunks }, (_, chunk) => this.byChunk[chunk] ?? usual);
    }
    if (this.list !== null) {
      return Array.from({ length: shape.count(this.per) }, (_, index) => this.list[index] ?? "");
    }
    const usual = mostCommon(this.each.values(), this.same);
    return Array.from(
      { length: shape.count(this.per) },
      (_, index) => this.each.get(this.#slot(index, shape)) ?? usual,
    );
  }

  set(index, text, shape) {
    if (this.mode === "same") {
      this.same = text;
    } else if (this.mode === "chunk") {
      this.byChunk[index] = text;
    } else {
      this.list?.forEach((each, at) => this.each.set(this.#slot(at, shape), each));
      this.list = null;
      this.each.set(this.#slot(index, shape), text);
    }
  }

  // Sets all texts at once. If there are too many or too few, all are sent, and the service reports it.
  setAll(texts, shape) {
    this.mode = "each";
    this.list = null;
    if (texts.length === shape.count(this.per)) {
      texts.forEach((text, index) => this.set(index, text, shape));
    } else {
      this.list = texts;
    }
  }

  // One text each, in every mode.
  spread(shape) {
    const texts = this.texts(shape);
    const count = shape.count(this.per);
    if (this.mode === "each") {
      return texts;
    }
    const of = this.mode === "same" ? () => texts[0] : (index) => texts[Math.floor(index / shape.ranks)];
    return Array.from({ length: count }, (_, index) => of(index));
  }

  setMode(mode, shape) {
    if (mode === this.mode) {
      return;
    }
    const spread = this.spread(shape);
    const wasFiner = this.modes.indexOf(this.mode) > this.modes.indexOf(mode);
    const before = this.mode;
    if (mode === "each" && !(this.collapsed?.mode === "each" && this.#isAsCollapsed())) {
      this.each = new Map(spread.map((text, index) => [this.#slot(index, shape), text]));
    } else if (mode === "chunk" && !(this.collapsed?.mode === "chunk" && this.#isAsCollapsed())) {
      this.byChunk = Array.from({ length: shape.chunks }, (_, chunk) =>
        mostCommon(spread.slice(chunk * shape.ranks, (chunk + 1) * shape.ranks)),
      );
    } else if (mode === "same") {
      this.same = mostCommon(spread);
    }
    this.list = null;
    this.mode = mode;
    this.collapsed = wasFiner ? { mode: before, to: mode, texts: this.texts(shape).join(" ") } : null;
  }

  #isAsCollapsed() {
    const now = this.mode === "same" ? this.same : this.byChunk.join(" ");
    return this.collapsed.to === this.mode && this.collapsed.texts === now;
  }

  fill(spread, shape) {
    this.asIs = undefined;
    this.list = null;
    this.collapsed = null;
    const allEqual = (texts) => texts.every((text) => text === texts[0]);
    const chunks = Array.from({ length: shape.chunks }, (_, chunk) =>
      spread.slice(chunk * shape.ranks, (chunk + 1) * shape.ranks),
    );
    this.each = new Map(spread.map((text, index) => [this.#slot(index, shape), text]));
    if (allEqual(spread)) {
      this.mode = "same";
      this.same = spread[0] ?? this.same;
      this.each.clear();
    } else if (this.per === "stage" && shape.chunks > 1 && chunks.every(allEqual) && shape.ranks > 1) {
      this.mode = "chunk";
      this.byChunk = chunks.map((texts) => texts[0]);
    } else {
      this.mode = "each";
    }
  }

  toJson(shape) {
    if (this.asIs !== undefined) {
      return this.asIs;
    }
    const values = (this.list ?? this.texts(shape)).map(typed);
    return this.mode === "same" ? values[0] : values;
  }

  // Reads a value of a document in the least detailed mode that can show it; keeps it as it is if none can.
  fromJson(value, shape) {
    this.asIs = undefined;
    this.list = null;
    this.collapsed = null;
    const count = shape.count(this.per);
    if (isValue(value)) {
      this.mode = "same";
      this.same = String(value);
    } else if (Array.isArray(value) && value.every(isValue) && value.length === count && count > 0) {
      this.fill(value.map(String), shape);
    } else if (Array.isArray(value) && value.every(isValue) && this.per === "stage" && value.length === shape.chunks) {
      this.mode = "chunk";
      this.byChunk = value.map(String);
    } else if (!(Array.isArray(value) && value.length === 0 && count === 0)) {
      this.asIs = value;
    }
  }
}
