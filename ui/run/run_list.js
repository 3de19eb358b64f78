// The list of runs: selects the run that is clicked, and keeps the selected one in view.
element.addEventListener("click", (event) => {
  const row = event.target.closest("[data-run]");
  if (row) trigger("pick", { run: row.dataset.run });
});
let shown = "";
const scroll = () =>
  setTimeout(() => {
    const here = element.querySelector(".hp-here");
    if (!here || here.dataset.run === shown) return;
    shown = here.dataset.run;
    here.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, 50);
watch("value", scroll);
scroll();
