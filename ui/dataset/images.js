// Step 1: the drop zone, the toolbar and the pages of cards. The last part of the images' script (ui/scripts.py). Every
// text is set with textContent, so a hostile file name or caption stays text.
const ANSWER_MS = 60_000;
const DROP_HINT = "Drop images or folders here, or click to choose files";
const TYPES = "image/*,.heic,.heif,.avif,.zip,.txt,.caption";
const state = () =>
  props.value || { draft: "", items: [], total: 0, found: 0, size: 12, page: 0, pages: 1, waiting: [], texts: 0, history: [] };

const picker = make("input", "", { type: "file", multiple: true, hidden: true, accept: TYPES, onchange: chosen });
picker.dataset.testid = "image-picker";
function choose(folder) {
  picker.webkitdirectory = folder;
  picker.click();
}
const zoneTitle = make("strong", "", DROP_HINT);
const zoneHint = make("span", "", "JPEG, PNG, WebP, HEIC, AVIF, BMP, GIF, TIFF or ZIP. A .txt file with the same name is the caption.");
const progress = make("progress", "", { hidden: true, ariaLabel: "Upload" });
const zone = button("", "hp-drop", () => choose(false));
zone.append(zoneTitle, zoneHint, progress);
const ways = make("div", "hp-ways");
const recent = make("div", "hp-recent");
const notes = live("div", "hp-notes", "status");
const asides = make("div", "hp-asides");
const bar = make("div", "hp-toolbar");
const tools = make("div", "hp-toolbar hp-tools");
const grid = make("div", "hp-cards");
const pager = make("div", "hp-pager");
const skip = make("a", "hp-skip", { textContent: "Skip the images", href: "#start" });
skip.onclick = (event) => {
  event.preventDefault(); // the page has a base address: the link would load it again
  document.getElementById("start").focus();
};

const MOST_NOTES = 20; // of a folder that is dropped again, each image has one
const showNotes = (lines, kind, brief) => {
  const more = lines.length - MOST_NOTES;
  if (more > 0) lines = [...lines.slice(0, MOST_NOTES), `… and ${many(more, "more message")}.`];
  notes.className = "hp-notes hp-" + kind;
  notes.dataset.brief = brief ? "1" : ""; // a sentence that the next change makes untrue
  notes.replaceChildren(...lines.map((line) => make("p", "", line)));
};
function showProgress(text, part) {
  zoneTitle.textContent = text;
  progress.hidden = part === null;
  if (part !== null) progress.value = part;
}

// Server ------------------------------------------------------------------------------------------------------------
const view = () => {
  const { draft, page, query } = state();
  return { draft, page, query };
};
let answers = 0; // how many have said what the server has of the images
/** The server's answer: {ok: true, …} or {ok: false, error}; null for none: nothing was stored. */
async function ask(name, data) {
  const [asked, before] = [view(), answers];
  const late = new Promise((done) => setTimeout(done, ANSWER_MS));
  const request = server.image_action({ ...asked, action: name, ...data }).catch(() => null); // Gradio can throw
  const answer = await Promise.race([request, late]);
  if (!answer || typeof answer.ok !== "boolean") return null;
  // Another page was opened meanwhile, or another answer came first: this list may be out of date.
  if (answer.list && (answers !== before || JSON.stringify(asked) !== JSON.stringify(view()))) answer.late = true;
  if (answer.list || answer.history) answers += 1;
  return answer;
}
const showError = (text) => showNotes([text], "bad");
/** The answer of a server that did what was asked, or null after `say` said why not. */
async function look(name, data, say = showError) {
  const answer = await ask(name, data);
  if (answer?.ok === true) return answer;
  say(answer ? answer.error : `${await noAnswer()} Nothing was changed. Try again later.`);
  return null;
}
/** Ask for a change of the images and show the result, as `look` does. */
async function change(name, data, say) {
  const answer = await look(name, data, say);
  if (!answer) return null;
  if (notes.dataset.brief) showNotes([], "good");
  await show(answer);
  hangproof.tellOthers();
  return answer;
}
/** Why the server did not answer. */
async function noAnswer() {
  await hangproof.lost();
  return hangproof.trouble() === "login" ? "Your login has ended." : "Hangproof does not respond.";
}
function show(answer) {
  if (!answer.list) return;
  if (answer.late) return reload();
  props.value = answer.list;
  draw();
  trigger("checked");
  trigger("script");
  hideRefusal();
  hangproof.sync(); // the plan follows the images and their weights
}
/** Show what the server has, one request after the other. Resolves to whether it answered. */
function reload() {
  queued ||= reloading.then(async () => {
    queued = null;
    const answer = await ask("list_images", {});
    if (answer?.ok === true) show(answer);
    else hangproof.lost();
    return answer?.ok === true;
  });
  reloading = queued;
  return queued;
}
let queued = null;
let reloading = Promise.resolve();
hangproof.showNew = reload; // what the server stores in the background
const openFold = (id) => document.querySelector(`#${id} button.label-wrap:not(.open)`)?.click();

// Toolbar -----------------------------------------------------------------------------------------------------------
const count = make("span", "hp-count");
count.dataset.testid = "image-count";
const insert = button("Add trigger word to all captions", "hp-quiet", async () => {
  if (await hangproof.flush()) change("insert_trigger", {});
});
const clear = button("Remove all", "hp-quiet", async () => {
  if (await hangproof.send()) change("clear_images", {});
});
/** Remove images, and what is kept of them in this browser. Returns whether it was done. */
async function removeImages(ids) {
  if (!(await change("remove_images", { ids }))) return false;
  for (const id of ids) {
    hangproof.forget("caption", id);
    hangproof.forget("mask", id);
    selected.delete(id);
  }
  drawSelection();
  return true;
}
/** Focus the button of the card at this place, in place of one that no longer exists, unless somebody types by now. */
function focusCard(index) {
  const next = grid.children[Math.min(Math.max(index, 0), grid.children.length - 1)];
  if (!document.activeElement.closest(TEXT_FIELD)) (next ? next.querySelector(".hp-remove") : zone).focus();
}
bar.append(count, ...historyButtons(zone), insert, clear);
tools.append(filter, subsetFilter, searchText, selectAll, invertSelection, selection);

// Pages -------------------------------------------------------------------------------------------------------------
/** Show another page or filter; the captions typed last are stored first. */
async function go(wanted) {
  const mine = ++going;
  await hangproof.send();
  const answer = await look("list_images", wanted);
  if (mine !== going) return; // another page is wanted by now
  if (answer?.late) return go(wanted);
  if (answer) show(answer);
  else drawFilters();
}
let going = 0;
const back = button("‹ Previous", "hp-quiet", () => go({ page: state().page - 1 }));
const next = button("Next ›", "hp-quiet", () => go({ page: state().page + 1 }));
const where = make("span", "");
pager.append(back, where, next);

// Drawing -----------------------------------------------------------------------------------------------------------
function draw() {
  const { draft, items, total, found, page, pages, waiting: names, texts, history, done } = state();
  hangproof.setDraft(draft);
  const wanted = new Set(items.map((one) => one.id));
  for (const [id, one] of cards) {
    if (!wanted.has(id)) {
      one.card.remove();
      cards.delete(id);
    }
  }
  items.forEach((item, index) => {
    if (!cards.has(item.id)) cards.set(item.id, cardOf(item));
    const one = cards.get(item.id);
    update(one, item);
    if (grid.children[index] !== one.card) grid.insertBefore(one.card, grid.children[index] || null);
  });
  document.body.classList.toggle("hp-no-images", total === 0);
  zone.classList.toggle("hp-small", total > 0);
  bar.hidden = total === 0 && !texts && !history.some(Boolean);
  tools.hidden = total === 0;
  skip.hidden = total === 0;
  drawFilters();
  const parts = [many(total, "image")];
  if (isFiltered()) parts.push(`${found.toLocaleString("en")} shown`);
  if (texts) parts.push(`${many(texts, "caption")} without a matching image`);
  count.textContent = parts.join(" · ");
  count.title = names.join(", ");
  pager.hidden = pages < 2;
  where.textContent = `Page ${page + 1} of ${pages}`;
  back.disabled = page === 0;
  next.disabled = page + 1 >= pages;
  showHistory(history);
  drawSelection();
  if (selected.size && !hangproof.same(drawn, [total, done])) dropRemoved();
  drawn = [total, done];
  editor.refresh();
  for (const [fold, busy] of Object.entries({ "caption-writer": state().captioning, "import-fold": state().importing })) {
    if (busy && !openedFolds.has(fold)) openFold(fold); // once, such as after the page was loaded again
    if (busy) openedFolds.add(fold);
    else openedFolds.delete(fold);
  }
  if (draft && draft !== adopted) {
    adopted = draft;
    hangproof.flush();
  }
}
let adopted = "";
let drawn = [];
const openedFolds = new Set();

// Drafts of other browsers ------------------------------------------------------------------------------------------
const openRecent = button("Continue a draft", "hp-quiet", async () => {
  const answer = await look("recent_drafts", {});
  if (!answer) return;
  const found = answer.drafts.map(({ id, name, images, age }) =>
    button(`${name || "No name"} · ${many(images, "image")} · ${age}`, "hp-quiet", () => hangproof.openDraft(id))
  );
  recent.replaceChildren(...(found.length ? found : [make("p", "", "There is no other draft.")]));
});
ways.append(button("Choose a folder", "hp-quiet", () => choose(true)), openRecent);

// Events ------------------------------------------------------------------------------------------------------------
// Anywhere on the page: beside the zone, the browser would open the file in place of the page.
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  window.addEventListener(name, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    zone.classList.toggle("hp-over", name !== "drop" && (name !== "dragleave" || event.relatedTarget !== null));
    if (name !== "drop") return;
    if (!element.offsetParent) document.querySelector("#tabs [role=tab]")?.click();
    dropped(event.dataTransfer);
  });
}

hangproof.selected = () => [...selected];
hangproof.writeCaptions = (ids) => {
  selectOnly(ids);
  openFold("caption-writer");
  document.querySelector("#caption-writer").scrollIntoView();
};
// Start and the other buttons wait for this, so that they use what was typed last.
hangproof.flush = async () => (await Promise.all([hangproof.send(), hangproof.sync()])).every(Boolean);
hangproof.on("back", async () => {
  await hangproof.flush();
  await reload();
});
hangproof.on("others", reload);

element.replaceChildren(zone, cancelUpload, picker, ways, recent, notes, asides, bar, tools, skip, grid, pager);
watch("value", draw);
draw();
