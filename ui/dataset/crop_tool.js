// The crop in the large view: a rectangle drawn on the image, four number fields, a fixed ratio. Part of the images' script.
const CROP_RATIOS = { "": "Any", "1:1": "1:1 square", "3:4": "3:4", "4:3": "4:3", "9:16": "9:16", "16:9": "16:9" };
const SMALLEST_CROP = 16; // pixels a side
const CROP_FIELDS = { x: "Left", y: "Top", w: "Width", h: "Height" };

/** The tool. `frame` has the size of the shown image; `changed(crop)` stores fractions, or null for the whole image. */
function makeCropTool(frame, changed) {
  let size = [1, 1];
  let rect = { x: 0, y: 0, w: 1, h: 1 };
  let active = false;
  let drag = null;
  const box = make("div", "hp-crop-box", ["nw", "ne", "sw", "se"].map((corner) => make("i", `hp-corner hp-${corner}`)));
  const ratio = make("select", "hp-select", Object.entries(CROP_RATIOS).map(([value, text]) => new Option(text, value)));
  const fields = {};
  for (const key of Object.keys(CROP_FIELDS)) {
    fields[key] = make("input", "hp-text", { type: "number", step: 1 });
    fields[key].addEventListener("change", () => typed(key));
  }
  const all = () => ({ x: 0, y: 0, w: size[0], h: size[1] });
  const whole = button("Use the whole image", "hp-quiet", () => set(all(), true));
  const panel = make("div", "hp-tool-panel", [
    make("p", "hp-hint", "Drag over the image to choose the part to train, or type it in pixels. The original stays."),
    editorField("Ratio", ratio),
    make("div", "hp-crop-fields", Object.entries(CROP_FIELDS).map(([key, label]) => editorField(label, fields[key]))),
    whole,
  ]);

  const isWhole = () => rect.w === size[0] && rect.h === size[1];
  const ratioValue = () => (ratio.value ? Number(ratio.value.split(":")[0]) / Number(ratio.value.split(":")[1]) : 0);
  const between = (value, low, high) => Math.min(Math.max(value, low), Math.max(low, high));
  function draw() {
    box.hidden = !active && isWhole();
    box.classList.toggle("hp-active", active);
    const [left, top, width, height] = ["x", "y", "w", "h"].map((key, n) => `${(100 * rect[key]) / size[n % 2]}%`);
    Object.assign(box.style, { left, top, width, height });
    for (const key of Object.keys(fields)) {
      const field = fields[key];
      if (document.activeElement !== field || drag) field.value = rect[key];
      field.min = key === "x" || key === "y" ? 0 : Math.min(SMALLEST_CROP, size[key === "w" ? 0 : 1]);
      field.max = size[key === "x" || key === "w" ? 0 : 1];
    }
    editorDisable(whole, isWhole(), ratio);
  }
  function set(next, save) {
    const least = [Math.min(SMALLEST_CROP, size[0]), Math.min(SMALLEST_CROP, size[1])];
    const w = between(Math.round(next.w), least[0], size[0]);
    const h = between(Math.round(next.h), least[1], size[1]);
    rect = { w, h, x: between(Math.round(next.x), 0, size[0] - w), y: between(Math.round(next.y), 0, size[1] - h) };
    draw();
    if (save) {
      const { x, y } = rect;
      changed(isWhole() ? null : [x / size[0], y / size[1], (x + w) / size[0], (y + h) / size[1]]);
    }
  }
  /** The largest rectangle of the ratio in the middle of another one. */
  function fitted(outer, wanted) {
    if (!wanted) return outer;
    const w = Math.min(outer.w, outer.h * wanted);
    const h = w / wanted;
    return { x: outer.x + (outer.w - w) / 2, y: outer.y + (outer.h - h) / 2, w, h };
  }
  function typed(key) {
    const value = Number(fields[key].value);
    if (fields[key].value === "" || !Number.isFinite(value)) return draw();
    const next = { ...rect, [key]: value };
    const wanted = ratioValue();
    if (wanted && "wh".includes(key)) {
      next.w = Math.min(key === "w" ? value : value * wanted, size[0], size[1] * wanted);
      next.h = next.w / wanted;
    }
    if (!wanted && key === "x") next.w = Math.min(next.w, size[0] - between(value, 0, size[0]));
    if (!wanted && key === "y") next.h = Math.min(next.h, size[1] - between(value, 0, size[1]));
    set(next, true);
    fields[key].value = rect[key];
  }
  ratio.addEventListener("change", () => ratioValue() && set(fitted(isWhole() ? all() : rect, ratioValue()), true));

  // Dragging
  const point = (place) => place.map((one, n) => between(one * size[n], 0, size[n]));
  function spanned([ax, ay], [px, py]) {
    const wanted = ratioValue();
    let [w, h] = [Math.abs(px - ax), Math.abs(py - ay)];
    if (wanted) [w, h] = w / h > wanted ? [h * wanted, h] : [w, w / wanted];
    return { x: px < ax ? ax - w : ax, y: py < ay ? ay - h : ay, w, h };
  }
  function start(place, target) {
    const at = point(place);
    const corner = target.closest(".hp-corner");
    const inside = at[0] > rect.x && at[0] < rect.x + rect.w && at[1] > rect.y && at[1] < rect.y + rect.h;
    drag = { before: rect, at };
    if (corner) {
      const left = corner.matches(".hp-nw, .hp-sw");
      const top = corner.matches(".hp-nw, .hp-ne");
      drag.anchor = [left ? rect.x + rect.w : rect.x, top ? rect.y + rect.h : rect.y];
    } else if (!inside || isWhole()) drag.anchor = at;
  }
  function move(place) {
    if (!drag) return;
    const at = point(place);
    const { before, anchor } = drag;
    drag.moved ||= Math.hypot(at[0] - drag.at[0], at[1] - drag.at[1]) > size[0] / 200;
    if (!drag.moved) return;
    if (anchor) set(spanned(anchor, at), false);
    else set({ ...before, x: before.x + at[0] - drag.at[0], y: before.y + at[1] - drag.at[1] }, false);
  }
  function end() {
    const moved = drag?.moved;
    drag = null;
    if (moved) set(rect, true);
  }
  onStrokes(frame, () => active, { start, move, end });
  frame.append(box);
  return {
    panel,
    /** Show the crop of an image with `full` pixels. */
    show(full, crop) {
      if (drag) return;
      size = full;
      const [left, top, right, bottom] = crop || [0, 0, 1, 1];
      const [x, y] = [Math.round(left * size[0]), Math.round(top * size[1])];
      rect = { x, y, w: Math.round(right * size[0]) - x, h: Math.round(bottom * size[1]) - y };
      draw();
    },
    activate(on) {
      active = on;
      draw();
    },
  };
}
/** A field with its label above it. */
function editorField(text, field) {
  const label = make("label", "", text);
  field.id ||= `hp-field-${hangproof.random()}`;
  label.htmlFor = field.id;
  return make("div", "hp-labelled", [label, field]);
}
/** Disable a button or not; the focus goes to another element where it would be lost. */
function editorDisable(one, off, instead) {
  if (off && document.activeElement === one) instead.focus();
  one.disabled = off;
}
/** Follow the pointer on the large picture while a tool is active; the tool gets its place as fractions of the picture. */
function onStrokes(frame, isActive, { start, move, end }) {
  const place = (event) => {
    const area = frame.getBoundingClientRect();
    return [(event.clientX - area.left) / area.width, (event.clientY - area.top) / area.height];
  };
  frame.addEventListener("pointerdown", (event) => {
    if (!isActive() || event.button) return;
    event.preventDefault();
    frame.setPointerCapture(event.pointerId);
    start(place(event), event.target);
  });
  frame.addEventListener("pointermove", (event) => isActive() && move(place(event)));
  for (const name of ["pointerup", "pointercancel"]) frame.addEventListener(name, end);
}
