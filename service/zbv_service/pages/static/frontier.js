// Points that had to wait, because as many searches as the reader may have were under way: asks for them again as
// long as the page is open and looked at. live.js keeps the picture up to date.
"use strict";

(() => {
  const EVERY = 5000; // ms, what the service's Retry-After says

  async function again() {
    const form = document.querySelector("form[data-again]");
    if (form === null || document.hidden) {
      return;
    }
    const answer = await fetch(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)) });
    if (answer.ok && answer.redirected) {
      window.history.replaceState(null, "", answer.url); // says how many still wait
    }
  }

  window.setInterval(() => {
    again().catch(() => {}); // a service that is away is asked again the next time
  }, EVERY);
})();
