// The part "Evolution" of a run (ui/run/evolution.py): its samples by prompt and step, and what is done with them.
//
// The value is {run, stamp, some, job}: the table itself comes from the HTTP API, which answers "unchanged" where it is. This
// file has what the views share and the dialog that shows a sample large; anything on the page with `data-sample=URL` opens it.
const NOTHING = { run: "", prompts: [], snapshots: [], validation: [], best: null, overfitting: null, picked: null };
let data = NOTHING; // the API's answer
let rows = []; // of each prompt with samples: {number, prompt, seed, items: [{url, at, key, snapshot}] in the order of the steps}
let place = null; // [row, item] in the dialog
const current = () => props.value || { run: "", stamp: "", some: false, job: null };
const base = (path) => new URL(path, document.baseURI).href;
const plain = (url) => url.split("?")[0];
const keyOf = (snapshot) => (snapshot.step === null ? `e${snapshot.epoch}` : `${snapshot.step}`);
const upper = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);
const grouped = (number) => number.toLocaleString("en-US");
const short = (number) => Number(number.toPrecision(3)).toString();
function thumbOf(run, url) {
  const [path, query] = url.split("?");
  return `api/evolution/${encodeURIComponent(run)}/thumb/${path.split("/").pop()}?${query}`;
}
// The figures of a snapshot as [label, value] pairs.
function figures(snapshot) {
  return [
    ["Loss", snapshot.loss],
    ["Validation loss", snapshot.val_loss],
    ["Likeness", snapshot.likeness],
  ].filter(([, value]) => value !== null && value !== undefined);
}
function marksOf(snapshot) {
  const marks = [];
  if (snapshot.picked) marks.push(make("span", "hp-mark-pill hp-done", "picked"));
  if (snapshot.best) marks.push(make("span", "hp-mark-pill hp-good", "best so far"));
  return marks;
}
function loraLink(snapshot, text) {
  const link = make("a", "hp-button hp-quiet", text);
  link.href = snapshot.lora.url;
  link.download = snapshot.lora.name;
  link.setAttribute("aria-label", `Download ${snapshot.lora.name}`);
  return link;
}
function rowsOf(found) {
  return found.prompts
    .map((prompt) => {
      const items = [];
      for (const snapshot of found.snapshots) {
        const sample = snapshot.samples.find((one) => one.number === prompt.number);
        if (sample) items.push({ url: sample.url, at: snapshot.at, key: keyOf(snapshot), seed: sample.seed, snapshot });
      }
      return { ...prompt, items };
    })
    .filter((row) => row.items.length);
}
async function ask(name, more = {}) {
  return reply(server[name]({ run: current().run, ...more }));
}
function choice(label, testid) {
  const box = make("label", "hp-ev-choice");
  const select = make("select");
  select.dataset.testid = testid;
  box.append(make("span", "", label), select);
  return { box, select };
}
// Sets the options of a select; keeps what is chosen where it still exists.
function setOptions(select, options, otherwise) {
  const shown = [...select.options].map((one) => `${one.value}\n${one.text}`).join("\0");
  const next = options.map(([value, text]) => `${value}\n${text}`).join("\0");
  if (shown === next) return;
  const before = select.value;
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  const known = options.some(([value]) => value === before);
  select.value = known ? before : (otherwise ?? options[0]?.[0] ?? "");
}

// The dialog -------------------------------------------------------------------------------------------------------------
const dialog = make("dialog", "hp-lightbox");
dialog.setAttribute("aria-label", "Sample");
const picture = make("img");
const caption = live("p", "hp-lightbox-caption", "status");
const before = button("‹", "hp-lightbox-move", () => move(0, -1));
before.setAttribute("aria-label", "Earlier sample");
const after = button("›", "hp-lightbox-move", () => move(0, 1));
after.setAttribute("aria-label", "Later sample");
const close = button("×", "hp-lightbox-close", () => dialog.close());
close.setAttribute("aria-label", "Close");
dialog.append(close, before, picture, after, caption);

function show(row, item) {
  place = [row, item];
  const { prompt, items } = rows[row];
  picture.src = items[item].url;
  picture.alt = `Sample, ${items[item].at}: ${prompt}`;
  caption.textContent = `${items[item].at} · ${prompt}`;
  before.disabled = item === 0;
  after.disabled = item === items.length - 1;
  if (!dialog.open) dialog.showModal();
}
// Left and right: the same prompt at another step. Up and down: another prompt at the same step, where it has one.
function move(byRow, byItem) {
  if (!place) return;
  const [row, item] = [place[0] + byRow, place[1] + byItem];
  const target = rows[row];
  if (!target || item < 0) return;
  const { key } = rows[place[0]].items[place[1]];
  const same = byRow ? target.items.findIndex((one) => one.key === key) : item;
  const index = same >= 0 ? same : Math.min(item, target.items.length - 1);
  if (target.items[index]) show(row, index);
}
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
dialog.addEventListener("keydown", (event) => {
  if (!MOVES[event.key]) return;
  event.preventDefault();
  move(...MOVES[event.key]);
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});
let opener = null;
dialog.addEventListener("close", () => {
  const last = place && tileOf(place[0], place[1]);
  const target = opener && opener.isConnected && (opener.closest("#run-loras") || !last) ? opener : last;
  place = null;
  if (target) target.focus();
});
const opened = (event) => {
  if (!element.isConnected) return document.removeEventListener("click", opened);
  const from = event.target.closest("[data-sample]");
  if (!from) return;
  rows.forEach((row, index) => {
    const item = row.items.findIndex((one) => plain(one.url) === plain(from.dataset.sample));
    if (item >= 0) {
      opener = from;
      show(index, item);
    }
  });
};
document.addEventListener("click", opened);
