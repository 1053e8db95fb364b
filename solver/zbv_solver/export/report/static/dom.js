// Elements that a page must have.

/**
 * @template {Element} T
 * @param {ParentNode} parent
 * @param {string} selector
 * @param {new () => T} kind
 */
export function part(parent, selector, kind) {
  const found = parent.querySelector(selector);
  if (!(found instanceof kind)) {
    throw new Error(`this page has no ${kind.name} ${selector}`);
  }
  return found;
}

/** @param {string} id */
export const at = (id) => part(document, `#${id}`, HTMLElement);

/**
 * A field of a form or a button: all have a value and can be disabled.
 * @param {string} id
 */
export const input = (id) => /** @type {HTMLInputElement} */ (at(id));

/**
 * An element with the given properties and children.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Partial<HTMLElementTagNameMap[K]>} [properties]
 * @param {(string | Node)[]} children
 */
export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
