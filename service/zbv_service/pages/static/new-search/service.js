// Requests of the form to the API. Every answer is {ok, status, body}; status 0 means that there was no answer.

export class Service {
  constructor(root) {
    this.root = root;
  }

  async post(path, body, fields = {}) {
    const headers = { "Content-Type": "application/json", Accept: "application/json", ...fields };
    try {
      const text = typeof body === "string" ? body : JSON.stringify(body);
      const answer = await fetch(`${this.root}${path}`, { method: "POST", headers, body: text });
      const found = await answer.json().catch(() => ({}));
      return { ok: answer.ok, status: answer.status, body: found };
    } catch {
      return { ok: false, status: 0, body: {} };
    }
  }
}

// The message for an answer that is an error.
export function said(answer) {
  if (answer.status === 0) {
    return "The service does not answer. Your input is kept; try again in a moment.";
  }
  if (answer.status === 401) {
    return "You are signed out. Reload the page to sign in; your input is kept.";
  }
  return answer.body.detail ?? `The service answered with status ${answer.status}.`;
}

// Debounces a function: runs it for the latest request only, one at a time, after a pause.
export function latest(work, pause) {
  let timer = 0;
  let wished = null;
  let isBusy = false;

  async function go() {
    if (isBusy || wished === null) {
      return;
    }
    const [wish] = wished;
    wished = null;
    isBusy = true;
    try {
      await work(wish, () => wished === null);
    } finally {
      isBusy = false;
      go();
    }
  }

  return (wish) => {
    wished = [wish];
    clearTimeout(timer);
    timer = setTimeout(go, pause);
  };
}
