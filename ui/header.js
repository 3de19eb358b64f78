// What the page lacks for the keyboard in Gradio, and when it is seen. Runs once, as the header's js_on_load.
//
// Gradio 6.31 gives each radio button a random name, again after each change, so the arrow keys do not move between
// them. A Dropdown opens its list once more when Tab leaves it. Both are corrected when a key arrives, because Gradio
// makes these elements again whenever their choices change.
const shareName = (radio) => {
  const group = radio.closest(".wrap");
  if (group) for (const one of group.querySelectorAll("input[type=radio]")) one.name = radio.name;
};
const closeList = (combobox) => {
  // A long list scrolls, and browsers move the focus into what scrolls: it would be lost when the list closes.
  for (const list of document.querySelectorAll("ul[role=listbox]")) list.tabIndex = -1;
  const open = () => combobox.getAttribute("aria-expanded") === "true" && document.activeElement !== combobox;
  const close = () => open() && combobox.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", code: "Escape", bubbles: true }));
  for (const after of [0, 50, 250]) setTimeout(close, after); // after Gradio's own answer to the lost focus
};
document.addEventListener(
  "keydown",
  (event) => {
    if (event.target.matches("input[type=radio]")) shareName(event.target);
    if (event.key === "Tab" && event.target.matches("[role=combobox]")) closeList(event.target);
  },
  true
);
// An answer that arrives between the press and the release of a mouse button can move what is pressed. The browser then
// makes no click of it, so it is made here.
let aimed = {};
const aim = ({ target, button, x, y }) => (aimed = { node: button ? null : target.closest("button, label, a, summary, input"), x, y });
const release = ({ target, x, y }) => {
  if (aimed.node && !aimed.node.contains(target) && Math.hypot(x - aimed.x, y - aimed.y) < 5) aimed.node.click();
};
addEventListener("pointerdown", aim, true);
addEventListener("pointerup", release, true);
// A double click acts once: its second half would answer a question that nobody has read, or press the button that is
// in the place of the first by then.
const ONCE = "button.lg, button.md, button.sm, [data-do]";
addEventListener("click", (event) => event.detail > 1 && event.target.closest(ONCE) && event.stopPropagation(), true);
// What Gradio's parts lack for a screen reader: whether a fold is open, the name of a group of radio buttons. Its code
// field, whose editor is made when its section is first opened, cannot be scrolled with the keyboard.
new MutationObserver(() => {
  for (const one of document.querySelectorAll("button.label-wrap")) one.ariaExpanded = one.matches(".open");
  for (const one of document.querySelectorAll("fieldset:not([aria-label])"))
    one.ariaLabel = one.querySelector("[data-testid=block-info]")?.textContent.trim() || null;
  for (const one of document.querySelectorAll("#script .cm-scroller[tabindex='-1']")) {
    one.tabIndex = 0;
    one.setAttribute("role", "region");
    one.setAttribute("aria-label", "The script");
  }
}).observe(document.body, { childList: true, subtree: true, attributeFilter: ["class"] });
// A page that is hidden or shown again: its timers stop or go on (WATCH in ui/page.py).
document.addEventListener("visibilitychange", () => trigger("seen"));
