// How a pointer on a chart moves through time: drag to zoom into a stretch, Shift + drag or a sideways wheel to move,
// Ctrl + wheel to zoom at the pointer; on touch screens drag sideways to move and pinch to zoom.

const MOVED = 4; // px that a pointer may move and still click
const WHEEL = 0.002; // zoom per px of a wheel
const LINE = 16; // px of a wheel that counts in lines

/** @typedef {{ left: number, right: number } | null} Selection px from the left edge of the canvas */

/**
 * Listen on a canvas. `select` shows what a drag selects, or null once it has ended.
 * @param {import("./surface.js").Surface} surface
 * @param {(selection: Selection) => void} select
 * @returns {{ isDrag: () => boolean }} whether the press that ends with this click was a drag
 */
export function moveByPointer(surface, select) {
  const { canvas, range } = surface;
  /** @type {Map<number, PointerEvent>} */
  const pressed = new Map();
  /** @type {PointerEvent | null} */
  let first = null;
  let wasDrag = false;
  const timeAt = (/** @type {PointerEvent} */ event) => surface.locate(event).time;
  const within = (/** @type {PointerEvent} */ event) => {
    const { left, width } = surface.frame;
    const x = event.clientX - canvas.getBoundingClientRect().left;
    return Math.min(left + width, Math.max(left, x));
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) {
      pressed.set(event.pointerId, event);
      first = pressed.size === 1 ? event : null;
      wasDrag = pressed.size > 1;
    }
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pressed.get(event.pointerId);
    if (before === undefined) {
      return;
    }
    const other = [...pressed.values()].find(({ pointerId }) => pointerId !== event.pointerId);
    if (other !== undefined) {
      pinch(before, event, other);
    } else if (!wasDrag && first !== null && Math.abs(event.clientX - first.clientX) > MOVED) {
      wasDrag = true;
      canvas.setPointerCapture(event.pointerId);
    }
    if (wasDrag && other === undefined) {
      if (event.pointerType === "touch" || event.shiftKey) {
        range.pan(timeAt(before) - timeAt(event));
      } else if (first !== null) {
        const [from, to] = [within(first), within(event)];
        select({ left: Math.min(from, to), right: Math.max(from, to) });
      }
    }
    pressed.set(event.pointerId, event);
  });

  /**
   * Two fingers: each keeps the time below it.
   * @param {PointerEvent} before
   * @param {PointerEvent} now
   * @param {PointerEvent} other
   */
  function pinch(before, now, other) {
    const [was, is] = [before, now].map(({ clientX }) => Math.max(20, Math.abs(clientX - other.clientX)));
    range.zoom(was / is, timeAt(other));
  }

  canvas.addEventListener("pointerup", (event) => {
    const isSelection = wasDrag && event.pointerType !== "touch" && !event.shiftKey && first !== null;
    if (pressed.delete(event.pointerId) && isSelection && first !== null) {
      const { left, width } = surface.frame;
      const [from, to] = [first, event].map((each) => range.start + ((within(each) - left) / width) * range.length);
      select(null);
      range.show((from + to) / 2, Math.abs(to - from));
    }
  });
  canvas.addEventListener("pointercancel", (event) => {
    pressed.delete(event.pointerId);
    select(null);
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      const pixels = (event.deltaMode === 0 ? 1 : LINE) * (event.deltaX || event.deltaY);
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        range.zoom(Math.exp(WHEEL * pixels), surface.locate(event).time);
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        range.pan((pixels / surface.frame.width) * range.length);
      }
    },
    { passive: false },
  );
  return { isDrag: () => wasDrag };
}
