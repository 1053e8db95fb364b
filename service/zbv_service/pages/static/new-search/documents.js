// Problem documents: files that are chosen or dropped anywhere on the page, pasted text, and the form as JSON and as
// a command. The service validates their content.

import { isObject } from "./values.js";

const MOST_BYTES = 8 * 1024 * 1024;

// The problem and options in a document: a problem, the body of a request, or a plan.
function problemIn(document) {
  if (!isObject(document)) {
    throw new TypeError("It is JSON but not an object. A problem is an object with pp_degree, microbatches and costs.");
  }
  if (isObject(document.problem)) {
    return { problem: document.problem, options: isObject(document.options) ? document.options : {} };
  }
  if (!["pp_degree", "costs", "microbatches", "layers"].some((key) => key in document)) {
    throw new TypeError("It is JSON but not a problem: pp_degree, microbatches, costs and layers are missing.");
  }
  return { problem: document, options: {} };
}

export async function readFile(file) {
  if (file.size > MOST_BYTES) {
    throw new TypeError(`It has ${file.size} bytes; the maximum is ${MOST_BYTES}.`);
  }
  return readText(await file.text());
}

export function readText(text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch (error) {
    throw new TypeError(`It is not JSON: ${/** @type {Error} */ (error).message}`);
  }
  return problemIn(document);
}

// Calls take(file) for every file that is chosen or dropped.
export function acceptFiles(input, veil, take) {
  input.addEventListener("change", () => {
    if (input.files.length > 0) {
      take(input.files[0]);
      input.value = ""; // so that choosing the same file again is a change
    }
  });
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0;
  document.addEventListener("dragenter", (event) => {
    if (hasFiles(event)) {
      depth += 1;
      veil.hidden = false;
    }
  });
  document.addEventListener("dragleave", (event) => {
    if (hasFiles(event)) {
      depth = Math.max(0, depth - 1);
      veil.hidden = depth === 0;
    }
  });
  document.addEventListener("dragover", (event) => {
    if (hasFiles(event)) {
      event.preventDefault();
    }
  });
  document.addEventListener("drop", (event) => {
    depth = 0;
    veil.hidden = true;
    const [file] = event.dataTransfer?.files ?? [];
    if (hasFiles(event) && file !== undefined) {
      event.preventDefault();
      take(file);
    }
  });
}

// Calls take(text) for a JSON document that is pasted outside the fields.
export function acceptPaste(take) {
  document.addEventListener("paste", (event) => {
    const text = event.clipboardData?.getData("text/plain").trim() ?? "";
    const isField = event.target instanceof Element && event.target.closest("input, textarea, select") !== null;
    if (!isField && text.startsWith("{")) {
      event.preventDefault();
      take(text);
    }
  });
}

// Indented by two spaces, with lists of numbers on one line.
export function pretty(document) {
  const text = JSON.stringify(document, null, 2);
  return text.replace(/\[\s+([^[\]{}"]+?)\s+\]/g, (_, numbers) => `[${numbers.replace(/\s+/g, " ")}]`);
}

export function curl(body, base, hasTokens) {
  const json = pretty(body).replaceAll("'", "'\\''");
  const token = hasTokens ? ' \\\n  -H "Authorization: Bearer $(zbv-service token show-local)"' : "";
  return `curl --json '${json}'${token} \\\n  ${base}/v1/searches`;
}

// Copies a text. Without a secure context there is no clipboard; then the text is selected instead.
export async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(element);
    return false;
  }
}
