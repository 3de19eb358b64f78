// The large view of one image: its caption, rotation, crop, mask and weight beside it. Part of the images' script.
//
// Every change is stored at once, as on the cards. A mask that the server has not stored stays in this browser, as a caption
// does (unsaved.js). A native dialog keeps the focus inside, and Escape closes it.
const TOOLS = { look: "View", crop: "Crop", mask: "Mask" };
const dialog = make("dialog", "hp-editor");
const editor = makeEditor();

function makeEditor() {
  let id = "";
  let item = null; // as its card has it
  let place = 0; // in the list of images, from 0
  let shown = ""; // what the picture and its mask were loaded for

  // The picture ------------------------------------------------------------------------------------------------------
  const picture = make("img", "", { draggable: false });
  const frame = make("div", "hp-edit-frame", [picture]);
  const stage = make("div", "hp-edit-stage", [frame]);
  const cropTool = makeCropTool(frame, (crop) => store("crop", { id, crop }));
  const painter = makeMaskPainter(frame, {
    painted: () => keepMask({ png: painter.png() }),
    uploaded: (png, name) => keepMask({ png, name }),
    cleared: () => keepMask({ png: "" }),
    fromImage: () => store("transparency", { id }),
    refused: say,
  });

  // The side ---------------------------------------------------------------------------------------------------------
  const title = make("h2", "");
  const count = make("span", "hp-hint");
  const previous = iconButton("‹", "Previous image", "", () => beside(-1));
  const following = iconButton("›", "Next image", "", () => beside(1));
  previous.title = "Previous image (← or Page Up)";
  following.title = "Next image (→ or Page Down)";
  const close = iconButton("×", "Close", "hp-editor-close", () => dialog.close());
  const caption = make("textarea", "", { rows: 5, placeholder: CAPTION_HINT });
  const saved = live("span", "hp-saved", "status");
  const length = make("span");
  caption.addEventListener("input", () => {
    const card = cards.get(id);
    if (card) card.text.value = caption.value;
    typed(item, caption.value);
    drawLength();
  });
  caption.addEventListener("blur", flush);
  const weight = make("input", "hp-text", { type: "number", min: 1, max: 10, step: 1 });
  weight.addEventListener("change", () => {
    const value = Math.min(10, Math.max(1, Math.round(Number(weight.value)) || 1));
    weight.value = value;
    if (value !== item.weight) store("weight", { ids: [id], weight: value });
  });
  const weightNote = make("p", "hp-hint", "");
  const tabs = make("div", "hp-toolbar hp-tool-choice", { role: "group", ariaLabel: "Tool" });
  const choices = Object.entries(TOOLS).map(([name, text]) => {
    const one = button(text, "hp-quiet", () => choose(name));
    one.dataset.tool = name;
    return one;
  });
  const turns = [
    button("⟲ Rotate left", "hp-quiet", () => store("rotate", { id, turns: -1 })),
    button("⟳ Rotate right", "hp-quiet", () => store("rotate", { id, turns: 1 })),
  ];
  tabs.append(...choices);
  const travel = ["undo", "redo"].map((way) => button(way === "undo" ? "Undo" : "Redo", "hp-quiet", () => step(way)));
  const remove = button("Remove image", "hp-quiet hp-danger", removeShown);
  const message = live("p", "hp-editor-message", "alert");
  const side = make("div", "hp-editor-side", [
    make("div", "hp-editor-head", [previous, following, count, close]),
    title,
    message,
    editorField("Caption", caption),
    make("p", "hp-hint", [length, saved]),
    tabs,
    cropTool.panel,
    painter.panel,
    make("div", "hp-toolbar", turns),
    editorField("Weight (1 to 10)", weight),
    weightNote,
    make("div", "hp-toolbar hp-editor-last", [...travel, remove]),
  ]);
  dialog.append(stage, side);
  dialog.ariaLabel = "Edit image";
  choose("look");

  function say(text) {
    message.textContent = text || "";
  }
  function choose(name) {
    for (const one of choices) one.setAttribute("aria-pressed", String(one.dataset.tool === name));
    cropTool.panel.hidden = name !== "crop";
    painter.panel.hidden = name !== "mask";
    stage.dataset.tool = name;
    if (name === "mask") {
      frame.tabIndex = 0;
      frame.setAttribute("role", "application");
      frame.setAttribute("aria-label", "The mask: arrow keys move the brush, Space paints");
    } else for (const one of ["tabindex", "role", "aria-label"]) frame.removeAttribute(one);
    cropTool.activate(name === "crop");
    painter.activate(name === "mask");
  }
  function drawLength() {
    const text = caption.value.trim();
    // Word pieces of CLIP and T5: about one for each six letters of a word, and one for each other sign.
    const words = text.match(/[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) || [];
    const tokens = words.reduce((sum, word) => sum + Math.ceil(word.length / 6), 0);
    length.textContent = text ? `${text.length} characters, about ${tokens} tokens ` : "";
  }

  // Edits ------------------------------------------------------------------------------------------------------------
  let line = Promise.resolve(); // one edit after the other, so that the last one stays
  const crops = new Map(); // image → crops that are not stored yet: the picture has a newer one than the answer to an earlier one
  /** Send an edit of the shown image. */
  function store(name, data) {
    const count = (more) => name === "crop" && crops.set(data.id, (crops.get(data.id) || 0) + more);
    say("");
    count(1);
    line = line.catch(console.error).then(async () => {
      const answer = await change(name, data, say);
      count(-1);
      if (!answer) drawItem();
      else if (dialog.open && !state().items.some((one) => one.id === id)) load();
    });
  }
  async function step(way) {
    if (!(await flush())) return;
    const answer = await change(way, {});
    if (answer) say("");
    if (answer?.message) saved.textContent = answer.message;
  }
  function keepMask(value) {
    hangproof.keep("mask", id, { turn: item.turn, ...value });
    saved.textContent = "Storing the mask…";
    shown ||= "painted";
    flush();
  }
  const maskKind = {
    call: (of, { png, ...rest }) => ["mask", { id: of, png: png || null, ...rest }],
    begun() {},
    stored(of, { png, name }, answer) {
      // What was painted here is on the canvas already; a mask from a file, or from before the page was loaded again, is not.
      const item = answer.list.items.find((one) => one.id === of);
      if (shown && of === id && item && png !== undefined && !name) shown = keyOfItem(item);
      show(answer);
      if (of === id) say("");
      if (of === id) saved.textContent = "Mask stored";
    },
    refused(of, value, answer) {
      if (answer) hangproof.forget("mask", of);
      if (of !== id) return;
      say(answer ? answer.error : "");
      saved.textContent = answer ? "" : "The mask is not stored yet; it is kept in this browser.";
      if (answer) load(true);
    },
  };
  async function removeShown() {
    const index = state().items.findIndex((one) => one.id === id);
    if (!(await removeImages([id]))) return;
    const { items } = state();
    const next = items[Math.min(Math.max(index, 0), items.length - 1)];
    if (next) open(next.id);
    else dialog.close();
  }

  // Showing ----------------------------------------------------------------------------------------------------------
  const keyOfItem = (one) => [one.id, one.turn, one.mask].join();
  function drawItem() {
    if (!item) return;
    const [width, height] = item.full;
    frame.style.setProperty("--w", width);
    frame.style.setProperty("--h", height);
    title.textContent = [nameOf(item), `${item.width} × ${item.height}`, editsText(item)].filter(Boolean).join(" · ");
    title.title = nameOf(item);
    count.textContent = `${place + 1} of ${Math.max(state().found, place + 1)}`;
    previous.setAttribute("aria-disabled", String(place === 0)); // not `disabled`, which would lose the focus
    following.setAttribute("aria-disabled", String(place + 1 >= state().found));
    picture.alt = nameOf(item);
    const text = hangproof.unsavedText("caption", id) ?? item.caption;
    if (caption.value !== text) caption.value = text;
    drawLength();
    if (document.activeElement !== weight) weight.value = item.weight;
    const often = item.weight > 1 ? `${item.weight} times as often as images of weight 1` : "as often as every image of weight 1";
    weightNote.textContent = `The training shows this image ${often}.`;
    if ((crops.get(id) || 0) < 2) cropTool.show(item.full, item.crop); // 1: the answer to it is shown
    drawHistory(state().history);
  }
  function drawHistory(labels) {
    travel.forEach((one, n) => {
      const label = (labels || [])[n] || "";
      editorDisable(one, !label, close);
      one.title = label;
      const verb = n ? "Redo" : "Undo";
      one.setAttribute("aria-label", label ? `${verb}: ${label}` : verb);
    });
  }
  /** Ask for the large picture, the mask and the item itself, which a filter may have taken off the page. */
  async function load(again) {
    const wanted = id;
    const answer = await look("open", { id: wanted }, (text) => wanted === id && say(text));
    if (!answer || wanted !== id || !dialog.open) return;
    if (!answer.item) return dialog.close(); // it was removed elsewhere
    item = answer.item;
    painter.say(answer);
    picture.src = answer.url;
    const key = keyOfItem(item);
    drawItem();
    const unsent = hangproof.unsavedText("mask", id);
    if (shown === key && !again) return;
    shown = key;
    await painter.show(item.full, unsent ? unsent.png : answer.mask);
  }
  function open(wanted) {
    const index = state().items.findIndex((one) => one.id === wanted);
    if (index < 0) return;
    id = wanted;
    item = state().items[index];
    place = state().page * (state().size || 12) + index;
    shown = "";
    say("");
    saved.textContent = "";
    caption.value = "";
    picture.src = item.thumb;
    painter.show(item.full, "");
    if (!dialog.isConnected) document.body.append(dialog);
    if (!dialog.open) {
      choose("look");
      dialog.showModal();
    }
    drawItem();
    if (document.activeElement === dialog || !dialog.contains(document.activeElement)) close.focus();
    load();
  }
  /** Show the image before or after this one, on the next page of cards where this is the last of its page. */
  async function beside(step) {
    await flush();
    const { items, page, pages } = state();
    let index = items.findIndex((one) => one.id === id);
    if (index < 0) index = Math.min(place % (state().size || 12), items.length) - (step > 0 ? 1 : 0); // it left the filter
    let next = items[index + step];
    if (!next && page + step >= 0 && page + step < pages) {
      await go({ page: page + step });
      next = step > 0 ? state().items[0] : state().items.at(-1);
    }
    if (next) open(next.id);
  }
  dialog.addEventListener("keydown", (event) => {
    const travels = travelKey(event);
    if (travels) return step(travels);
    const typing = event.target.closest("input:not([type=checkbox], [type=radio]), textarea, select");
    const way = { ArrowLeft: -1, ArrowRight: 1, PageUp: -1, PageDown: 1 }[event.key];
    if (!way || (typing && !event.key.startsWith("Page")) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    beside(way);
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => {
    flush();
    const card = cards.get(id)?.card || grid.firstElementChild;
    (card?.querySelector(".hp-open-picture") || zone).focus();
  });
  return {
    open,
    maskKind,
    drawHistory,
    /** The cards were drawn again. */
    refresh() {
      if (!dialog.open) return;
      const found = state().items.find((one) => one.id === id);
      if (!found) return;
      item = found;
      place = state().page * (state().size || 12) + state().items.indexOf(found);
      drawItem();
      if (keyOfItem(item) !== shown && !hangproof.unsavedText("mask", id)) load();
    },
    /** Whether the caption of an image is stored. */
    mark(of, text) {
      if (of !== id) return;
      saved.textContent = text;
      saved.classList.toggle("hp-not-saved", text === "not saved");
    },
  };
}

/** What a card says of the edits of its image, such as "cropped · mask · ×3"; "" for none. */
function editsText(item) {
  return [item.crop && "cropped", item.mask && "mask", item.weight > 1 && `×${item.weight}`].filter(Boolean).join(" · ");
}
