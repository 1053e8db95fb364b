// Reloads a page with content that is not ready yet, after the milliseconds that the script element names.
"use strict";

(() => {
  const after = Number(document.currentScript?.dataset.after ?? 1000);
  const again = () => window.setTimeout(() => (document.hidden ? again() : window.location.reload()), after);
  again();
})();
