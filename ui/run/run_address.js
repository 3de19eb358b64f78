// Puts the selected run into the page's address, so that a reload or a bookmark opens it again. The name is read from the
// drawn page, because the browser does not know the session's state. Nothing happens before the page has loaded its state:
// Gradio reports the first tab as selected until then, which would clear the address.
const keepAddress = () => {
  if (!document.body.classList.contains("hp-open")) return;
  const here = element.offsetParent && element.querySelector("[data-run]");
  const url = new URL(window.location);
  if ((here ? here.dataset.run : null) === url.searchParams.get("run")) return;
  if (here) url.searchParams.set("run", here.dataset.run);
  else url.searchParams.delete("run");
  window.history.replaceState(null, "", url);
};
// Gradio changes what is drawn in place, so another run can be a changed attribute only.
new MutationObserver(keepAddress).observe(element, { childList: true, subtree: true, attributeFilter: ["data-run"] });
new ResizeObserver(keepAddress).observe(element); // also when its tab is shown or hidden
window.addEventListener("hangproof-open", keepAddress);
keepAddress();
