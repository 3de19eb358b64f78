// A crop is drawn on the picture of the panel (ui/dataset/edit_panel.py): "crop" gets its left, top, right and bottom as fractions.
const LEAST = 0.02; // of a side: a click draws nothing
let from = null;
let before = "";
const box = () => element.querySelector(".hp-part");
const placeOf = ({ clientX, clientY }) => {
  const area = element.querySelector("img").getBoundingClientRect();
  const places = [(clientX - area.left) / area.width, (clientY - area.top) / area.height];
  return places.map((one) => Math.min(1, Math.max(0, one)));
};
function partTo(event) {
  const to = placeOf(event);
  const [left, top] = to.map((one, n) => Math.min(one, from[n]));
  const [right, bottom] = to.map((one, n) => Math.max(one, from[n]));
  const percent = (part) => `${100 * part}%`;
  Object.assign(box().style, { left: percent(left), top: percent(top), width: percent(right - left), height: percent(bottom - top) });
  return [left, top, right, bottom];
}
element.addEventListener("pointerdown", (event) => {
  if (event.button || !event.target.closest(".hp-whole")) return;
  event.preventDefault();
  element.setPointerCapture(event.pointerId);
  from = placeOf(event);
  before = box().style.cssText;
});
element.addEventListener("pointermove", (event) => from && partTo(event));
for (const name of ["pointerup", "pointercancel"]) {
  element.addEventListener(name, (event) => {
    if (!from) return;
    const part = partTo(event);
    from = null;
    if (name === "pointerup" && part[2] - part[0] > LEAST && part[3] - part[1] > LEAST) trigger("crop", { part });
    else box().style.cssText = before;
  });
}
const panel = element.closest("#image-edit");
panel.scrollIntoView({ block: "nearest" });
panel.querySelector("button").focus();
