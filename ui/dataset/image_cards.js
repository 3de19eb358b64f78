// The cards: an image with its caption, warnings and buttons. Part of the images' script.
//
// A card belongs to one image by its id. Its caption is "saved" only after the server has answered `ok: true`.
const cards = new Map(); // id → card
const selected = new Set();
const fileOf = new Map(); // id → file, also of images that are no longer shown
// What is said of an image, the text of the button that fixes it, and the call.
const WARNINGS = {
  small: (item) => [`Only ${item.width} × ${item.height} pixels: too small to learn from.`, "Remove it", "remove_images"],
  sideways: () => ["This photo may lie on its side.", "Rotate it", "rotate"],
  near: (item) => [`Nearly identical to ${item.near || "another image"}.`, "Remove this one", "remove_images"],
  no_caption: () => ["No caption: only the trigger word is used.", "Use the trigger word", "insert_trigger"],
};
const CAPTION_HINT = "Describe the image. If this is empty, the trigger word is used.";
const nameOf = (item) => (item.folder && !item.file.startsWith(item.folder) ? `${item.folder}/${item.file}` : item.file);

// Captions ----------------------------------------------------------------------------------------------------------
function typeCaption(id, text) {
  hangproof.typed("caption", id, text);
  mark(id, "…");
}
function mark(id, text) {
  editor.mark(id, text);
  const card = cards.get(id);
  if (!card) return;
  card.saved.textContent = text;
  card.saved.classList.toggle("hp-not-saved", text === "not saved");
}
hangproof.kinds.caption = {
  call: (id, text) => ask("save_caption", { id, text }),
  begun: (id) => mark(id, "…"),
  stored(id, text, answer) {
    const item = state().items.find((one) => one.id === id);
    if (item) item.caption = text;
    if (hangproof.unsavedText("caption", id) === undefined) mark(id, "saved");
    showHistory(answer.history);
    trigger("checked");
    hangproof.sync(); // the plan says how many images have no caption
  },
  refused(id, text, answer) {
    mark(id, "not saved");
    if (answer?.removed) setAside(id, text);
    else if (answer) hangproof.refuse(answer.error);
  },
};
/** The image was removed elsewhere: show the text, so that it can be copied. It is not sent again. */
function setAside(id, text) {
  hangproof.forget("caption", id);
  const name = fileOf.get(id) || "An image";
  const box = make("div", "hp-aside", [
    make("p", "", `${name} was removed in another tab. Its caption is not saved:`),
    make("textarea", "", { value: text, readOnly: true, ariaLabel: "Caption of a removed image" }),
    button("Dismiss", "hp-quiet", () => box.remove()),
  ]);
  asides.append(box);
  reload();
}

// Cards -------------------------------------------------------------------------------------------------------------
function iconButton(text, label, cls, act) {
  return Object.assign(button(text, "hp-icon " + cls, act), { title: label, ariaLabel: label });
}
function cardOf(item) {
  const name = nameOf(item);
  fileOf.set(item.id, item.file);
  const card = make("article", "hp-card");
  card.dataset.file = item.file;
  card.dataset.id = item.id;
  const picture = make("div", "hp-picture");
  const open = make("button", "hp-open-picture", { type: "button", ariaLabel: "Open " + name, onclick: () => editor.open(item.id) });
  const image = open.appendChild(make("img", "", { loading: "lazy", draggable: false, alt: name, src: item.thumb }));
  const pick = make("input", "hp-pick", { type: "checkbox", ariaLabel: "Select " + name });
  let range = false; // with Shift, by mouse or by the space bar
  pick.addEventListener("keydown", (event) => (range = event.shiftKey));
  pick.addEventListener("click", (event) => {
    pickImage(item.id, pick.checked, range || event.shiftKey);
    range = false;
  });
  const remove = iconButton("×", "Remove " + name, "hp-remove", async () => {
    const index = [...grid.children].indexOf(card);
    if (await removeImages([item.id])) focusCard(index);
  });
  const tags = make("span", "hp-tags");
  picture.append(open, pick, remove, tags);
  const file = make("span", "hp-file", { textContent: name, title: name });
  const size = make("span", "hp-size", `${item.width} × ${item.height}`);
  const saved = make("span", "hp-saved", { ariaLive: "polite" });
  const warnings = make("ul", "hp-warnings");
  const text = make("textarea", "", { rows: 3, placeholder: CAPTION_HINT, ariaLabel: "Caption of " + name });
  text.addEventListener("input", () => typeCaption(item.id, text.value));
  // After the click that took the focus: what it was aimed at must not move under it.
  text.addEventListener("blur", () => hangproof.send().then(() => setTimeout(() => redraw(item.id), 250)));
  card.append(picture, make("div", "hp-card-line", [file, saved, size]), warnings, text);
  return { card, text, saved, warnings, pick, image, size, tags };
}
/** Show what is known of one image: its caption has changed, and so may what is said about it. */
function redraw(id) {
  const one = cards.get(id);
  const item = state().items.find((found) => found.id === id);
  if (one && item) update(one, item);
}
function update(one, item) {
  const waits = hangproof.unsavedText("caption", item.id);
  const text = waits ?? item.caption;
  if (one.text.value !== text) one.text.value = text;
  if (waits === undefined && one.saved.textContent !== "saved") mark(item.id, ""); // another tab has stored it
  if (waits !== undefined && !hangproof.isSending("caption", item.id) && hangproof.trouble()) mark(item.id, "not saved");
  if (one.image.getAttribute("src") !== item.thumb) one.image.src = item.thumb;
  one.size.textContent = `${item.width} × ${item.height}`;
  one.tags.textContent = editsText(item);
  one.pick.checked = selected.has(item.id);
  const codes = item.warnings.filter((code) => code !== "no_caption");
  if (!text.trim()) codes.push("no_caption");
  if (one.warnings.dataset.codes === codes.join()) return;
  one.warnings.dataset.codes = codes.join();
  one.warnings.replaceChildren(...codes.map((code) => warningOf(item, code)));
}
function warningOf(item, code) {
  const [message, fix, name] = WARNINGS[code](item);
  const act = button(fix, "hp-link", () => change(name, { id: item.id, ids: [item.id] }));
  act.ariaLabel = `${fix}: ${nameOf(item)}`;
  return make("li", "", [message + " ", act]);
}

// Undo --------------------------------------------------------------------------------------------------------------
const TEXT_FIELD = "input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]";
const histories = [];
/** Buttons for undo and redo that follow the history. instead: gets the focus of one that is disabled. */
function historyButtons(instead) {
  const pair = ["undo", "redo"].map((way) => button("", "hp-quiet", () => step(way)));
  histories.push({ pair, instead });
  return pair;
}
function showHistory(labels) {
  for (const { pair, instead } of histories) {
    pair.forEach((one, n) => {
      const label = labels[n] || "";
      if (!label && document.activeElement === one) instead.focus();
      one.disabled = !label;
      one.title = label;
      one.textContent = (n ? "Redo" : "Undo") + (label && `: ${label}`);
    });
  }
}
async function step(way) {
  const say = dialog.open ? editor.say : showError;
  // The rest of a drop would become a new step, after which nothing brings back the images that were undone.
  if (uploading) return say("Images are being uploaded. Undo and redo when that has ended, or cancel the upload first.");
  if (!(await hangproof.send())) return;
  const answer = await change(way, {}, say);
  if (!answer?.message) return;
  if (dialog.open) editor.mark("", answer.message);
  else showNotes([answer.message], "good", true);
}
document.addEventListener("keydown", (event) => {
  const key = event.key.toLowerCase();
  if (!element.offsetParent || !(event.ctrlKey || event.metaKey) || event.altKey || !["z", "y"].includes(key)) return;
  if (event.target.closest(TEXT_FIELD)) return;
  event.preventDefault();
  step(key === "y" || event.shiftKey ? "redo" : "undo");
});
