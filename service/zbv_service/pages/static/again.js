// Asks for the page again after the milliseconds that its own element names: what the page is to show is not there yet.
"use strict";

(() => {
  const after = Number(document.currentScript.dataset.after);
  const again = () => window.setTimeout(() => (document.hidden ? again() : window.location.reload()), after);
  again();
})();
