// Shows errors and warnings next to their fields. The component's value is {key of the field: [["bad" or "warn", text], …]}, or
// { start: the same } after Start was pressed. What Start found is shown until a field changes, because the answer to an
// earlier change can arrive after Start's. Gradio's own validation (gr.validate) has errors only, and it would keep an
// invalid value from being stored.
const shown = [];
let atStart = {};
let fieldsAtStart = "";
const fieldTexts = () =>
  [...document.querySelectorAll(".hp-step .hp-fields input")].map((one) => (one.type === "radio" ? one.checked : one.value)).join("\n");
function take() {
  const start = props.value?.start;
  if (start) [atStart, fieldsAtStart] = [start, fieldTexts()];
  draw();
}
function draw() {
  if (fieldTexts() !== fieldsAtStart) atStart = {};
  const marksNow = props.value?.start ? {} : props.value || {};
  for (const { notes, input } of shown.splice(0)) {
    for (const note of notes) note.remove();
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
  for (const [key, marks] of Object.entries({ ...atStart, ...marksNow })) {
    const field = document.getElementById(key);
    const input = field && (field.querySelector("[type=radio]:checked") || field.querySelector("input, textarea, [role=button]"));
    if (!input) continue;
    const notes = marks.map(([kind, text], at) => {
      const note = make("p", kind === "bad" ? "hp-field-error" : "hp-field-warning", text);
      note.id = `note-${key}-${at}`;
      return note;
    });
    field.append(...notes);
    if (marks.some(([kind]) => kind === "bad")) input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", notes.map((note) => note.id).join(" "));
    shown.push({ notes, input });
  }
}
watch("value", take);
document.addEventListener("input", () => props.value?.start || draw()); // an answer that equals the one before calls nothing
draw();
