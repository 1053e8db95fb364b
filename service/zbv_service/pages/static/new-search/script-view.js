// The problem as readable JSON, and the command that submits it.

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
