// Shows errors and warnings beside their fields. They come with the answer that stores the fields (fields.js). Gradio's own
// validation (gr.validate) has errors only, and it would keep an invalid value from being stored.
const marked = [];
let drawnMarks = {};
/** found: {key of the field: [["bad" or "warn", text], …]}, in place of what was shown before. */
function markFields(found) {
  // Gradio may show a field only now, or have made it anew without its notes.
  const shown = marked.filter(({ notes }) => notes.every((note) => note.isConnected));
  if (hangproof.same(found, drawnMarks) && shown.length === Object.keys(found).length) return;
  drawnMarks = found;
  for (const { notes, input } of marked.splice(0)) {
    for (const note of notes) note.remove();
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
  for (const [key, marks] of Object.entries(found)) {
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
    marked.push({ notes, input });
  }
}
