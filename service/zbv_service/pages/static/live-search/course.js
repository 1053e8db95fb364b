// The progress of a search, from its events in order.

export class Course {
  constructor() {
    this.points = []; // {seconds, best, bound, gap, method}
    this.state = null;
    this.attempts = 0;
    this.isStopping = false;
    this.end = null;
  }

  get newest() {
    return this.points.at(-1) ?? null;
  }

  add(event) {
    if (event.event === "state") {
      this.state = event.state;
      this.attempts = event.attempts;
      this.isStopping = event.cancel_requested;
      return;
    }
    if (event.objective !== null && event.objective !== undefined) {
      this.#find(event);
    }
    if (event.event === "end") {
      this.state = event.state;
      this.end = event;
    }
  }

  #find(event) {
    const last = this.newest;
    if (event.event === "end" && event.objective === last?.best && event.lower_bound === last.bound) {
      return; // it has nothing new
    }
    this.points.push({
      // The first plan may be older than this search, if an earlier one found it.
      seconds: Math.max(event.seconds ?? 0, last?.seconds ?? 0),
      best: event.objective,
      bound: event.lower_bound,
      gap: event.gap,
      method: event.method,
    });
  }
}
