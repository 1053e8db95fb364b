// The form for a new search. Its fields represent a problem document: after every change the page rebuilds the
// document, has the service check it, and shows an estimate.

import "../copy.js";
import { at, input, make, part } from "../dom.js";
import { Cells } from "./cells.js";
import { acceptDocuments, curl, pretty } from "./documents.js";
import { Expectation } from "./expectation.js";
import { Issues, factsOf, meaningOf } from "./issues.js";
import { layerFactsOf, showLayers } from "./layers.js";
import { COSTS, DELTAS, LIMIT, ProblemForm, STATIC } from "./problem-form.js";
import { latest, messageOf, page, post } from "./service.js";

const CHECK_PAUSE = 200; // ms after the last key
const DRAFT = "zbv-new-search";
const SHAPING = ["pp_degree", "chunks", "placement", "limit_kind", "has_memory", "time_unit", "memory_unit"];

class NewSearch {
  constructor() {
    this.form = new ProblemForm();
    this.facts = null; // of the problem that was checked last; null if it was invalid
    this.layerFacts = null; // instead of these, for a problem with layers
    this.checked = null; // the text of the question that was checked last
    const changed = (key) => this.#cellChanged(key);
    this.tables = {
      costs: new Cells(at("table-costs"), COSTS, this.form, changed),
      memory: new Cells(at("table-memory"), DELTAS, this.form, changed),
      ranks: new Cells(at("table-ranks"), [STATIC, LIMIT], this.form, changed),
    };
    this.issues = new Issues(this.form);
    this.checkSoon = latest(() => this.check(), CHECK_PAUSE);
    this.expectation = new Expectation(() => this.#units.time, (found, note) => {
      this.begin({ ...found, options: this.form.body().options }, note);
      at("pp_degree").focus(); // the button that had the focus is disabled now
    });
    this.#listen();
  }

  #listen() {
    at("form").addEventListener("input", (event) => this.#edited(/** @type {HTMLInputElement} */ (event.target).id));
    at("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    at("preset").addEventListener("change", () => {
      const preset = page.presets[input("preset").value];
      if (preset !== undefined) {
        this.begin(preset, "");
      }
    });
    acceptDocuments((name, read) => this.#open(name, read));
  }

  #edited(id) {
    if (!this.form.edited(id)) {
      return; // a cell of a table, which tells its own changes
    }
    const { facts } = this;
    if (id === "limit_kind" && input(id).value === "amount" && facts?.limit) {
      this.form.values[LIMIT.key].fill(facts.limit.map(String), this.form.shape);
    }
    if (id === "limit_kind" && input(id).value === "fraction" && facts?.limit_fraction) {
      input("limit_fraction").value = String(Number(facts.limit_fraction.toPrecision(4)));
    }
    if (SHAPING.includes(id)) {
      this.#draw();
    }
    this.changed();
  }

  #cellChanged(key) {
    const isCause = key === "memory.forward" || key === "memory.backward_input";
    if (isCause && this.wasBalanced && this.form.balance()) {
      this.tables.memory.draw();
    }
    this.changed();
  }

  // Fills the form with the body of a search.
  begin(body, note) {
    const unshown = this.form.read(body);
    if (typeof body.name === "string") {
      input("name").value = body.name;
    }
    const kept = unshown.length === 0 ? "" : `The form has no fields for ${unshown.join(", ")}; they are sent unchanged.`;
    this.say([note, kept].filter(Boolean).join(" "));
    this.facts = null;
    this.layerFacts = null;
    this.#draw();
    this.changed();
  }

  async #open(name, read) {
    input("preset").value = "";
    try {
      this.begin(await read(), `Loaded ${name}.`);
    } catch (error) {
      if (!(error instanceof TypeError)) {
        throw error;
      }
      this.say(`${name[0].toUpperCase()}${name.slice(1)} cannot be used. ${error.message}`, true);
    }
  }

  // Shows the parts of the form that its content needs.
  #draw() {
    const { layers } = this.form;
    const limit = input("limit_kind").value;
    at("memory-fields").hidden = !input("has_memory").checked;
    at("chunks-field").hidden = input("placement").value !== "loop";
    at("limit_fraction-field").hidden = limit !== "fraction";
    showLayers(layers, this.#units);
    this.tables.ranks.quantities = limit === "amount" ? [STATIC, LIMIT] : [STATIC];
    for (const [name, table] of Object.entries(this.tables)) {
      if (layers !== null && name !== "ranks") {
        table.table.replaceChildren(); // otherwise their issues would show in a hidden table
      } else {
        table.draw();
      }
    }
    this.issues.show(this.issues.shown);
  }

  say(note, isBad = false) {
    at("note").textContent = note;
    at("note").hidden = note === "";
    at("note").classList.toggle("bad", isBad);
  }

  // ---- after every change

  changed() {
    this.wasBalanced = this.form.isBalanced;
    at("complaint").hidden = true;
    at("verdict").setAttribute("aria-busy", "true");
    this.#drawText();
    this.checkSoon(true);
  }

  get #body() {
    return this.form.body(this.facts?.limit ?? null);
  }

  // No part of the problem, so it is neither checked nor shown as JSON.
  get #name() {
    const name = input("name").value.trim();
    return name === "" ? {} : { name };
  }

  #drawText() {
    const body = this.#body;
    const text = pretty(body.problem);
    const isStale = !this.#isValid;
    for (const [id, content] of [["json", text], ["curl", curl(body, page)]]) {
      at(id).classList.toggle("stale", isStale);
      at(id).textContent = content;
    }
    at("copied").textContent = isStale && this.checked !== null ? "Not valid yet: the memory limit may be missing." : "";
    const link = part(document, "#download", HTMLAnchorElement);
    URL.revokeObjectURL(link.href);
    link.href = URL.createObjectURL(new Blob([`${text}\n`], { type: "application/json" }));
  }

  async check() {
    const question = JSON.stringify(this.form.question());
    const answer = await post("/v1/problems/check", question);
    if (question !== JSON.stringify(this.form.question())) {
      return; // the form has changed since; another check follows
    }
    this.checked = question;
    at("verdict").setAttribute("aria-busy", "false");
    const { facts = null, layers = null, issues = [] } = answer.ok ? answer.body : {};
    this.facts = facts;
    this.layerFacts = layers;
    this.#drawText();
    if (!answer.ok) {
      this.#verdict("bad", messageOf(answer));
      this.expectation.refuse("");
      if (answer.status === 401) {
        sessionStorage.setItem(DRAFT, JSON.stringify({ ...this.form.question(), ...this.#name }));
      }
      return;
    }
    this.issues.show(issues);
    this.#verdict(...this.issues.verdict(facts));
    const { hasFraction } = this.form;
    const terms = layers !== null ? layerFactsOf(layers, this.#units) : facts !== null ? factsOf(facts, this.#units) : [];
    at("facts").replaceChildren(...terms.map(([term, text]) => make("div", {}, make("dt", {}, term), make("dd", {}, text))));
    at("limit-meaning").textContent = facts === null ? "" : meaningOf(facts, hasFraction, this.#units.memory);
    if (layers === null && !facts?.fits) {
      this.expectation.refuse(facts === null ? "Correct the fields to see an estimate." : "");
      return;
    }
    at("summary").hidden = true;
    this.expectation.start(this.#body.problem, facts, hasFraction);
  }

  get #isValid() {
    return this.facts !== null || this.layerFacts !== null;
  }

  #verdict(style, text) {
    at("verdict").className = `verdict-line ${style}`;
    at("verdict").textContent = text;
  }

  // ---- the search itself

  async submit() {
    const button = input("submit");
    button.disabled = true;
    try {
      do {
        await this.check(); // send exactly what was checked, even if the form changes meanwhile
      } while (this.checked !== JSON.stringify(this.form.question()));
      if (this.#isValid) {
        await this.#post();
      } else if (this.issues.shown.length > 0) {
        this.issues.summarise("Correct these fields first");
      } else {
        this.#complain(at("verdict").textContent);
      }
    } finally {
      button.disabled = false;
    }
  }

  async #post() {
    const answer = await post("/v1/searches", JSON.stringify({ ...this.#body, ...this.#name }));
    if (answer.ok) {
      location.assign(`${page.root}/searches/${answer.body.id}`);
      return;
    }
    const errors = (answer.body.errors ?? []).filter(({ pointer }) => typeof pointer === "string");
    if (errors.length > 0) {
      this.issues.show(errors);
      this.issues.summarise(answer.body.title ?? "Correct these fields first");
    }
    this.#complain(messageOf(answer));
  }

  #complain(text) {
    at("complaint").textContent = text;
    at("complaint").hidden = false;
  }

  get #units() {
    const [time, memory] = ["time_unit", "memory_unit"].map((id) => input(id).value.trim());
    return { time: time === "us" ? "µs" : time, memory };
  }
}

if (page !== null) {
  const search = new NewSearch();
  const draft = sessionStorage.getItem(DRAFT); // the form's content when the session ended
  sessionStorage.removeItem(DRAFT);
  at("app").hidden = false;
  if (draft !== null) {
    search.begin(JSON.parse(draft), "Restored from before you were signed out.");
  } else {
    input("preset").value = page.start.preset;
    search.begin(page.start, page.start.note);
  }
}
