// Step 2: the drop zone and the cards with captions. Runs as the body of gr.HTML's js_on_load.
//
// The cards are built here with textContent, never from markup, so a hostile file name or caption stays text. What is
// typed is in `dirty` until the server has stored it; a list that arrives meanwhile never replaces it.
const dirty = new Map();
const saving = new Map();
let timer = null;
let busy = 0;

const zone = make("div", "hp-drop");
zone.tabIndex = 0;
zone.setAttribute("role", "button");
const zoneTitle = make("strong", "", "Drop images here, or click to choose");
const zoneHint = make("span", "", "PNG, JPEG, WebP, BMP, GIF or TIFF, any number of them. Drop .txt captions of the same names with them.");
zone.append(zoneTitle, zoneHint);
const picker = make("input");
picker.type = "file";
picker.multiple = true;
picker.accept = "image/*,.txt,.caption";
picker.hidden = true;
picker.dataset.testid = "image-picker";
const notes = make("div", "hp-notes");
notes.setAttribute("role", "status");
const bar = make("div", "hp-toolbar");
const grid = make("div", "hp-cards");
const pager = make("div", "hp-pager");
element.replaceChildren(zone, picker, notes, bar, grid, pager);

const say = (lines, kind) => {
  notes.className = "hp-notes hp-" + kind;
  notes.replaceChildren(...lines.map((line) => make("p", "", line)));
};
const state = () => props.value || { draft: "", items: [], total: 0, page: 0, pages: 1 };

async function call(name, data) {
  try {
    const answer = await server[name]({ draft: state().draft, page: state().page, ...data });
    if (answer && answer.error) say([answer.error], "bad");
    return answer || {};
  } catch (error) {
    say(["The server does not answer. What you typed stays here; it is stored when the server is back."], "bad");
    return { error: String(error) };
  }
}
function show(answer) {
  if (!answer.list) return;
  const before = state().total;
  props.value = answer.list;
  draw();
  if (before !== answer.list.total) trigger("change");
}

// Captions ----------------------------------------------------------------------------------------------------------
function typed(file, text) {
  dirty.set(file, text);
  mark(file, "typing");
  clearTimeout(timer);
  timer = setTimeout(flush, 500);
}
function mark(file, how) {
  const card = cards.get(file);
  if (card) card.saved.textContent = { typing: "…", saved: "saved", failed: "not saved" }[how] || "";
}
async function store(file) {
  while (dirty.has(file)) {
    const text = dirty.get(file);
    const answer = await call("save_caption", { file, text });
    if (answer.error) {
      mark(file, "failed");
      return false;
    }
    if (dirty.get(file) === text) {
      dirty.delete(file);
      mark(file, "saved");
      const item = state().items.find((one) => one.file === file);
      if (item) item.caption = text;
    }
  }
  return true;
}
async function flush() {
  clearTimeout(timer);
  const results = await Promise.all(
    [...dirty.keys()].map((file) => {
      if (!saving.has(file)) saving.set(file, store(file).finally(() => saving.delete(file)));
      return saving.get(file);
    })
  );
  return results.every(Boolean);
}
// Start and Insert wait for this, so that the last words typed are in what they use.
window.hangproofFlush = flush;
window.addEventListener("beforeunload", () => {
  if (dirty.size) flush();
});

// Cards -------------------------------------------------------------------------------------------------------------
const cards = new Map();
function cardOf(item) {
  const card = make("article", "hp-card");
  card.dataset.file = item.file;
  const picture = make("div", "hp-picture");
  const image = make("img");
  image.loading = "lazy";
  image.alt = item.file;
  image.src = item.thumb;
  const gone = button("×", "hp-remove", async () => {
    const place = [...grid.children].indexOf(card);
    dirty.delete(item.file);
    const answer = await call("remove_image", { file: item.file });
    show(answer);
    const next = grid.children[Math.min(place, grid.children.length - 1)];
    if (!answer.error) (next ? next.querySelector(".hp-remove") : zone).focus(); // what had the focus is gone
  });
  gone.title = "Remove this image";
  gone.setAttribute("aria-label", "Remove " + item.file);
  picture.append(image, gone);
  const line = make("div", "hp-card-line");
  const name = make("span", "hp-file", item.file);
  name.title = item.file;
  const size = make("span", "hp-size", `${item.width} × ${item.height}`);
  const saved = make("span", "hp-saved", "");
  line.append(name, saved, size);
  const text = make("textarea");
  text.rows = 3;
  text.placeholder = "What is in the picture? Left empty, it gets the trigger word.";
  text.setAttribute("aria-label", "Caption of " + item.file);
  text.addEventListener("input", () => typed(item.file, text.value));
  text.addEventListener("blur", flush);
  card.append(picture, line, text);
  return { card, text, saved };
}
function draw() {
  const { items, total, page, pages, waiting } = state();
  const wanted = new Set(items.map((one) => one.file));
  for (const [file, one] of cards) {
    if (!wanted.has(file)) {
      one.card.remove();
      cards.delete(file);
    }
  }
  items.forEach((item, place) => {
    if (!cards.has(item.file)) cards.set(item.file, cardOf(item));
    const one = cards.get(item.file);
    const text = dirty.has(item.file) ? dirty.get(item.file) : item.caption;
    if (one.text.value !== text) one.text.value = text;
    if (grid.children[place] !== one.card) grid.insertBefore(one.card, grid.children[place] || null);
  });
  zone.classList.toggle("hp-small", total > 0);
  const missing = (waiting || []).length;
  bar.hidden = total === 0 && !missing;
  const words = [total === 1 ? "1 image" : `${total} images`];
  if (missing) words.push(`${missing} caption${missing > 1 ? "s" : ""} without an image yet`);
  count.textContent = words.join(" · ");
  count.title = (waiting || []).slice(0, 20).join(", ");
  pager.hidden = pages < 2;
  where.textContent = `Page ${page + 1} of ${pages}`;
  back.disabled = page === 0;
  next.disabled = page + 1 >= pages;
}

// Toolbar and pages -------------------------------------------------------------------------------------------------
const count = make("span", "hp-count");
count.dataset.testid = "image-count";
const insert = button("Put the trigger word first", "hp-quiet", async () => {
  if (await flush()) trigger("insert");
});
const clear = button("Remove all", "hp-quiet", async () => {
  if (!clear.dataset.sure) {
    clear.dataset.sure = "1";
    clear.textContent = "Remove all images and captions?";
    setTimeout(() => {
      delete clear.dataset.sure;
      clear.textContent = "Remove all";
    }, 4000);
    return;
  }
  dirty.clear();
  delete clear.dataset.sure;
  clear.textContent = "Remove all";
  show(await call("clear_images", {}));
});
bar.append(count, insert, clear);
const turn = async (step) => {
  await flush();
  show(await call("list_images", { page: state().page + step }));
};
const back = button("‹ Previous", "hp-quiet", () => turn(-1));
const next = button("Next ›", "hp-quiet", () => turn(1));
const where = make("span", "");
pager.append(back, where, next);

// Dropping ----------------------------------------------------------------------------------------------------------
async function filesOf(entry) {
  if (entry.isFile) return [await new Promise((done, failed) => entry.file(done, failed))];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const part = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!part.length) return found;
    for (const one of part) found.push(...(await filesOf(one)));
  }
}
async function send(files) {
  const form = new FormData();
  for (const file of files) form.append("files", file, file.name);
  const answer = await fetch("gradio_api/upload", { method: "POST", body: form });
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}
async function take(files) {
  const all = files
    .filter((file) => !file.name.startsWith(".") && !/^(thumbs\.db|desktop\.ini)$/i.test(file.name))
    .sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
  if (!all.length) return;
  busy += 1;
  const told = [];
  let kind = "bad";
  let added = 0;
  let done = 0;
  try {
    while (done < all.length) {
      zoneTitle.textContent = `Taking in ${done} of ${all.length}…`;
      const batch = [];
      let bytes = 0;
      while (done + batch.length < all.length && batch.length < 16 && (!batch.length || bytes < 32e6)) {
        bytes += all[done + batch.length].size;
        batch.push(all[done + batch.length]);
      }
      let answer;
      try {
        answer = await call("add_images", { paths: await send(batch) });
      } catch (error) {
        answer = await call("explain_refusal", { names: batch.map((file) => file.name), bytes });
      }
      if (answer.error) {
        told.push(answer.error, `${all.length - done} of ${all.length} files were not taken in; drop them again.`);
        break;
      }
      told.push(...(answer.told || []));
      added += answer.added || 0;
      done += batch.length;
      show(answer);
    }
  } finally {
    busy -= 1;
    if (!busy) zoneTitle.textContent = "Drop images here, or click to choose";
  }
  if (!told.length) {
    kind = "good";
    if (added) told.push(added === 1 ? "1 image added." : `${added} images added.`);
  } else if (added) {
    told.unshift(`${added} image${added > 1 ? "s" : ""} added; not taken in:`);
  }
  say(told, kind);
}
zone.addEventListener("click", () => picker.click());
zone.addEventListener("keydown", (event) => {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    picker.click();
  }
});
picker.addEventListener("change", () => {
  take([...picker.files]);
  picker.value = "";
});
for (const name of ["dragenter", "dragover"]) {
  zone.addEventListener(name, (event) => {
    event.preventDefault();
    zone.classList.add("hp-over");
  });
}
zone.addEventListener("dragleave", () => zone.classList.remove("hp-over"));
zone.addEventListener("drop", async (event) => {
  event.preventDefault();
  zone.classList.remove("hp-over");
  const entries = [...event.dataTransfer.items].map((one) => one.webkitGetAsEntry && one.webkitGetAsEntry());
  const loose = [...event.dataTransfer.files];
  take(entries.every(Boolean) ? (await Promise.all(entries.map(filesOf))).flat() : loose);
});

watch("value", draw);
draw();
