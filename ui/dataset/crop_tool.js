// The crop in the large view: a rectangle that Cropper.js (ui/vendor) draws over the image, four number fields, a fixed
// ratio. Part of the images' script.
const CROP_RATIOS = { "": "Any", "1:1": "1:1 square", "3:4": "3:4", "4:3": "4:3", "9:16": "9:16", "16:9": "16:9" };
const SMALLEST_CROP = 16; // pixels a side
const CROP_FIELDS = { x: "Left", y: "Top", w: "Width", h: "Height" };
const CROP_HANDLES = ["n", "e", "s", "w", "ne", "nw", "se", "sw"].map((side) => `${side}-resize`);

/** The tool. `frame` has the size of the shown image; `changed(crop)` stores fractions, or null for the whole image. */
function makeCropTool(frame, changed) {
  let size = [1, 1];
  let rect = { x: 0, y: 0, w: 1, h: 1 }; // in pixels of the image
  let dragging = false;
  const handles = CROP_HANDLES.map((action) => `<cropper-handle action="${action}"></cropper-handle>`).join("");
  const canvas = make("cropper-canvas", "hp-crop", {
    disabled: true,
    innerHTML: `<cropper-handle action="select" plain></cropper-handle>
      <cropper-selection movable resizable precise outlined><cropper-handle action="move" plain></cropper-handle>${handles}</cropper-selection>`,
  });
  const selection = canvas.querySelector("cropper-selection");
  const ratio = make("select", "hp-select", Object.entries(CROP_RATIOS).map(([value, text]) => new Option(text, value)));
  const fields = {};
  for (const key in CROP_FIELDS) fields[key] = make("input", "hp-text", { type: "number", step: 1, onchange: () => typedCrop(key) });
  const isWhole = () => rect.w === size[0] && rect.h === size[1];
  const panel = make("div", "hp-tool-panel", [
    make("p", "hp-hint", "Drag over the image to choose the part to train, or type it in pixels. The original stays."),
    labelled("Ratio", ratio),
    make("div", "hp-crop-fields", Object.entries(CROP_FIELDS).map(([key, label]) => labelled(label, fields[key]))),
    button("Use the whole image", "hp-quiet", () => isWhole() || set({ x: 0, y: 0, w: size[0], h: size[1] })),
  ]);

  const ratioValue = () => (ratio.value ? Number(ratio.value.split(":")[0]) / Number(ratio.value.split(":")[1]) : 0);
  const between = (value, low, high) => Math.min(Math.max(value, low), high);
  function draw(another) {
    const scale = frame.clientWidth / size[0];
    if (isWhole()) selection.$clear(); // the next drag draws a new one
    else selection.$change(rect.x * scale, rect.y * scale, rect.w * scale, rect.h * scale, NaN, true);
    for (const [key, field] of Object.entries(fields)) if (another || document.activeElement !== field) field.value = rect[key];
  }
  function place(next) {
    const [w, h] = [next.w, next.h].map((side, n) => between(Math.round(side), Math.min(SMALLEST_CROP, size[n]), size[n]));
    rect = { x: between(Math.round(next.x), 0, size[0] - w), y: between(Math.round(next.y), 0, size[1] - h), w, h };
  }
  function set(next) {
    place(next);
    draw();
    const { x, y, w, h } = rect;
    changed(isWhole() ? null : [x / size[0], y / size[1], (x + w) / size[0], (y + h) / size[1]]);
  }
  /** The part of a rectangle that is in the image: its largest middle with the ratio. */
  function fitted(outer) {
    const [x, y] = [between(outer.x, 0, size[0]), between(outer.y, 0, size[1])];
    const [w, h] = [Math.min(outer.x + outer.w, size[0]) - x, Math.min(outer.y + outer.h, size[1]) - y];
    if (!ratioValue()) return { x, y, w, h };
    const [across, down] = [Math.min(w, h * ratioValue()), Math.min(h, w / ratioValue())];
    return { x: x + (w - across) / 2, y: y + (h - down) / 2, w: across, h: down };
  }
  function typedCrop(key) {
    const value = Number(fields[key].value);
    if (fields[key].value === "" || !Number.isFinite(value)) return draw();
    const next = { ...rect, [key]: value };
    if (ratioValue() && key === "w") next.h = value / ratioValue();
    if (ratioValue() && key === "h") next.w = value * ratioValue();
    set(fitted(next));
    fields[key].value = rect[key];
  }
  ratio.addEventListener("change", () => {
    selection.aspectRatio = ratioValue() || NaN;
    if (ratioValue()) set(fitted(rect));
  });

  // What was drawn beyond the image is cut off; what was moved beyond it comes back.
  canvas.addEventListener("actionstart", () => (dragging = true));
  canvas.addEventListener("actionend", () => {
    dragging = false;
    if (selection.hidden || !frame.clientWidth) return; // the dialog was closed meanwhile
    const scale = size[0] / frame.clientWidth;
    const [x, y, w, h] = ["x", "y", "width", "height"].map((key) => Math.round(selection[key] * scale));
    if (w !== rect.w || h !== rect.h) set(fitted({ x, y, w, h }));
    else if (x !== rect.x || y !== rect.y) set({ x, y, w, h });
  });
  new ResizeObserver(() => dragging || draw()).observe(frame);
  frame.append(canvas);
  return {
    panel,
    /** Show the crop of an image with `full` pixels. another: than the one before. */
    show(full, crop, another) {
      if (dragging) return;
      size = full;
      const [left, top, right, bottom] = crop || [0, 0, 1, 1];
      const [x, y] = [left * size[0], top * size[1]];
      place({ x, y, w: right * size[0] - x, h: bottom * size[1] - y });
      draw(another);
    },
    activate(on) {
      panel.hidden = !on;
      canvas.disabled = !on;
    },
  };
}
