// Keeps the page's address: ?run=NAME while a run is shown, so that a reload or a bookmark opens it again; ?tab=NAME for a tab
// that shows no run (TABS in ui/page.py). Nothing happens before the page has loaded its state: Gradio reports the first
// tab as selected until then, which would clear the address.
const panel = element.closest(".tabitem") || element;
const keepAddress = () => {
  if (!document.body.classList.contains("hp-open")) return;
  const url = new URL(window.location);
  const shown = panel.offsetParent ? element.querySelector(".hp-more-actions")?.dataset.run : "";
  if (shown) url.searchParams.set("run", shown);
  else url.searchParams.delete("run");
  if (panel.offsetParent) url.searchParams.delete("tab");
  if (url.href !== window.location.href) window.history.replaceState(null, "", url);
};
// A fold (fold.py) is closed when another run is shown than the one it was drawn for, and is empty until it is drawn again.
const emptyFolds = () => {
  const run = document.querySelector("#run-head [data-run]")?.dataset.run;
  for (const mark of panel.querySelectorAll("[data-drawn-for]")) {
    const label = mark.closest("[id$=-fold]").querySelector(".label-wrap");
    const [content, stale] = [label.nextElementSibling, mark.dataset.drawnFor !== run];
    if (stale && !content.hidden && label.matches(".open")) label.click();
    content.hidden = stale;
  }
};
new MutationObserver(emptyFolds).observe(panel, { attributes: true, attributeFilter: ["data-run", "data-drawn-for"], childList: true, subtree: true });
new MutationObserver(keepAddress).observe(element, { attributes: true, childList: true, subtree: true });
new ResizeObserver(keepAddress).observe(panel); // also when its tab is shown or hidden
window.addEventListener("hangproof-open", keepAddress);
keepAddress();
