// What every part that the server drew has (ui/scripts.py, `drawn`). Where the part is drawn again, the button that had
// the focus keeps it: Gradio (6.31) makes the old nodes into the new ones place by place, so the node that has it can
// be another button then.
let focused = {}; // the data of the button that has the focus
// A press of a button (ui/html.py, `press`) triggers "act" with its data; so does a log scrolled up from its end.
element.addEventListener("click", (event) => {
  const pressed = event.target.closest("[data-do]");
  if (pressed && pressed.getAttribute("aria-disabled") !== "true") trigger("act", { ...pressed.dataset });
});
element.addEventListener("scroll", ({ target }) => target.scrollTop < -12 && trigger("act", { do: "scroll_up" }), true);
element.addEventListener("focusin", ({ target }) => (focused = { ...target.dataset }));
element.addEventListener("focusout", ({ target }) => setTimeout(() => target.isConnected && target !== document.activeElement && (focused = {})));

// UTC times in the browser's own time zone and language. Files and the server keep UTC.
const brief = { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" }; // the title has the rest
const form = new Intl.DateTimeFormat(undefined, element.closest("#run-head") ? brief : { dateStyle: "medium", timeStyle: "medium" });
function localize() {
  for (const time of element.querySelectorAll("time[datetime]:not([data-utc])")) {
    const when = new Date(time.dateTime);
    if (Number.isNaN(when.getTime())) continue;
    time.dataset.utc = time.textContent;
    time.title = `${time.textContent.replace(" UTC", "").replace("Z", "")} UTC`;
    time.textContent = form.format(when);
  }
}
// The selected run of the list stays in view.
let inView = "";
function scrollToSelected() {
  const here = element.querySelector(".hp-here");
  if (!here || here.dataset.run === inView) return;
  inView = here.dataset.run;
  here.scrollIntoView({ block: "nearest", inline: "nearest" });
}
function drawn() {
  const [active, same] = [document.activeElement, (one) => hangproof.same(one.dataset, focused)];
  const buttons = [...element.querySelectorAll("[data-do]")];
  if (focused.do && (active === document.body || element.contains(active)) && !same(active))
    (buttons.find(same) ?? (active === document.body ? buttons[0] : null))?.focus();
  localize();
  setTimeout(scrollToSelected, 50); // once its place is known
}
new MutationObserver(drawn).observe(element, { childList: true, characterData: true, subtree: true });
watch("value", drawn);
drawn();
trigger("drawn");
