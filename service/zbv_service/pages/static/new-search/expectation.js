// The estimate next to the form: for its problem, or for the values of the sliders.

import { at, input } from "../dom.js";
import { drawBars } from "./promise.js";
import { latest, said } from "./service.js";
import { WhatIf } from "./what-if.js";

const PAUSE = 350; // ms after the last change


export class Expectation {
  // timeUnit() returns the current unit; take(document, note) puts a document into the form.
  constructor(service, timeUnit, take) {
    this.service = service;
    this.timeUnit = timeUnit;
    this.problem = null; // the form's problem while it is valid
    this.own = null; // the estimate of that problem
    this.whatIf = new WhatIf(at("sliders"), () => this.#moved());
    this.soon = latest((wish, isNewest) => this.#estimate(wish, isNewest), PAUSE);
    at("what-if-reset").addEventListener("click", () => {
      this.whatIf.reset();
      this.#moved();
    });
    at("what-if-take").addEventListener("click", () => {
      const { problem, limit_fraction: fraction = null } = this.whatIf.question();
      take({ problem, limit_fraction: fraction }, "The form has the values of the sliders.");
    });
  }

  // Start for a valid problem; `isFraction`: its limit is a fraction of 1F1B's memory.
  start(problem, facts, isFraction) {
    this.problem = problem;
    this.whatIf.start(problem, facts, isFraction);
    this.#moved();
  }

  // Start for a problem with layers, whose costs the sliders do not change.
  startLayers(problem) {
    this.problem = problem;
    this.#ask({ of: problem, question: null });
  }

  // The form has no valid problem: show why there is no estimate.
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

  // Until the answer arrives, the bars belong to the previous values.
  #ask(wish) {
    at("bars").classList.add("stale");
    this.soon(wish);
  }

  async #estimate({ of, question }, isNewest) {
    const isPast = () => this.problem !== of || !isNewest();
    if (isPast()) {
      return;
    }
    at("promise-state").textContent = "computing …";
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
    at("promise-state").textContent = question === null ? "" : "ticks: values of the form";
  }

  // The problem with the values of the sliders and its limit; null if it is invalid, with the reason on the page.
  async #limited(question) {
    const { ok, body } = await this.service.post("/v1/problems/check", question);
    if (!ok || !body.is_valid || !body.facts.fits) {
      at("promise-state").textContent = `Not possible: ${body.issues?.[0]?.detail ?? "no plan fits this memory limit."}`;
      return null;
    }
    const { problem } = question;
    return problem.memory ? { ...problem, memory: { ...problem.memory, limit: body.facts.limit } } : problem;
  }
}
