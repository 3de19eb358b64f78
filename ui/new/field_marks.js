// Shows errors and warnings beside their fields. They come with the answer that stores the fields (fields.js). Gradio's own
// validation (gr.validate) has errors only, and it would keep an invalid value from being stored.
/** found: {key of the field: [["bad" or "warn", text], …]}, in place of what was shown before. */
function markFields(found) {
  for (const note of document.querySelectorAll("[id^=note-]")) note.remove();
  for (const input of document.querySelectorAll("[aria-describedby^=note-]")) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
  for (const [key, marks] of Object.entries(found)) {
    const field = document.getElementById(key);
    const input = field && (field.querySelector("[type=radio]:checked") || field.querySelector("input, textarea, [role=button]"));
    if (!input) continue;
    const notes = marks.map(([kind, text], at) => make("p", `hp-field-${kind === "bad" ? "error" : "warning"}`, { textContent: text, id: `note-${key}-${at}` }));
    field.append(...notes);
    if (marks.some(([kind]) => kind === "bad")) input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", notes.map((note) => note.id).join(" "));
  }
}
