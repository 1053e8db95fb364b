// Follows the events of a search: with a stream while the page is visible; by polling while it is hidden (a stream
// occupies one of the few connections that a browser has) or while streams do not get through. Every event is delivered
// once and in order, across interruptions.

const KINDS = ["state", "improvement", "bound", "end"];
const ASK_EVERY = 2000; // ms
const ASK_EVERY_HIDDEN = 10_000;
const SLOWEST = 15_000; // ms between requests without an answer

// Calls onEvent(event) and onLine("open" | "broken" | "asking" | "hidden" | "signed-out").
export function follow(address, onEvent, onLine) {
  let last = 0;
  let source = null;
  let timer = 0;
  let wait = ASK_EVERY;
  let isOver = false;

  function deliver(event) {
    if (event.id <= last || isOver) {
      return;
    }
    last = event.id;
    if (event.event === "end") {
      isOver = true;
      close();
    }
    onEvent(event);
  }

  function close() {
    source?.close();
    source = null;
    clearTimeout(timer);
  }

  function askLater(delay) {
    clearTimeout(timer);
    timer = setTimeout(ask, delay);
  }

  // A browser reconnects by itself unless the answer was not a stream.
  function open() {
    const stream = new EventSource(`${address}?after=${last}`);
    source = stream;
    for (const kind of KINDS) {
      stream.addEventListener(kind, (message) => deliver(JSON.parse(message.data)));
    }
    stream.addEventListener("open", () => {
      wait = ASK_EVERY;
      onLine("open");
    });
    stream.addEventListener("error", () => {
      if (source === stream && stream.readyState === EventSource.CLOSED) {
        close();
        askLater(0);
      } else if (source === stream) {
        onLine("broken");
      }
    });
  }

  async function ask() {
    const answer = await fetch(`${address}?after=${last}`, { headers: { Accept: "application/json" } }).catch(() => null);
    if (isOver || source !== null) {
      return;
    }
    if (answer?.status === 404) {
      deliver({ id: last + 1, event: "end", state: "discarded" });
      return;
    }
    if (!answer?.ok) {
      onLine(answer?.status === 401 ? "signed-out" : "broken");
      wait = Math.min(SLOWEST, 2 * wait);
      askLater(wait);
      return;
    }
    (await answer.json()).events.forEach(deliver);
    if (isOver) {
      return;
    }
    if (!document.hidden && wait > ASK_EVERY) {
      open(); // the service is back
      return;
    }
    onLine(document.hidden ? "hidden" : "asking");
    askLater(document.hidden ? ASK_EVERY_HIDDEN : ASK_EVERY);
  }

  function choose() {
    if (isOver) {
      return;
    }
    close();
    if (document.hidden) {
      askLater(ASK_EVERY_HIDDEN);
    } else {
      open();
    }
  }

  document.addEventListener("visibilitychange", choose);
  choose();
}
