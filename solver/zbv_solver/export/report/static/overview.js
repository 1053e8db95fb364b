// The whole of a timeline on a narrow strip, with the part that is shown marked. Drag the mark to move through time,
// its edges to zoom, or click outside it to go there.

import { raster } from "./raster.js";
import { Surface } from "./surface.js";

const EDGE = 7; // pixels around an edge of the mark in which a drag resizes it

export class Overview {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {import("./timeline.js").Timeline} timeline
   * @param {import("./range.js").TimeRange} range
   */
  constructor(canvas, timeline, range) {
    this.surface = new Surface(canvas, range, { top: 6, bottom: 6 });
    this.timeline = timeline;
    this.range = range;
    this.image = document.createElement("canvas");
    this.#listen();
  }

  /** @param {number} time */
  #x(time) {
    const { left, width } = this.surface.frame;
    return left + (time / this.range.last) * width;
  }

  draw() {
    const { surface, range, timeline, image } = this;
    const context = surface.begin();
    const { left, top, width, height } = surface.frame;
    const columns = Math.max(1, Math.round(width * window.devicePixelRatio));
    if (image.width !== columns || image.height !== timeline.ranks) {
      [image.width, image.height] = [columns, timeline.ranks];
      const pixels = raster(timeline, 0, range.last, columns);
      image.getContext("2d")?.putImageData(new ImageData(pixels, columns, timeline.ranks), 0, 0);
    }
    context.imageSmoothingEnabled = false;
    context.drawImage(image, left, top, width, height);
    const [from, to] = [this.#x(range.start), this.#x(range.end)];
    context.fillStyle = surface.colour("control");
    context.globalAlpha = 0.5;
    context.fillRect(left, top, from - left, height);
    context.fillRect(to, top, left + width - to, height);
    context.globalAlpha = 1;
    context.lineWidth = 1.5;
    context.strokeStyle = surface.colour("control");
    context.strokeRect(from, top, to - from, height);
  }

  #listen() {
    const { canvas } = this.surface;
    /** @type {((event: PointerEvent) => void) | null} */
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = this.#grip(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      canvas.style.cursor = { edge: "ew-resize", mark: "grab", outside: "pointer" }[this.#part(event)];
      drag?.(event);
    });
    for (const name of /** @type {const} */ (["pointerup", "pointercancel"])) {
      canvas.addEventListener(name, () => {
        drag = null;
      });
    }
  }

  /** @param {PointerEvent} event */
  #timeAt(event) {
    return Math.min(1, Math.max(0, this.surface.locate(event).x)) * this.range.last;
  }

  /**
   * @param {PointerEvent} event
   * @returns {"edge" | "mark" | "outside"}
   */
  #part(event) {
    const { start, end } = this.range;
    const x = this.#x(this.#timeAt(event));
    const isEdge = [start, end].some((time) => Math.abs(x - this.#x(time)) <= EDGE);
    return isEdge && end - start < this.range.last ? "edge" : x > this.#x(start) && x < this.#x(end) ? "mark" : "outside";
  }

  /**
   * Take hold of the part under the pointer. Returns the function to call on every move.
   * @param {PointerEvent} event
   */
  #grip(event) {
    const { range } = this;
    const { start, end } = range;
    const part = this.#part(event);
    const begin = this.#timeAt(event);
    if (part === "edge") {
      const fixed = Math.abs(begin - start) < Math.abs(begin - end) ? end : start;
      return (/** @type {PointerEvent} */ move) => {
        const time = this.#timeAt(move);
        range.show((fixed + time) / 2, Math.abs(fixed - time));
      };
    }
    if (part === "outside") {
      range.show(begin, end - start);
    }
    const middle = (range.start + range.end) / 2;
    return (/** @type {PointerEvent} */ move) => range.show(middle + this.#timeAt(move) - begin, end - start);
  }
}
