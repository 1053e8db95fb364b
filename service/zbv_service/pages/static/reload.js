// Reloads the page after the milliseconds that the script element names: what the page is to show is not ready yet.
"use strict";

(() => {
  const after = Number(document.currentScript?.dataset.after ?? 1000);
  const again = () => window.setTimeout(() => (document.hidden ? again() : window.location.reload()), after);
  again();
})();
