// The mask in the large view: paint what the training ignores. Part of the images' script.
//
// The canvas holds one colour whose opacity says how much is ignored; the mask that is sent is white with black where that is.
// The brush works with the keyboard too: arrow keys move it, Space paints.
const MASK_SIDE = 1024; // pixels, as the server keeps it (runs/masks.py)
const MASK_RGB = [217, 0, 255]; // a colour that photos hardly have
const MASK_FILE_MB = 20;
const MASK_TYPE = "image/png";

/** The painter. `painted()` is called after each stroke; `uploaded(base64, name)` with a file; the others by their buttons. */
function makeMaskPainter(frame, { painted, uploaded, cleared, fromImage, refused }) {
  const canvas = make("canvas", "hp-mask-canvas");
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const cursor = make("div", "hp-mask-cursor");
  let active = false;
  let stroke = null; // the last point of the stroke that is being drawn
  let at = [0.5, 0.5]; // the brush, as fractions of the image
  let erase = false;
  const note = make("p", "hp-hint", "");
  const size = make("input", "", { type: "range", min: 1, max: 40, value: 10 });
  size.addEventListener("input", drawCursor);
  const modes = [
    ["Brush", false, "Mark a part that the training ignores"],
    ["Eraser", true, "Unmark a part, so that it is trained"],
  ].map(([text, value, title]) => {
    return Object.assign(button(text, "hp-quiet", () => choose(value)), { title });
  });
  const file = make("input", "", { type: "file", accept: MASK_TYPE, hidden: true });
  file.dataset.testid = "mask-picker";
  file.addEventListener("change", () => {
    const one = file.files[0];
    file.value = "";
    if (one) readFile(one);
  });
  const clear = button("Clear", "hp-quiet", () => {
    context.clearRect(0, 0, canvas.width, canvas.height);
    cleared();
  });
  const transparent = button("Use its transparency", "hp-quiet", fromImage);
  Object.assign(transparent, { title: "Ignore the transparent part of the image", hidden: true });
  const upload = button("Upload a mask", "hp-quiet", () => file.click());
  const tools = [...modes, button("Invert", "hp-quiet", invert), clear, upload, transparent, file];
  const panel = make("div", "hp-tool-panel", [
    make("p", "hp-hint", "Paint over what the LoRA must not learn, such as a background. The coloured part is ignored."),
    make("div", "hp-toolbar", tools),
    editorField("Brush size", size),
    note,
    make("p", "hp-hint", "Keyboard: Tab to the image, move the brush with the arrow keys, paint with Space. An uploaded mask is a PNG: black is ignored."),
  ]);
  choose(false);

  function choose(value) {
    erase = value;
    modes.forEach((one, n) => one.setAttribute("aria-pressed", String(Boolean(n) === erase)));
  }
  const radius = () => (Number(size.value) / 200) * Math.max(canvas.width, canvas.height);
  function drawCursor() {
    cursor.hidden = !active;
    cursor.style.left = `${100 * at[0]}%`;
    cursor.style.top = `${100 * at[1]}%`;
    cursor.style.width = `${(200 * radius()) / canvas.width}%`;
  }
  function dab(from, to) {
    context.globalCompositeOperation = erase ? "destination-out" : "source-over";
    context.strokeStyle = `rgb(${MASK_RGB})`;
    context.lineWidth = 2 * radius();
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    context.moveTo(from[0] * canvas.width, from[1] * canvas.height);
    context.lineTo(to[0] * canvas.width, to[1] * canvas.height + 0.01); // a line without any length is not drawn
    context.stroke();
    context.globalCompositeOperation = "source-over";
  }
  /** Replace the opacity of each pixel by what `change` makes of its four values. */
  function repaint(pixels, change) {
    const { data } = pixels;
    for (let n = 0; n < data.length; n += 4) {
      data[n + 3] = change(data, n);
      [data[n], data[n + 1], data[n + 2]] = MASK_RGB;
    }
    context.putImageData(pixels, 0, 0);
  }
  const pixelsOf = () => context.getImageData(0, 0, canvas.width, canvas.height);
  function invert() {
    repaint(pixelsOf(), (data, n) => 255 - data[n + 3]);
    painted();
  }
  async function readFile(one) {
    if (one.size > MASK_FILE_MB * 1e6) return refused(`${one.name}: the file is too large for a mask; export it smaller.`);
    const reader = new FileReader();
    reader.addEventListener("error", () => refused(`${one.name}: the browser cannot read this file.`));
    reader.addEventListener("load", () => uploaded(reader.result.slice(reader.result.indexOf(",") + 1), one.name));
    reader.readAsDataURL(one);
  }

  // Pointer and keyboard
  onStrokes(frame, () => active, {
    start(place) {
      frame.focus();
      stroke = at = place;
      dab(at, at);
      drawCursor();
    },
    move(place) {
      at = place;
      drawCursor();
      if (!stroke) return;
      dab(stroke, at);
      stroke = at;
    },
    end() {
      if (stroke) painted();
      stroke = null;
    },
  });
  frame.addEventListener("keydown", (event) => {
    if (!active || event.ctrlKey || event.metaKey || event.altKey) return;
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!way && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    if (way) {
      const step = radius() * (event.shiftKey ? 2 : 0.5);
      const to = (n, length) => Math.min(1, Math.max(0, at[n] + (way[n] * step) / length));
      at = [to(0, canvas.width), to(1, canvas.height)];
      drawCursor();
    } else if (!event.repeat) {
      dab(at, at);
      painted();
    }
  });
  frame.append(canvas, cursor);
  return {
    panel,
    /** Show a mask (base64 of a PNG, "" for none) of an image with `full` pixels. */
    async show(full, base64) {
      const scale = Math.min(1, MASK_SIDE / Math.max(...full));
      const [width, height] = full.map((side) => Math.max(1, Math.round(side * scale)));
      let picture = null;
      if (base64) {
        picture = new Image();
        picture.src = `data:${MASK_TYPE};base64,${base64}`;
        try {
          await picture.decode();
        } catch {
          return;
        }
      }
      if (stroke) return;
      [canvas.width, canvas.height] = [width, height]; // empties it
      drawCursor();
      if (!picture) return;
      context.drawImage(picture, 0, 0, width, height);
      repaint(pixelsOf(), (data, n) => 255 - data[n]);
    },
    /** The mask as base64 of a PNG; "" where nothing is ignored. */
    png() {
      const { data } = pixelsOf();
      let empty = true;
      for (let n = 3; n < data.length && empty; n += 4) empty = !data[n];
      if (empty) return "";
      const [black, whole] = [make("canvas"), make("canvas")];
      for (const one of [black, whole]) [one.width, one.height] = [canvas.width, canvas.height];
      const [ink, paper] = [black.getContext("2d"), whole.getContext("2d")];
      ink.drawImage(canvas, 0, 0);
      ink.globalCompositeOperation = "source-in";
      ink.fillRect(0, 0, black.width, black.height);
      paper.fillStyle = "white";
      paper.fillRect(0, 0, whole.width, whole.height);
      paper.drawImage(black, 0, 0);
      return whole.toDataURL(MASK_TYPE).split(",")[1];
    },
    activate(on) {
      active = on;
      drawCursor();
    },
    /** What the trainer does with a mask, and whether the image has transparency. */
    say({ note: text, uses_masks: used, transparent: hasTransparency }) {
      note.textContent = text;
      note.classList.toggle("hp-editor-warning", !used);
      transparent.hidden = !hasTransparency;
    },
  };
}
