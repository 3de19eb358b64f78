// Buttons that the server drew (ui/html.py, `press`): a press triggers "act" with the data of the button. Where the part is drawn
// again, the button that had the focus keeps it.
let focused = null;
const sameButton = () =>
  [...element.querySelectorAll("[data-do]")].find(
    (one) => one.dataset.do === focused.dataset.do && one.dataset.run === focused.dataset.run && !one.disabled
  );
element.addEventListener("click", (event) => {
  const pressed = event.target.closest("[data-do]");
  if (pressed && pressed.getAttribute("aria-disabled") !== "true") trigger("act", { ...pressed.dataset });
});
element.addEventListener("focusin", (event) => (focused = event.target.closest("[data-do]")));
element.addEventListener("focusout", ({ target }) => setTimeout(() => target.isConnected && target !== document.activeElement && (focused = null)));
new MutationObserver(() => {
  if (focused && !focused.isConnected && document.activeElement === document.body) sameButton()?.focus();
}).observe(element, { childList: true, subtree: true });
