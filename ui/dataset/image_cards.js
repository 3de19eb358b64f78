// The cards: an image with its caption, warnings and buttons. Part of the images' script.
//
// A card belongs to one image by its id. Its caption is "saved" only after the server has answered `ok: true`.
const cards = new Map(); // id → card
const saving = new Map();
const selected = new Set();
const fileOf = new Map(); // id → file, also of images that are no longer shown
// What is said of an image, the text of the button that fixes it, and the call.
const WARNINGS = {
  small: (item) => [`Only ${item.width} × ${item.height} pixels: too small to learn from.`, "Remove it", "remove_images"],
  sideways: () => ["This photo may lie on its side.", "Rotate it", "set_upright"],
  near: (item) => [`Nearly identical to ${item.near || "another image"}.`, "Remove this one", "remove_images"],
  no_caption: () => ["No caption: only the trigger word is used.", "Use the trigger word", "use_trigger"],
};
const CAPTION_HINT = "Describe the image. If this is empty, the trigger word is used.";
const nameOf = (item) => (item.folder && !item.file.startsWith(item.folder) ? `${item.folder}/${item.file}` : item.file);
const itemOf = (id) => state().items.find((one) => one.id === id);

// Captions ----------------------------------------------------------------------------------------------------------
let pause = null;
function typed(item, text) {
  hangproof.keep("caption", item.id, text);
  mark(item.id, "…");
  clearTimeout(pause);
  pause = setTimeout(flush, 500);
}
function mark(id, text) {
  const card = cards.get(id);
  if (!card) return;
  card.saved.textContent = text;
  card.saved.classList.toggle("hp-not-saved", text === "not saved");
}
/** Send one caption until what was typed last is stored. Returns whether it is. */
async function sendCaption(id) {
  for (let text; (text = hangproof.unsavedText("caption", id)) !== undefined; ) {
    mark(id, "…");
    const answer = await ask("save_caption", { id, text });
    if (answer?.ok !== true) {
      mark(id, "not saved");
      if (answer?.removed) setAside(id, text);
      else if (answer) hangproof.refuse(answer.error);
      else hangproof.lost();
      return false;
    }
    hangproof.confirmed("caption", id, text);
    const item = itemOf(id);
    if (item) item.caption = text;
    if (hangproof.unsavedText("caption", id) === undefined) mark(id, "saved");
    showHistory(answer.history);
    hangproof.tellOthers();
  }
  return true;
}
/** Send every caption that is not stored. Returns whether all of them are. */
async function flush() {
  clearTimeout(pause);
  const results = await Promise.all(
    hangproof.unsaved("caption").map(([id]) => {
      if (!saving.has(id)) saving.set(id, sendCaption(id).finally(() => saving.delete(id)));
      return saving.get(id);
    })
  );
  return results.every(Boolean);
}
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
  const open = make("button", "hp-open-picture", { type: "button", ariaLabel: "Enlarge " + name });
  open.addEventListener("click", () => enlarge(item.id));
  const image = open.appendChild(make("img", "", { loading: "lazy", alt: name }));
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
  const edit = iconButton("✎", "Edit " + name, "hp-edit", () => trigger("edit", { id: item.id }));
  const tags = make("span", "hp-tags");
  const picture = make("div", "hp-picture", [open, pick, edit, remove, tags]);
  const file = make("span", "hp-file", { textContent: name, title: name });
  const size = make("span", "hp-size");
  const saved = make("span", "hp-saved", { ariaLive: "polite" });
  const warnings = make("ul", "hp-warnings");
  const text = make("textarea", "", { rows: 3, placeholder: CAPTION_HINT, ariaLabel: "Caption of " + name });
  text.addEventListener("input", () => typed(item, text.value));
  // After the click that took the focus: what it was aimed at must not move under it.
  text.addEventListener("blur", () => flush().then(() => setTimeout(() => redraw(item.id), 250)));
  card.append(picture, make("div", "hp-card-line", [file, saved, size]), warnings, text);
  return { card, text, saved, warnings, pick, image, size, tags, edit, thumb: "" };
}
/** Show what is known of one image: its caption has changed, and so may what is said about it. */
function redraw(id) {
  const one = cards.get(id);
  const item = itemOf(id);
  if (one && item) update(one, item);
}
/** What a card says of the edits of its image, such as "cropped · mask · ×3"; "" for none. */
const editsText = (item) => [item.crop && "cropped", item.mask && "mask", item.weight > 1 && `×${item.weight}`].filter(Boolean).join(" · ");
function update(one, item) {
  const waits = hangproof.unsavedText("caption", item.id);
  const text = waits ?? item.caption;
  if (one.text.value !== text) one.text.value = text;
  if (waits === undefined && one.saved.textContent !== "saved") mark(item.id, ""); // another tab has stored it
  if (waits !== undefined && !saving.has(item.id) && hangproof.trouble()) mark(item.id, "not saved");
  if (one.thumb !== item.thumb) one.image.src = one.thumb = item.thumb;
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
/** Show an image as wide as the page, above its caption; and small again. */
async function enlarge(id) {
  const { card, image } = cards.get(id);
  if (!card.classList.toggle("hp-large")) return;
  const answer = await look("large", { id });
  if (answer) image.src = answer.url;
  card.scrollIntoView({ block: "nearest" });
}
/** The panel of an image was closed: the focus goes back to its card. */
hangproof.focusCard = (id) => (cards.get(id)?.edit || zone).focus();
