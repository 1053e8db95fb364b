// Follows the events of a search: with a stream while the page is visible; by polling while it is hidden (a stream
// occupies one of the few connections that a browser has) or while streams do not get through. Every event is delivered
// once and in order, across interruptions.

const KINDS = ["state", "improvement", "bound", "end"];
const ASK_EVERY = 2000; // ms
const ASK_EVERY_HIDDEN = 10_000;
const SLOWEST = 15_000; // ms between requests without an answer

// told.event(event); told.line("open" | "broken" | "asking" | "hidden" | "signed-out")
export function follow(address, told) {
  let last = 0;
  let source = null;
  let timer = 0;
  let wait = ASK_EVERY;
  let isOver = false;

  function hear(event) {
    if (event.id <= last || isOver) {
      return;
    }
    last = event.id;
    if (event.event === "end") {
      stop();
    }
    told.event(event);
  }

  function stop() {
    isOver = true;
    close();
    document.removeEventListener("visibilitychange", choose);
  }

  function close() {
    source?.close();
    source = null;
    clearTimeout(timer);
  }

  function open() {
    close();
    source = new EventSource(`${address}?after=${last}`);
    for (const kind of KINDS) {
      source.addEventListener(kind, (message) => hear(JSON.parse(message.data)));
    }
    source.addEventListener("open", () => {
      wait = ASK_EVERY;
      told.line("open");
    });
    source.addEventListener("error", () => {
      if (isOver || source === null) {
        return;
      }
      // A browser reconnects by itself unless the answer was not a stream.
      if (source.readyState === EventSource.CLOSED) {
        close();
        askLater(0);
      } else {
        told.line("broken");
      }
    });
  }

  function askLater(after) {
    clearTimeout(timer);
    timer = setTimeout(ask, after);
  }

  async function ask() {
    let answer;
    try {
      answer = await fetch(`${address}?after=${last}`, { headers: { Accept: "application/json" } });
    } catch {
      answer = null;
    }
    if (isOver || source !== null) {
      return;
    }
    if (answer?.status === 404) {
      hear({ id: last + 1, event: "end", state: "discarded" });
      return;
    }
    if (answer === null || !answer.ok) {
      told.line(answer?.status === 401 ? "signed-out" : "broken");
      wait = Math.min(SLOWEST, 2 * wait);
      askLater(wait);
      return;
    }
    (await answer.json()).events.forEach(hear);
    if (isOver) {
      return;
    }
    if (document.hidden) {
      told.line("hidden");
      askLater(ASK_EVERY_HIDDEN);
    } else if (wait > ASK_EVERY) {
      open(); // the service is back
    } else {
      told.line("asking");
      wait = ASK_EVERY;
      askLater(ASK_EVERY);
    }
  }

  function choose() {
    if (document.hidden) {
      close();
      askLater(ASK_EVERY_HIDDEN);
    } else {
      open();
    }
  }

  document.addEventListener("visibilitychange", choose);
  choose();
  return { stop };
}
