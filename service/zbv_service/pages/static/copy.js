// Buttons that copy the text of the element that data-copy names. Without a secure context there is no clipboard; then
// the text is selected instead.

import { at } from "./dom.js";

for (const button of document.querySelectorAll(/** @type {"button"} */ ("[data-copy]"))) {
  button.addEventListener("click", async () => {
    const element = at(button.dataset.copy ?? "");
    try {
      await navigator.clipboard.writeText(element.textContent);
      at("copied").textContent = "Copied.";
    } catch {
      getSelection()?.selectAllChildren(element);
      at("copied").textContent = "Selected; press Ctrl+C.";
    }
  });
}
