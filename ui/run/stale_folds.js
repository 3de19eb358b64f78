// A fold (fold.py) is closed when another run is shown than it was drawn for, and is empty until it is drawn again.
const runsTab = element.closest(".tabitem") || element;
const emptyFolds = () => {
  const run = document.querySelector("#run-head [data-run]")?.dataset.run;
  for (const mark of runsTab.querySelectorAll("[data-drawn-for]")) {
    const label = mark.closest("[id$=-fold]").querySelector(".label-wrap");
    const [content, stale] = [label.nextElementSibling, mark.dataset.drawnFor !== run];
    if (stale && !content.hidden && label.matches(".open")) label.click();
    content.hidden = stale;
  }
};
new MutationObserver(emptyFolds).observe(runsTab, { attributes: true, attributeFilter: ["data-run", "data-drawn-for"], childList: true, subtree: true });
