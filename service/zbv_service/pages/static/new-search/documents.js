// Problem documents: files that are chosen or dropped anywhere on the page, pasted text, and the form as JSON and as
// a command. The service validates their content.

import { at, input } from "../dom.js";
import { isObject } from "./values.js";

const MOST_BYTES = 8 * 1024 * 1024;

// Calls open(name, read) for every document; read() gives the body of a search, or throws a TypeError that says why not.
export function acceptDocuments(open) {
  const openFile = (file) => open(file.name, async () => {
    if (file.size > MOST_BYTES) {
      throw new TypeError(`It has ${file.size} bytes; the maximum is ${MOST_BYTES}.`);
    }
    return bodyIn(await file.text());
  });
  at("file").addEventListener("change", () => {
    const [file] = input("file").files ?? [];
    if (file !== undefined) {
      openFile(file);
      input("file").value = ""; // so that choosing the same file again is a change
    }
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      const { dataTransfer, relatedTarget } = /** @type {DragEvent} */ (event);
      if (!dataTransfer?.types.includes("Files")) {
        return;
      }
      at("drop").hidden = kind === "drop" || (kind === "dragleave" && relatedTarget === null);
      if (kind !== "dragleave") {
        event.preventDefault();
      }
      if (kind === "drop") {
        openFile(dataTransfer.files[0]);
      }
    });
  }
  document.addEventListener("paste", (event) => {
    const text = event.clipboardData?.getData("text/plain").trim() ?? "";
    const isField = event.target instanceof Element && event.target.closest("input, textarea, select") !== null;
    if (!isField && text.startsWith("{")) {
      event.preventDefault();
      open("the pasted text", async () => bodyIn(text));
    }
  });
}

// The body of a search in a text: it may be a problem, a body, or a plan.
function bodyIn(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new TypeError(`It is not JSON: ${/** @type {Error} */ (error).message}`);
  }
  if (!isObject(found)) {
    throw new TypeError("It is JSON but not an object. A problem is an object with pp_degree, microbatches and costs.");
  }
  if (isObject(found.problem)) {
    return { problem: found.problem, options: isObject(found.options) ? found.options : {}, name: found.name };
  }
  if (!["pp_degree", "costs", "microbatches", "layers"].some((key) => key in found)) {
    throw new TypeError("It is JSON but not a problem: pp_degree, microbatches, costs and layers are missing.");
  }
  return { problem: found };
}

// Indented by two spaces, with lists of numbers on one line.
export function pretty(document) {
  const text = JSON.stringify(document, null, 2);
  return text.replace(/\[\s+([^[\]{}"]+?)\s+\]/g, (_, numbers) => `[${numbers.replace(/\s+/g, " ")}]`);
}

export function curl(body, { base, has_tokens: hasTokens }) {
  const json = pretty(body).replaceAll("'", "'\\''");
  const token = hasTokens
    ? ` \\\n  -H "Authorization: Bearer $(zbv-service token show-local --server ${base})"`
    : "";
  return `curl --json '${json}'${token} \\\n  ${base}/v1/searches`;
}
