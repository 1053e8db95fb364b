// Light or dark: the reader's choice, or else that of the system. A page runs this before it is painted, so that none
// flashes. It sets data-theme ("light" or "dark") of the document and sends the event "zbv:theme" after every change.
// A page may have a switch: inputs with data-theme-choice "system", "light" or "dark".
"use strict";

(() => {
  const KEY = "zbv-theme";
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  // Private windows and files on disk may have no storage: then the system decides.
  function stored() {
    try {
      const found = window.localStorage.getItem(KEY);
      return found === "light" || found === "dark" ? found : "system";
    } catch {
      return "system";
    }
  }

  /** @param {string} choice */
  function store(choice) {
    try {
      if (choice === "system") {
        window.localStorage.removeItem(KEY);
      } else {
        window.localStorage.setItem(KEY, choice);
      }
    } catch {
      // The choice holds until the reader leaves the page.
    }
  }

  /** @type {string} */
  let choice = stored();

  function apply() {
    const theme = choice === "system" ? (system.matches ? "dark" : "light") : choice;
    for (const input of document.querySelectorAll(/** @type {"input"} */ ("input[data-theme-choice]"))) {
      input.checked = input.dataset.themeChoice === choice;
    }
    if (root.dataset.theme !== theme) {
      root.dataset.theme = theme;
      document.dispatchEvent(new CustomEvent("zbv:theme", { detail: { theme } }));
    }
  }

  apply();
  system.addEventListener("change", apply);
  window.addEventListener("storage", (event) => {
    if (event.key === KEY || event.key === null) {
      choice = stored();
      apply();
    }
  });
  document.addEventListener("change", ({ target }) => {
    const chosen = target instanceof HTMLElement ? target.dataset.themeChoice : undefined;
    if (chosen !== undefined) {
      choice = chosen;
      store(choice);
      apply();
    }
  });
  document.addEventListener("DOMContentLoaded", () => {
    for (const part of document.querySelectorAll(/** @type {"fieldset"} */ ("[data-theme-switch]"))) {
      part.hidden = false;
    }
    apply();
  });
})();
