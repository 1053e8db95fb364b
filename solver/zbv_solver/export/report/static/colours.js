// Colours of Bokeh models that follow the theme. The server names the model, the property and both colours;
// theme.js says which theme holds, and tells of every change.
"use strict";

(() => {
  const zbv = (globalThis.zbv ??= {});
  const isDark = () => document.documentElement.dataset.theme === "dark";
  const colourOf = (rule) => (isDark() ? rule.dark : rule.light);

  function paint(doc, rules) {
    for (const rule of rules) {
      const model = doc.get_model_by_id(rule.model);
      if (model !== null) {
        model[rule.property] = colourOf(rule);
      }
    }
  }

  // The same in the document as it was sent, so that nothing is drawn in the wrong theme first.
  function paintSent(node, ruled) {
    if (node === null || typeof node !== "object") {
      return;
    }
    if (node.id !== undefined && node.attributes !== undefined) {
      for (const rule of ruled.get(node.id) ?? []) {
        const sent = node.attributes[rule.property];
        const colour = colourOf(rule);
        node.attributes[rule.property] = sent?.type === "value" ? { ...sent, value: colour } : colour;
      }
    }
    for (const child of Object.values(node)) {
      paintSent(child, ruled);
    }
  }

  // Embed a Bokeh document (an item of bokeh.embed.json_item, and the rules of its colours) in an element.
  // `changed` is called when the theme has changed. The answer is Bokeh's document.
  zbv.embed = async function embed(target, item, rules, changed) {
    Bokeh.set_log_level("warn");
    paintSent(item.doc.roots, Map.groupBy(rules, (rule) => rule.model));
    const views = await Bokeh.embed.embed_item(item, target);
    const [root] = views.roots ?? [views];
    const doc = root.model.document;
    document.addEventListener("zbv:theme", () => {
      paint(doc, rules);
      changed?.();
    });
    return doc;
  };

  // Bokeh moves its canvases' origin by half a pixel and then clears from there, so that the first row and
  // column keep a trace of whatever was painted before the layout was final.
  zbv.wipeEdges = function wipeEdges(figures) {
    for (const figure of figures) {
      const { canvas_view: view } = Bokeh.index.find_one_by_id(figure.id);
      for (const { canvas, ctx } of [view.primary, view.overlays]) {
        const edge = Math.ceil(window.devicePixelRatio / 2);
        ctx.save();
        ctx.setTransform(1, 0, 0, 1, 0, 0);
        ctx.clearRect(0, 0, canvas.width, edge);
        ctx.clearRect(0, 0, edge, canvas.height);
        ctx.restore();
      }
    }
  };
})();
