// The mask in the large view: paint what the training ignores. Part of the images' script.
//
// The canvas holds black whose opacity says how much is ignored (dataset.css shows it in a colour); the mask that is
// sent is the same on white. The brush works with the keyboard too: arrow keys move it, Space paints.
const MASK_SIDE = 1024; // pixels, as the server keeps it (runs/masks.py)
const MASK_FILE_MB = 20;
const MASK_TYPE = "image/png";

/** The painter. `changed({png, name})`: another mask, base64 of a PNG, "" for none; the name of an uploaded file. */
function makeMaskPainter(frame, { changed, refused }) {
  const canvas = make("canvas", "hp-mask-canvas");
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const cursor = make("div", "hp-mask-cursor");
  let active = false;
  let waiting = false; // for the mask that the image has: a stroke before it would replace it
  let stroke = null; // the last point of the stroke that is being drawn
  let at = [0.5, 0.5]; // the brush, as fractions of the image
  let erase = false;
  const note = make("p", "hp-hint", "");
  const size = make("input", "", { type: "range", min: 1, max: 40, value: 10, oninput: drawCursor });
  const titled = (text, title, act) => Object.assign(button(text, "hp-quiet", act), { title });
  const brush = titled("Brush", "Mark a part that the training ignores", () => choose(false));
  const eraser = titled("Eraser", "Unmark a part, so that it is trained", () => choose(true));
  const file = make("input", "", { type: "file", accept: MASK_TYPE, hidden: true, onchange: readFile });
  file.dataset.testid = "mask-picker";
  const upload = button("Upload a mask", "hp-quiet", () => file.click());
  const tools = [brush, eraser, button("Invert", "hp-quiet", invert), button("Clear", "hp-quiet", clear), upload, file];
  const panel = make("div", "hp-tool-panel", [
    make("p", "hp-hint", "Paint over what the LoRA must not learn, such as a background. The coloured part is ignored."),
    make("div", "hp-toolbar", tools),
    labelled("Brush size", size),
    note,
    make("p", "hp-hint", "Keyboard: Tab to the image, move the brush with the arrow keys, paint with Space. An uploaded mask is a PNG: black is ignored."),
  ]);
  choose(false);

  function choose(value) {
    erase = value;
    brush.ariaPressed = String(!erase);
    eraser.ariaPressed = String(erase);
  }
  const radius = () => (Number(size.value) / 200) * Math.max(canvas.width, canvas.height);
  function drawCursor() {
    cursor.hidden = !active;
    Object.assign(cursor.style, { left: `${100 * at[0]}%`, top: `${100 * at[1]}%`, width: `${(200 * radius()) / canvas.width}%` });
  }
  function dab(from) {
    context.globalCompositeOperation = erase ? "destination-out" : "source-over";
    context.lineWidth = 2 * radius();
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    context.moveTo(from[0] * canvas.width, from[1] * canvas.height);
    context.lineTo(at[0] * canvas.width, at[1] * canvas.height + 0.01); // a line without any length is not drawn
    context.stroke();
    context.globalCompositeOperation = "source-over";
  }
  const pixels = () => context.getImageData(0, 0, canvas.width, canvas.height);
  function painted() {
    const whole = make("canvas", "", { width: canvas.width, height: canvas.height });
    const paper = whole.getContext("2d");
    paper.fillStyle = "white";
    paper.fillRect(0, 0, whole.width, whole.height);
    paper.drawImage(canvas, 0, 0);
    const empty = pixels().data.every((value) => !value);
    changed({ png: empty ? "" : whole.toDataURL(MASK_TYPE).split(",")[1] });
  }
  function clear() {
    context.clearRect(0, 0, canvas.width, canvas.height);
    changed({ png: "" });
  }
  function invert() {
    if (waiting) return;
    context.globalCompositeOperation = "xor";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalCompositeOperation = "source-over";
    painted();
  }
  function readFile() {
    const [one] = file.files;
    file.value = "";
    if (one.size > MASK_FILE_MB * 1e6) return refused(`${one.name}: the file is too large for a mask; export it smaller.`);
    const reader = new FileReader();
    reader.addEventListener("error", () => refused(`${one.name}: the browser cannot read this file.`));
    reader.addEventListener("load", () => changed({ png: reader.result.split(",")[1], name: one.name }));
    reader.readAsDataURL(one);
  }

  // Pointer and keyboard
  const moved = (event) => {
    const area = frame.getBoundingClientRect();
    at = [(event.clientX - area.left) / area.width, (event.clientY - area.top) / area.height];
    drawCursor();
  };
  frame.addEventListener("pointerdown", (event) => {
    if (!active || waiting || event.button) return;
    event.preventDefault();
    frame.setPointerCapture(event.pointerId);
    frame.focus();
    moved(event);
    dab(at);
    stroke = at;
  });
  frame.addEventListener("pointermove", (event) => {
    if (!active) return;
    moved(event);
    if (stroke) dab(stroke);
    if (stroke) stroke = at;
  });
  for (const name of ["pointerup", "pointercancel"]) {
    frame.addEventListener(name, () => {
      if (stroke) painted();
      stroke = null;
    });
  }
  frame.addEventListener("keydown", (event) => {
    if (!active || event.ctrlKey || event.metaKey || event.altKey) return;
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], " ": [0, 0] }[event.key];
    if (!way) return;
    event.preventDefault();
    event.stopPropagation();
    const step = radius() * (event.shiftKey ? 2 : 0.5);
    at = at.map((one, n) => Math.min(1, Math.max(0, one + (way[n] * step) / [canvas.width, canvas.height][n])));
    drawCursor();
    if (waiting || event.key !== " " || event.repeat) return;
    dab(at);
    painted();
  });
  frame.append(canvas, cursor);
  return {
    panel,
    /** Show a mask (base64 of a PNG, "" for none) of an image with `full` pixels. waits: another one follows. */
    async show(full, base64, waits = false) {
      const scale = Math.min(1, MASK_SIDE / Math.max(...full));
      const picture = base64 && make("img", "", { src: `data:${MASK_TYPE};base64,${base64}` });
      const unreadable = picture && (await picture.decode().catch((error) => error));
      waiting = waits;
      if (stroke || unreadable) return;
      [canvas.width, canvas.height] = full.map((side) => Math.max(1, Math.round(side * scale))); // empties it
      drawCursor();
      if (!picture) return;
      context.drawImage(picture, 0, 0, canvas.width, canvas.height);
      const shown = pixels();
      for (let n = 0; n < shown.data.length; n += 4) shown.data.set([0, 0, 0, 255 - shown.data[n]], n);
      context.putImageData(shown, 0, 0);
    },
    activate(on) {
      panel.hidden = !on;
      active = on;
      drawCursor();
    },
    /** No mask follows: it cannot be read. */
    ready: () => (waiting = false),
    /** What the trainer does with a mask. */
    say({ note: text, uses_masks: used }) {
      note.textContent = text;
      note.classList.toggle("hp-editor-warning", !used);
    },
  };
}
