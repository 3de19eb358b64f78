// Shows under each VRAM choice what the chosen model needs, and which trainers cannot train it. The component's value is
// {key of the field: {choice: text}}. As attributes, which the style sheet shows: fields.js reads a label's own text.
function draw() {
  for (const [key, notes] of Object.entries(props.value || {})) {
    for (const input of document.querySelectorAll(`#${key} input[type=radio]`)) {
      const { text, unfit } = notes[input.value] || {};
      const { dataset } = input.closest("label");
      if (text) dataset.note = text;
      else delete dataset.note;
      if (unfit) dataset.unfit = "";
      else delete dataset.unfit;
    }
  }
}
watch("value", draw);
draw();
