// Keeps what is drawn in step with what is in view.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const SETTLE = 60; // ms without a change of range before anything is redrawn
  const TICK_WIDTH = 90; // px that the number at a tick needs
  const NARROW = 560; // px of a chart below which the numbers at its right give way
  const MARGIN = 14; // px at the right where there are none
  const BESIDE = 24; // lengths of an action that are shown after zooming to it
  const borders = new WeakMap(); // of figures, as they were made

  // Redraw gantts (zbv.Gantt) that share a range whenever it, the element's size or the theme changes. `drawn`
  // is called after each time with the numbers of bars. Answers a function that draws now.
  zbv.follow = function follow(gantts, target, drawn) {
    const [{ range }] = gantts;
    let timer = 0;
    const draw = () => {
      window.clearTimeout(timer);
      const counts = gantts.map((gantt) => gantt.draw());
      drawn?.(counts);
    };
    const later = () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(draw, SETTLE);
    };
    range.properties.start.change.connect(later);
    range.properties.end.change.connect(later);
    document.addEventListener("zbv:theme", later);
    new ResizeObserver(later).observe(target);
    return draw;
  };

  // Fit figures to the width of the element that holds them: fewer ticks, and no numbers at the right.
  zbv.fit = function fit(figures, target) {
    const isNarrow = target.clientWidth < NARROW;
    for (const figure of figures) {
      if (!borders.has(figure)) {
        borders.set(figure, figure.min_border_right);
      }
      figure.min_border_right = isNarrow ? MARGIN : borders.get(figure);
      for (const axis of figure.right) {
        axis.visible = !isNarrow;
      }
      const { width } = Bokeh.index.find_one_by_id(figure.id).frame.bbox;
      for (const axis of figure.below) {
        axis.ticker.desired_num_ticks = Math.max(2, Math.min(10, Math.floor(width / TICK_WIDTH)));
      }
    }
  };

  // The whole of a timeline on the strip that overview_figure made, once.
  zbv.overview = function overview(doc, name, timeline) {
    const figure = doc.get_model_by_name(name);
    const source = doc.get_model_by_name(`${name}:pixels`);
    const columns = Math.max(600, Math.round(Bokeh.index.find_one_by_id(figure.id).frame.bbox.width));
    const end = timeline.makespan || 1;
    source.data = zbv.imageOf(source, zbv.raster(timeline, 0, end, columns), timeline.ranks, columns, 0, end);
  };

  // Move a range in half windows ("left", "right"), zoom it ("in", "out"), or show "all".
  zbv.move = function move(range, how) {
    const { start, end } = range;
    const [low, high] = range.bounds;
    const factor = { in: 0.5, out: 2 }[how] ?? 1;
    const shift = { left: -0.5, right: 0.5 }[how] ?? 0;
    const length = how === "all" ? high - low : Math.max((end - start) * factor, range.min_interval ?? 0);
    zbv.show(range, (start + end) / 2 + shift * (end - start), length);
  };

  // Show an action of a zbv.Gantt with a few beside it.
  zbv.zoomTo = function zoomTo({ range, timeline }, action) {
    const [from, to] = [timeline.start[action], timeline.end[action]];
    zbv.show(range, (from + to) / 2, Math.max(range.min_interval ?? 0, BESIDE * (to - from)));
  };

  // Show a stretch of time around a middle, as far as the bounds of the range allow.
  zbv.show = function show(range, middle, length) {
    const [low, high] = range.bounds;
    const wanted = Math.min(high - low, length);
    const begin = Math.min(Math.max(low, middle - wanted / 2), high - wanted);
    range.setv({ start: begin, end: begin + wanted });
  };
})();
