// The form for a new search. Its fields represent a problem document: after every change the page rebuilds the
// document, has the service check it, and shows an estimate.

import { at, input, part } from "../dom.js";
import { Cells } from "./cells.js";
import { Expectation } from "./expectation.js";
import { acceptFiles, acceptPaste, copy, curl, pretty, readFile, readText } from "./documents.js";
import { Issues } from "./issues.js";
import { layerRows, showLayers } from "./layers.js";
import { COSTS, DELTAS, LIMIT, ProblemForm, STATIC } from "./problem-form.js";
import { Service, latest, said } from "./service.js";
import { factRows, meaningOf, verdictOf } from "./verdict.js";

const CHECK_PAUSE = 200; // ms after the last key
const DRAFT = "zbv-new-search";
const TEXTS = ["pp_degree", "microbatches", "chunks", "limit_fraction", "time_unit", "memory_unit", "time_limit", "seed"];

const data = document.getElementById("new-search"); // absent for readers without the scope search
const page = data === null ? null : JSON.parse(data.textContent);

class NewSearch {
  constructor() {
    this.service = new Service(page.root);
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
    const take = (found, note) => {
      this.begin({ ...found, options: this.form.options() }, note);
      at("pp_degree").focus(); // the button that had the focus is disabled now
    };
    this.expectation = new Expectation(this.service, () => this.#units.time, take);
    this.#listen();
  }

  // ---- the fields

  #listen() {
    for (const name of TEXTS) {
      at(name).addEventListener("input", () => {
        this.form.texts[name] = input(name).value;
        this.form.forget(name);
        if (name === "pp_degree" || name === "chunks") {
          this.#drawTables();
        }
        if (name === "time_unit" || name === "memory_unit") {
          showLayers(this.form.layers, this.#units);
        }
        this.changed();
      });
    }
    at("effort").addEventListener("change", () => {
      this.form.texts.effort = input("effort").value;
      this.form.forget("effort");
      this.changed();
    });
    for (const [id, name] of [["placement", "placement"], ["objective", "objective"], ["limit_kind", "limitKind"]]) {
      at(id).addEventListener("change", () => this.#choose(name, input(id).value));
    }
    at("has_memory").addEventListener("change", () => {
      this.form.hasMemory = input("has_memory").checked;
      this.#draw();
      this.changed();
    });
    at("keep_cut").addEventListener("change", () => {
      this.form.layers.keepsCut = input("keep_cut").checked;
      this.changed();
    });
    at("preset").addEventListener("change", () => {
      const preset = page.presets[input("preset").value];
      if (preset !== undefined) {
        this.begin(preset, "");
      }
    });
    at("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    for (const button of document.querySelectorAll(/** @type {"button"} */ ("[data-copy]"))) {
      button.addEventListener("click", () => this.#copy(button.dataset.copy));
    }
    acceptFiles(at("file"), at("drop"), (file) => this.#open(file.name, () => readFile(file)));
    acceptPaste((text) => this.#open("the pasted text", () => readText(text)));
  }

  #choose(name, value) {
    if (name === "limitKind" && value === "amount" && this.facts?.limit) {
      this.form.values[LIMIT.key].fill(this.facts.limit.map(String), this.form.shape);
    }
    if (name === "limitKind" && value === "fraction" && this.facts?.limit_fraction) {
      this.form.texts.limit_fraction = String(Number(this.facts.limit_fraction.toPrecision(4)));
    }
    this.form[name] = value;
    this.form.forget(name);
    this.#draw();
    this.changed();
  }

  #cellChanged(key) {
    if (key === "memory.forward" || key === "memory.backward_input") {
      if (this.wasBalanced && this.form.balance()) {
        this.tables.memory.draw();
      }
    }
    this.changed();
  }

  // Fills the form from a document.
  begin({ problem, options = {}, limit_fraction: fraction = null }, note) {
    const unshown = this.form.read(problem, options, fraction);
    const kept = unshown.length === 0 ? "" : `The form has no fields for ${unshown.join(", ")}; they are sent unchanged.`;
    this.say([note, kept].filter(Boolean).join(" "));
    this.facts = null;
    this.layerFacts = null;
    this.#draw();
    this.changed();
  }

  #draw() {
    const { form } = this;
    for (const name of [...TEXTS, "effort"]) {
      input(name).value = form.texts[name];
    }
    input("placement").value = form.placement;
    input("objective").value = form.objective;
    input("limit_kind").value = form.limitKind;
    input("has_memory").checked = form.hasMemory;
    at("memory-fields").hidden = !form.hasMemory;
    at("chunks-field").hidden = form.placement !== "loop";
    showLayers(form.layers, this.#units);
    at("limit_fraction-field").hidden = form.limitKind !== "fraction";
    this.tables.ranks.quantities = form.limitKind === "amount" ? [STATIC, LIMIT] : [STATIC];
    this.#drawTables();
  }

  #drawTables() {
    for (const [name, table] of Object.entries(this.tables)) {
      if (this.form.layers !== null && name !== "ranks") {
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

  body() {
    return { problem: this.form.problem(this.facts?.limit), options: this.form.options() };
  }

  #drawText() {
    const body = this.body();
    const text = pretty(body.problem);
    const isStale = !this.#isValid;
    for (const id of ["json", "curl"]) {
      at(id).classList.toggle("stale", isStale);
    }
    at("copied").textContent = isStale && this.checked !== null ? "Not valid yet: the memory limit may be missing." : "";
    at("json").textContent = text;
    at("curl").textContent = curl(body, page.base, page.has_tokens);
    const link = part(document, "#download", HTMLAnchorElement);
    if (link.href) {
      URL.revokeObjectURL(link.href);
    }
    link.href = URL.createObjectURL(new Blob([`${text}\n`], { type: "application/json" }));
  }

  async check() {
    const question = JSON.stringify(this.form.question());
    const answer = await this.service.post("/v1/problems/check", question);
    if (question !== JSON.stringify(this.form.question())) {
      return; // the form has changed since; another check follows
    }
    this.checked = question;
    at("verdict").setAttribute("aria-busy", "false");
    if (!answer.ok) {
      this.facts = null;
      this.layerFacts = null;
      this.#drawText();
      this.#verdict("bad", said(answer));
      this.expectation.refuse("");
      if (answer.status === 401) {
        sessionStorage.setItem(DRAFT, question);
      }
      return;
    }
    const { is_valid: isValid, issues, facts, layers } = answer.body;
    this.facts = facts;
    this.layerFacts = layers;
    this.issues.show(issues);
    this.#drawText();
    if (layers !== null) {
      this.#expectLayers(layers);
      return;
    }
    this.#verdict(...verdictOf(facts, issues, this.issues.homeless));
    at("facts").replaceChildren(...(isValid ? factRows(facts, this.#units) : []));
    const { hasFraction } = this.form;
    at("limit-meaning").textContent = isValid ? meaningOf(facts, hasFraction, this.#units.memory) : "";
    if (!isValid || !facts.fits) {
      this.expectation.refuse(isValid ? "" : "Correct the fields to see an estimate.");
      return;
    }
    at("summary").hidden = true;
    this.expectation.start(this.body().problem, facts, hasFraction);
  }

  #expectLayers(layers) {
    this.#verdict("good", "Ready to search.");
    at("facts").replaceChildren(...layerRows(layers, this.#units));
    at("limit-meaning").textContent = "";
    at("summary").hidden = true;
    this.expectation.startLayers(this.body().problem);
  }

  get #isValid() {
    return this.facts !== null || this.layerFacts !== null;
  }

  #verdict(style, text) {
    at("verdict").className = `verdict-line ${style}`;
    at("verdict").textContent = text;
  }

  // ---- files, copies, and the search itself

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

  async #copy(what) {
    const element = at(what);
    const isCopied = await copy(element.textContent, element);
    at("copied").textContent = isCopied ? "Copied." : "Selected; press Ctrl+C.";
  }

  async submit() {
    const button = input("submit");
    button.disabled = true;
    try {
      do {
        await this.check(); // send exactly what was checked, even if the form changes meanwhile
      } while (this.checked !== JSON.stringify(this.form.question()));
      if (!this.#isValid) {
        if (this.issues.shown.length > 0) {
          this.issues.summarise(at("summary"), "Correct these fields first");
        } else {
          this.#complain(at("verdict").textContent);
        }
        return;
      }
      await this.#post();
    } finally {
      button.disabled = false;
    }
  }

  async #post() {
    const text = JSON.stringify(this.body());
    const answer = await this.service.post("/v1/searches", text);
    if (answer.ok) {
      location.assign(`${page.root}/searches/${answer.body.id}`);
      return;
    }
    const errors = (answer.body.errors ?? []).filter(({ pointer }) => typeof pointer === "string");
    if (errors.length > 0) {
      this.issues.show(errors);
      this.issues.summarise(at("summary"), answer.body.title ?? "Correct these fields first");
    }
    this.#complain(said(answer));
  }

  #complain(text) {
    at("complaint").textContent = text;
    at("complaint").hidden = false;
  }

  get #units() {
    const { time_unit: time, memory_unit: memory } = this.form.texts;
    return { time: time.trim() === "us" ? "µs" : time.trim(), memory: memory.trim() };
  }
}

// The form's content when the session ended.
function draft() {
  const text = sessionStorage.getItem(DRAFT);
  sessionStorage.removeItem(DRAFT);
  return text === null ? null : JSON.parse(text);
}

if (page !== null) {
  const search = new NewSearch();
  const kept = draft();
  at("app").hidden = false;
  if (kept !== null) {
    search.begin(kept, "Restored from before you were signed out.");
  } else {
    input("preset").value = page.start.preset;
    search.begin(page.start, page.start.note);
  }
}
