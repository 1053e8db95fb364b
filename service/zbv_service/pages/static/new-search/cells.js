// Tables of cells: a row per quantity, and as many columns as the most detailed quantity needs.

import * as dom from "../dom.js";
import { listed, pasted } from "./values.js";

const MOST_COLUMNS = 256; // beyond it a row is one field with all its numbers
const MODES = {
  stage: { same: "same for all", chunk: "per chunk", each: "per stage" },
  boundary: { same: "same for all", each: "per boundary" },
  rank: { same: "same for all", each: "per rank" },
};

const make = /** @type {(tag: string, properties?: object, ...children: any[]) => any} */ (dom.make);

export const cellId = (key, index) => `${key}-${index}`;
export const issueId = (key) => `issue-${key}`;

// A list of equal values as one of them: the form shows how a value looks, and sends it unchanged.
const shortened = (_key, value) =>
  Array.isArray(value) && value.length > 0 && value.every((each) => each === value[0]) ? value[0] : value;

export class Cells {
  // changed(key) is called after every change of a value.
  constructor(table, quantities, form, changed) {
    this.table = table;
    this.quantities = quantities;
    this.form = form;
    this.changed = changed;
    table.addEventListener("input", (event) => this.#typed(event));
    table.addEventListener("change", (event) => this.#chosen(event));
    table.addEventListener("paste", (event) => this.#pasted(event));
    table.addEventListener("click", (event) => this.#replaced(event));
  }

  draw() {
    const focused = document.activeElement;
    const id = focused !== null && this.table.contains(focused) ? focused.id : null;
    const { shape } = this.form;
    const values = this.quantities.map(({ key }) => this.form.values[key]);
    const finest = (mode) => values.some((each) => each.mode === mode && each.asIs === undefined);
    const per = this.quantities[0].per;
    const most = per === "rank" ? shape.ranks : shape.stages;
    this.columns = finest("each") && most <= MOST_COLUMNS ? most : finest("chunk") ? shape.chunks : 1;
    this.table.replaceChildren(this.#head(per, shape), make("tbody", {}, ...this.#rows(shape)));
    this.table.classList.toggle("many", this.columns > 2);
    if (id !== null) {
      document.getElementById(id)?.focus();
    }
  }

  #head(per, shape) {
    const names = [];
    if (this.columns === 1) {
      names.push([per === "rank" ? "all ranks" : "all stages"]);
    } else if (per === "rank") {
      names.push(...Array.from({ length: this.columns }, (_, rank) => [`rank ${rank}`]));
    } else if (this.columns === shape.chunks && this.columns !== shape.stages) {
      const last = (chunk) => (chunk + 1) * shape.ranks - 1;
      const range = (chunk) => `stages ${chunk * shape.ranks} to ${last(chunk)}`;
      names.push(...Array.from({ length: this.columns }, (_, chunk) => [`chunk ${chunk}`, range(chunk)]));
    } else {
      names.push(...Array.from({ length: this.columns }, (_, stage) => [`stage ${stage}`, `rank ${shape.rankOf(stage)}`]));
    }
    const heads = names.map(([name, more]) =>
      make("th", { scope: "col" }, name, ...(more ? [make("small", { textContent: more })] : [])),
    );
    const unseen = ["Quantity", "Detail"].map((name) =>
      make("th", { scope: "col" }, make("span", { className: "hidden-text", textContent: name })),
    );
    return make("thead", {}, make("tr", {}, ...unseen, ...heads));
  }

  #rows(shape) {
    return this.quantities.flatMap((quantity) => {
      const { key, label, letter, per } = quantity;
      const values = this.form.values[key];
      const name = make("th", { scope: "row" }, label);
      if (letter) {
        name.prepend(make("b", { className: "letter", textContent: letter }));
      }
      const modes = values.modes.filter((mode) => mode !== "chunk" || shape.chunks > 1);
      const options = modes.map((mode) =>
        make("option", { value: mode, textContent: MODES[per][mode], selected: mode === values.mode }),
      );
      const choice = make("select", { id: `mode-${key}`, disabled: values.asIs !== undefined }, ...options);
      choice.dataset.mode = key;
      choice.setAttribute("aria-label", `Detail of ${label} ${letter}`);
      const row = make("tr", {}, name, make("td", { className: "mode" }, choice), ...this.#fields(quantity, values, shape));
      const issue = make("td", { colSpan: 2 + this.columns }, make("p", { className: "issue", id: issueId(key) }));
      return [row, make("tr", { className: "issue-row", hidden: true }, issue)];
    });
  }

  #fields(quantity, values, shape) {
    const { key, label, letter, hint } = quantity;
    if (values.asIs !== undefined) {
      const text = JSON.stringify(values.asIs, shortened);
      const shown = make("code", { textContent: text.length > 60 ? `${text.slice(0, 57)}…` : text });
      const replace = make("button", { type: "button", id: cellId(key, 0), textContent: "Replace" });
      replace.dataset.replace = key;
      return [make("td", { colSpan: this.columns, className: "as-is" }, "as in the file: ", shown, " ", replace)];
    }
    const texts = values.texts(shape);
    const count = shape.count(quantity.per);
    if (values.mode === "each" && count > MOST_COLUMNS) {
      const area = make("textarea", { id: cellId(key, 0), value: (values.list ?? texts).join(" "), rows: 3, spellcheck: false });
      area.dataset.all = key;
      area.setAttribute("aria-label", `${label} ${letter}, ${count} values in model order`);
      return [make("td", { colSpan: this.columns }, area)];
    }
    const names = { same: () => "", chunk: (at) => `, chunk ${at}`, each: (at) => `, ${quantity.per} ${at}` };
    const wide = { same: this.columns, chunk: this.columns / shape.chunks, each: 1 }[values.mode];
    const cells = texts.map((text, at) => {
      const isLocal = quantity.per === "boundary" && values.mode === "each" && shape.isLocal(at);
      const input = make("input", { id: cellId(key, at), value: text, inputMode: "decimal", placeholder: hint ?? "" });
      input.dataset.key = key;
      input.dataset.at = at;
      input.setAttribute("aria-label", `${label} ${letter}`.trim() + names[values.mode](at));
      if (isLocal) {
        input.title = "Both stages are on one rank: nothing is sent, so this value is ignored.";
        input.classList.add("local");
      }
      return make("td", { colSpan: wide }, input);
    });
    const missing = this.columns - texts.length * wide;
    return missing > 0 ? [...cells, make("td", { colSpan: missing, className: "none" })] : cells;
  }

  #typed(event) {
    const { key, at, all } = event.target.dataset;
    const { shape } = this.form;
    if (key !== undefined) {
      this.form.values[key].set(Number(at), event.target.value, shape);
      this.changed(key);
    } else if (all !== undefined) {
      this.form.values[all].setAll(listed(event.target.value), shape);
      this.changed(all);
    }
  }

  #chosen(event) {
    const { mode } = event.target.dataset;
    if (mode !== undefined) {
      this.form.values[mode].setMode(event.target.value, this.form.shape);
      this.draw();
      this.changed(mode);
    }
  }

  #pasted(event) {
    const { key, at } = event.target.dataset;
    const rows = pasted(event.clipboardData?.getData("text/plain") ?? "");
    if (key === undefined || (rows.length === 1 && rows[0].length < 2)) {
      return; // a single number is pasted at the cursor as usual
    }
    event.preventDefault();
    const first = this.quantities.findIndex((quantity) => quantity.key === key);
    rows.slice(0, this.quantities.length - first).forEach((texts, below) => {
      this.#fill(this.quantities[first + below].key, texts, below === 0 ? Number(at) : 0);
    });
    this.draw();
    this.changed(key);
  }

  // Fills numbers into neighbouring fields, starting at one, in the mode that has enough fields.
  #fill(key, texts, from) {
    const { shape } = this.form;
    const values = this.form.values[key];
    values.asIs = undefined;
    if (values.mode !== "each") {
      const mode = texts.length === shape.chunks && values.per === "stage" && from === 0 ? "chunk" : "each";
      values.setMode(mode, shape);
    }
    const before = values.texts(shape).slice(0, from);
    if (values.mode === "each" && from + texts.length > shape.count(values.per)) {
      values.setAll([...before, ...texts], shape);
    } else {
      texts.forEach((text, index) => values.set(from + index, text, shape));
    }
  }

  #replaced(event) {
    const key = event.target.dataset.replace;
    if (key !== undefined) {
      this.form.values[key].asIs = undefined;
      this.draw();
      document.getElementById(cellId(key, 0))?.focus();
      this.changed(key);
    }
  }
}
