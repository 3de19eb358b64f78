// What is typed in a fold (fold.py) is put back after the page was loaded again: Gradio loads it anew when an answer was
// cut off, and the server makes the fields of a fold each time it is opened. Part of the header's script.
const TYPED = "hangproof-typed";
const TEXTS = ".hp-opened :is(textarea, input[type=text])"; // no password
const typed = JSON.parse(sessionStorage[TYPED] || "{}");
const left = new Set(Object.keys(typed)); // what was typed before this page was loaded: each is put back once
const nameOf = (field) => {
  const fold = field.closest(".hp-opened");
  const owner = fold.querySelector("[data-drawn-for]")?.dataset.drawnFor || hangproof.draft();
  return [owner, fold.id, field.labels[0]?.textContent].join("/");
};
document.addEventListener("input", ({ target }) => {
  if (!target.matches(TEXTS)) return;
  left.delete(nameOf(target));
  typed[nameOf(target)] = target.value;
  sessionStorage[TYPED] = JSON.stringify(typed);
});
// Called once Gradio has shown the value of its own.
const putBack = () => {
  for (const field of document.querySelectorAll(TEXTS)) {
    if (!left.delete(nameOf(field))) continue;
    field.value = typed[nameOf(field)];
    field.dispatchEvent(new Event("input", { bubbles: true })); // Gradio reads it
  }
};
new MutationObserver(() => left.size && setTimeout(putBack, 100)).observe(document.body, { childList: true, subtree: true });
