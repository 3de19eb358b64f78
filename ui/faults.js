// What is wrong, beside the field that it is about. Its value is {key of the field: what is wrong}.
const told = [];
function draw() {
  for (const { note, input } of told.splice(0)) {
    note.remove();
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
  for (const [key, text] of Object.entries(props.value || {})) {
    const field = document.getElementById(key);
    const input = field && field.querySelector("input, textarea, [role=button]");
    if (!input) continue;
    const note = make("p", "hp-fault", text);
    note.id = `fault-${key}`;
    field.append(note);
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", note.id);
    told.push({ note, input });
  }
}
watch("value", draw);
draw();
