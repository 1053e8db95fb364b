// The values of one quantity as typed: one for all, one per chunk, or one each (per stage, stage boundary or rank).
// Values that are hidden, because there are fewer ranks now or another level of detail was chosen, are kept.

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const isValue = (value) => ["number", "string"].includes(typeof value);
export const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const WITH_COMMA = /^[+-]?\d*,(\d+)(e[+-]?\d+)?$/i;

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

const list = (length, of) => Array.from({ length }, (_, index) => of(index));
const areEqual = (texts) => texts.every((text) => text === texts[0]);

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
    this.modes = per === "stage" ? ["same", "chunk", "each"] : ["same", "each"];
    this.mode = "same";
    this.same = text;
    this.byChunk = [];
    this.each = new Map(); // by "chunk position", so that it stays in place when the number of ranks changes
    this.list = null; // texts pasted at once, more or fewer than there are fields
    this.asIs = undefined; // a value of a file that no field can show
  }

  #slot(index, { ranks }) {
    return `${Math.floor(index / ranks)} ${index % ranks}`;
  }

  // The texts of all fields of a mode.
  texts(shape, mode = this.mode) {
    if (mode === "same") {
      return [this.same];
    }
    if (mode === "chunk") {
      const usual = mostCommon(this.byChunk, this.same);
      return list(shape.chunks, (chunk) => this.byChunk[chunk] ?? usual);
    }
    const usual = mostCommon(this.each.values(), this.same);
    const text = (index) => (this.list === null ? (this.each.get(this.#slot(index, shape)) ?? usual) : (this.list[index] ?? ""));
    return list(shape.count(this.per), text);
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
    this.list = texts.length === shape.count(this.per) ? null : texts;
    if (this.list === null) {
      this.each = new Map(texts.map((text, index) => [this.#slot(index, shape), text]));
    }
  }

  // One text each, in every mode.
  spread(shape, mode = this.mode) {
    const texts = this.texts(shape, mode);
    const place = { same: () => 0, chunk: (index) => Math.floor(index / shape.ranks), each: (index) => index }[mode];
    return list(shape.count(this.per), (index) => texts[place(index)]);
  }

  // What a mode shows of texts for every stage, boundary or rank.
  #collapsed(spread, mode, { chunks, ranks }) {
    const parts = { same: [spread], chunk: list(chunks, (chunk) => spread.slice(chunk * ranks, (chunk + 1) * ranks)) };
    return mode === "each" ? spread : parts[mode].map((texts) => mostCommon(texts));
  }

  // Shows another level of detail. Values of a finer one come back if the coarser ones are as they made them.
  setMode(mode, shape) {
    const spread = this.spread(shape);
    const isFiner = this.modes.indexOf(mode) > this.modes.indexOf(this.mode);
    const hidden = { same: [], chunk: this.byChunk, each: [...this.each] }[mode];
    const shown = this.texts(shape).join(" ");
    const wouldShow = this.#collapsed(this.spread(shape, mode), this.mode, shape).join(" ");
    if (!isFiner || hidden.length === 0 || shown !== wouldShow) {
      const texts = this.#collapsed(spread, mode, shape);
      if (mode === "same") {
        [this.same] = texts;
      } else if (mode === "chunk") {
        this.byChunk = texts;
      } else {
        this.each = new Map(texts.map((text, index) => [this.#slot(index, shape), text]));
      }
    }
    this.list = null;
    this.mode = mode;
  }

  // Shows texts for every stage, boundary or rank in the least detailed mode that can.
  fill(spread, shape) {
    this.asIs = undefined;
    this.byChunk = [];
    this.setAll(spread, shape);
    const chunks = this.#collapsed(spread, "chunk", shape);
    if (areEqual(spread)) {
      this.mode = "same";
      this.same = spread[0] ?? this.same;
      this.each.clear();
    } else if (this.per === "stage" && shape.chunks > 1 && shape.ranks > 1 && spread.every((text, at) => text === chunks[Math.floor(at / shape.ranks)])) {
      this.mode = "chunk";
      this.byChunk = chunks;
    }
  }

  toJson(shape) {
    if (this.asIs !== undefined) {
      return this.asIs;
    }
    const values = ((this.mode === "each" && this.list) || this.texts(shape)).map(typed);
    return this.mode === "same" ? values[0] : values;
  }

  // Reads a value of a document in the least detailed mode that can show it; keeps it as it is if none can.
  fromJson(value, shape) {
    const count = shape.count(this.per);
    const isList = Array.isArray(value) && value.every(isValue);
    if (isValue(value)) {
      this.same = String(value);
    } else if (isList && value.length === count) {
      this.fill(value.map(String), shape);
    } else if (isList && this.per === "stage" && value.length === shape.chunks) {
      this.mode = "chunk";
      this.byChunk = value.map(String);
    } else {
      this.asIs = value;
    }
  }
}
