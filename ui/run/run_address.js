// Keeps the page's address: ?run=NAME while a run is shown, so that a reload or a bookmark opens it again; ?tab=NAME
// for a tab that shows no run (TABS in ui/page.py). Nothing happens before the page has loaded its state: Gradio
// reports the first tab as selected until then, which would clear the address.
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
new MutationObserver(keepAddress).observe(element, { attributes: true, childList: true, subtree: true });
new ResizeObserver(keepAddress).observe(panel); // also when its tab is shown or hidden
window.addEventListener("hangproof-open", keepAddress);
keepAddress();
