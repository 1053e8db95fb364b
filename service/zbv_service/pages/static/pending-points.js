// Points of a frontier that had to wait, because the reader has as many searches open as allowed: asks for them again
// while the page is open and visible. live.js keeps the chart up to date.

const EVERY = 5000; // ms, the service's Retry-After

async function askAgain() {
  const form = document.querySelector(/** @type {"form"} */ ("form[data-again]"));
  if (form === null || document.hidden) {
    return;
  }
  const fields = new URLSearchParams();
  new FormData(form).forEach((value, name) => fields.append(name, String(value)));
  const answer = await fetch(form.action, { method: "POST", body: fields });
  if (answer.ok && answer.redirected) {
    window.history.replaceState(null, "", answer.url); // its query says how many points still wait
  }
}

window.setInterval(() => {
  askAgain().catch(() => {}); // the service is away: the next turn asks again
}, EVERY);
