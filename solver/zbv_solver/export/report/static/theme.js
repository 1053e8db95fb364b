// Light or dark: what the reader chose, or else what the system says. Loaded before anything is painted, so that
// no page flashes. It keeps data-theme ("light" or "dark") of the document up to date, and tells every change
// by the event "zbv:theme". A page may have a switch: elements with data-theme-choice "system", "light", "dark".
"use strict";

(() => {
  const KEY = "zbv-theme";
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  // What cannot be stored (private windows, files on disk) is what the system says.
  function stored() {
    try {
      const found = window.localStorage.getItem(KEY);
      return found === "light" || found === "dark" ? found : "system";
    } catch {
      return "system";
    }
  }

  function store(choice) {
    try {
      if (choice === "system") {
        window.localStorage.removeItem(KEY);
      } else {
        window.localStorage.setItem(KEY, choice);
      }
    } catch {
      // It holds until the page is left.
    }
  }

  let choice = stored();

  function apply() {
    const theme = choice === "system" ? (system.matches ? "dark" : "light") : choice;
    for (const input of document.querySelectorAll("[data-theme-choice]")) {
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
  document.addEventListener("change", (event) => {
    const chosen = event.target.dataset?.themeChoice;
    if (chosen !== undefined) {
      choice = chosen;
      store(choice);
      apply();
    }
  });
  document.addEventListener("DOMContentLoaded", () => {
    for (const part of document.querySelectorAll("[data-theme-switch]")) {
      part.hidden = false;
    }
    apply();
  });
})();
