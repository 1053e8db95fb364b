// The data of the page, and requests to the API. Every answer is {ok, status, body}; status 0 means that there was none.

const data = document.getElementById("new-search"); // absent for readers without the scope search
export const page = data === null ? null : JSON.parse(data.textContent);

export async function post(path, body) {
  const headers = { "Content-Type": "application/json", Accept: "application/json" };
  try {
    const answer = await fetch(`${page.root}${path}`, { method: "POST", headers, body });
    return { ok: answer.ok, status: answer.status, body: await answer.json().catch(() => ({})) };
  } catch {
    return { ok: false, status: 0, body: {} };
  }
}

// The message for an answer that is an error.
export function messageOf({ status, body }) {
  const messages = {
    0: "The service does not answer. Your input is kept; try again in a moment.",
    401: "You are signed out. Reload the page to sign in; your input is kept.",
  };
  return messages[status] ?? body.detail ?? `The service answered with status ${status}.`;
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
