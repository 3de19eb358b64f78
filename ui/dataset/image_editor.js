// The large view of one image: its caption, rotation, crop, mask and weight beside it. Part of the images' script.
//
// Every change is stored at once, as on the cards. A mask that the server has not stored stays in this browser, as a
// caption does (../unsaved.js). A native dialog keeps the focus inside, and Escape closes it.
const TOOLS = { look: "View", crop: "Crop", mask: "Mask" };
const dialog = make("dialog", "hp-editor", { ariaLabel: "Edit image" });
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
  const painter = makeMaskPainter(frame, { changed: keepMask, refused: say });

  // The side ---------------------------------------------------------------------------------------------------------
  const title = make("h2", "");
  const count = make("span", "hp-hint");
  const previous = iconButton("‹", "Previous image (← or Page Up)", "", () => beside(-1));
  const following = iconButton("›", "Next image (→ or Page Down)", "", () => beside(1));
  const close = iconButton("×", "Close", "hp-editor-close", () => dialog.close());
  const caption = make("textarea", "", { rows: 5, placeholder: CAPTION_HINT, onblur: hangproof.send });
  const saved = live("span", "hp-saved", "status");
  const length = make("span");
  caption.addEventListener("input", () => {
    const card = cards.get(id);
    if (card) card.text.value = caption.value;
    typeCaption(id, caption.value);
    drawLength();
  });
  const weight = make("input", "hp-text", { type: "number", min: 1, max: 10, step: 1 });
  weight.addEventListener("change", () => {
    weight.value = Math.min(10, Math.max(1, Math.round(Number(weight.value)) || 1));
    if (Number(weight.value) !== item.weight) store("weight", { ids: [id], weight: Number(weight.value) });
  });
  const choices = Object.entries(TOOLS).map(([name, text]) => button(text, "hp-quiet", () => choose(name)));
  const message = live("p", "hp-editor-message", "alert");
  const rotate = (text, turns) => button(text, "hp-quiet", () => store("rotate", { id, turns }));
  const last = [...historyButtons(close), button("Remove image", "hp-quiet hp-danger", removeShown)];
  const side = make("div", "hp-editor-side", [
    make("div", "hp-editor-head", [previous, following, count, close]),
    title,
    message,
    labelled("Caption", caption),
    make("p", "hp-hint", [length, saved]),
    make("div", "hp-toolbar hp-tool-choice", choices),
    cropTool.panel,
    painter.panel,
    make("div", "hp-toolbar", [rotate("⟲ Rotate left", -1), rotate("⟳ Rotate right", 1)]),
    labelled("Weight (1 to 10)", weight),
    make("p", "hp-hint", "The training shows an image of weight 3 three times as often as one of weight 1."),
    make("div", "hp-toolbar hp-editor-last", last),
  ]);
  dialog.append(stage, side);

  function say(text) {
    message.textContent = text || "";
  }
  function choose(name) {
    for (const one of choices) one.ariaPressed = String(one.textContent === TOOLS[name]);
    stage.dataset.tool = name;
    const masks = { tabindex: 0, role: "application", "aria-label": "The mask: arrow keys move the brush, Space paints" };
    for (const [key, value] of Object.entries(masks)) name === "mask" ? frame.setAttribute(key, value) : frame.removeAttribute(key);
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
  let crops = 0; // that are not stored yet: the picture has a newer one than the answer to an earlier one
  /** Send an edit of the shown image. */
  function store(name, data) {
    say("");
    if (name === "crop") crops += 1;
    line = line.then(async () => {
      const answer = await change(name, data, say).catch(console.error);
      if (name === "crop") crops -= 1;
      if (!answer) drawItem();
      else if (dialog.open && index() < 0) load();
    });
  }
  function keepMask(value) {
    hangproof.keep("mask", id, { turn: item.turn, ...value });
    saved.textContent = "Storing the mask…";
    shown ||= "painted";
    hangproof.send();
  }
  hangproof.kinds.mask = {
    call: (of, { png, ...rest }) => ask("mask", { id: of, png: png || null, ...rest }),
    stored(of, { name }, answer) {
      // What was painted here is on the canvas already; a mask from a file, or from before a reload, is not.
      const stored = answer.list.items.find((one) => one.id === of);
      if (shown && of === id && stored && !name) shown = keyOfItem(stored);
      show(answer);
      if (of !== id) return;
      say("");
      saved.textContent = "Mask stored";
    },
    refused(of, value, answer) {
      if (answer) hangproof.forget("mask", of);
      if (of !== id) return;
      say(answer?.error);
      saved.textContent = answer ? "" : "The mask is not stored yet; it is kept in this browser.";
      if (answer) load(true);
    },
  };
  async function removeShown() {
    const before = Math.max(index(), 0);
    if (!(await removeImages([id])) || !dialog.open) return; // closed meanwhile
    const { items } = state();
    if (items.length) open(items[Math.min(before, items.length - 1)].id);
    else dialog.close();
  }

  // Showing ----------------------------------------------------------------------------------------------------------
  const index = () => state().items.findIndex((one) => one.id === id);
  const keyOfItem = (one) => [one.id, one.turn, one.mask].join();
  /** another: what the fields have is of the image before. */
  function drawItem(another) {
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
    if (another || document.activeElement !== weight) weight.value = item.weight;
    if (another || crops < 2) cropTool.show(item.full, item.crop, another); // 1: the answer to it is shown
  }
  /** Ask for the large picture, the mask and the item itself, which a filter may have taken off the page. */
  async function load(again) {
    const wanted = id;
    const answer = await look("open", { id: wanted }, (text) => wanted === id && say(text));
    if (!answer && wanted === id) painter.ready();
    if (!answer || wanted !== id || !dialog.open) return;
    if (!answer.item) return dialog.close(); // it was removed elsewhere
    item = answer.item;
    painter.say(answer);
    picture.src = answer.url;
    drawItem();
    if (shown === keyOfItem(item) && !again) return;
    shown = keyOfItem(item);
    await painter.show(item.full, (hangproof.unsavedText("mask", id) || { png: answer.mask }).png);
  }
  function take() {
    item = state().items[index()];
    place = state().page * state().size + index();
  }
  function open(wanted) {
    id = wanted;
    take();
    shown = "";
    say("");
    saved.textContent = "";
    picture.src = item.thumb;
    painter.show(item.full, "", Boolean(item.mask || hangproof.unsavedText("mask", id)));
    if (!dialog.isConnected) document.body.append(dialog);
    if (!dialog.open) {
      choose("look");
      dialog.showModal();
    }
    drawItem(true);
    if (document.activeElement === dialog || !dialog.contains(document.activeElement)) close.focus();
    load();
  }
  /** Show the image before or after this one, on the next page of cards where this is the last of its page. */
  async function beside(step) {
    await hangproof.send();
    const { items, page, pages, size } = state();
    const at = index() < 0 ? Math.min(place % size, items.length) - (step > 0 ? 1 : 0) : index(); // it left the filter
    let next = items[at + step];
    if (!next && page + step >= 0 && page + step < pages) {
      await go({ page: page + step });
      next = step > 0 ? state().items[0] : state().items.at(-1);
    }
    if (next && dialog.open) open(next.id);
  }
  dialog.addEventListener("keydown", (event) => {
    const typing = event.target.closest(TEXT_FIELD);
    const way = { ArrowLeft: -1, ArrowRight: 1, PageUp: -1, PageDown: 1 }[event.key];
    if (!way || (typing && !event.key.startsWith("Page")) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (stage.matches(":active")) return; // the end of a stroke or a drag is stored with the shown image
    typing?.blur(); // so is a number that was typed and not left yet
    typing?.focus();
    beside(way);
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => {
    hangproof.send();
    const card = cards.get(id)?.card || grid.firstElementChild;
    (card?.querySelector(".hp-open-picture") || zone).focus();
  });
  return {
    open,
    say,
    /** The cards were drawn again. */
    refresh() {
      if (!dialog.open || index() < 0) return;
      take();
      drawItem();
      if (keyOfItem(item) !== shown && !hangproof.unsavedText("mask", id)) load();
    },
    /** Whether the caption of an image is stored, or what was undone. */
    mark(of, text) {
      if (of !== id && of !== "") return;
      saved.textContent = text;
      saved.classList.toggle("hp-not-saved", text === "not saved");
    },
  };
}

/** What a card says of the edits of its image, such as "cropped · mask · ×3"; "" for none. */
function editsText(item) {
  return [item.crop && "cropped", item.mask && "mask", item.weight > 1 && `×${item.weight}`].filter(Boolean).join(" · ");
}
