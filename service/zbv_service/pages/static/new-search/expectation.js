// Beside the form: what its problem promises, and what it would with other numbers.

import { at, input } from "../dom.js";
import { drawBars } from "./promise.js";
import { latest, said } from "./service.js";
import { WhatIf } from "./what-if.js";

const PAUSE = 350; // ms after the last change


export class Expectation {
  // timeUnit() names the unit of now; take(document, note) puts a document into the form.
  constructor(service, timeUnit, take) {
    this.service = service;
    this.timeUnit = timeUnit;
    this.problem = null; // the form's own, while it is valid
    this.own = null; // its estimate
    this.whatIf = new WhatIf(at("sliders"), () => this.#moved());
    this.soon = latest((wish, isNewest) => this.#estimate(wish, isNewest), PAUSE);
    at("what-if-reset").addEventListener("click", () => {
      this.whatIf.reset();
      this.#moved();
    });
    at("what-if-take").addEventListener("click", () => {
      const { problem, limit_fraction: fraction = null } = this.whatIf.question();
      take({ problem, limit_fraction: fraction }, "These are the sliders' values.");
    });
  }

  // The form has a problem that can be searched; `isFraction` says that its limit is one of 1F1B's memory.
  start(problem, facts, isFraction) {
    this.problem = problem;
    this.whatIf.start(problem, facts, isFraction);
    this.#moved();
  }

  // Its layers are still to be cut: what they cost, no slider changes.
  startLayers(problem) {
    this.problem = problem;
    this.#ask({ of: problem, question: null });
  }

  // It has none: nothing can be expected.
  refuse(why) {
    this.problem = null;
    this.own = null;
    this.#fail(why);
  }

  #fail(why) {
    at("bars").replaceChildren();
    at("bars").classList.remove("stale");
    at("promise-state").textContent = why;
  }

  #moved() {
    const isOwn = this.whatIf.isNeutral;
    input("what-if-reset").disabled = isOwn;
    input("what-if-take").disabled = isOwn;
    if (this.problem !== null) {
      this.#ask({ of: this.problem, question: isOwn ? null : this.whatIf.question() });
    }
  }

  // Until it is answered, what is drawn is of numbers that are no longer there.
  #ask(wish) {
    at("bars").classList.add("stale");
    this.soon(wish);
  }

  async #estimate({ of, question }, isNewest) {
    const isPast = () => this.problem !== of || !isNewest();
    if (isPast()) {
      return;
    }
    at("promise-state").textContent = "looking …";
    const problem = question === null ? of : await this.#limited(question);
    if (problem === null || isPast()) {
      return;
    }
    const answer = await this.service.post("/v1/problems/estimate", { problem });
    if (question === null && answer.ok && this.problem === of) {
      this.own = answer.body;
    }
    if (isPast()) {
      return;
    }
    if (!answer.ok) {
      this.#fail(said(answer));
      return;
    }
    at("bars").classList.remove("stale");
    drawBars(at("bars"), answer.body, this.timeUnit(), question === null ? null : this.own);
    at("promise-state").textContent = question === null ? "" : "ticks: the form's values";
  }

  // The problem that the sliders say, with its limit; null, and why, where that cannot be searched.
  async #limited(question) {
    const { ok, body } = await this.service.post("/v1/problems/check", question);
    if (!ok || !body.is_valid || !body.facts.fits) {
      at("promise-state").textContent = `Not possible: ${body.issues?.[0]?.detail ?? "no plan fits that memory limit."}`;
      return null;
    }
    const { problem } = question;
    return problem.memory ? { ...problem, memory: { ...problem.memory, limit: body.facts.limit } } : problem;
  }
}
