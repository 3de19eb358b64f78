// All samples of a run, one scrollable row for each prompt, and a dialog that shows one of them large.
//
// The value is {run, rows: [{prompt, items: [{url, at}]}]}. New images are appended, so that the others neither flicker nor
// move. Anything on the page with `data-sample=URL` opens the dialog: the LoRA list has such buttons too.
let value = { run: "", rows: [] };
let strips = [];
let place = null; // [row, item] in the dialog

const section = make("section", "hp-section");
const title = make("h3", "", "Samples");
const note = make("span", "", "in the order of their steps");
title.append(note);
const list = make("div", "hp-sample-rows");
section.append(title, list);

const dialog = make("dialog", "hp-lightbox");
dialog.setAttribute("aria-label", "Sample");
const picture = make("img");
const caption = make("p", "hp-lightbox-caption");
caption.setAttribute("role", "status");
const before = button("‹", "hp-lightbox-move", () => move(0, -1));
before.setAttribute("aria-label", "Earlier sample");
const after = button("›", "hp-lightbox-move", () => move(0, 1));
after.setAttribute("aria-label", "Later sample");
const close = button("×", "hp-lightbox-close", () => dialog.close());
close.setAttribute("aria-label", "Close");
dialog.append(close, before, picture, after, caption);

function tile(item, prompt) {
  const node = make("button", "hp-sample");
  node.type = "button";
  node.dataset.sample = item.url;
  const image = make("img");
  image.loading = "lazy";
  image.src = item.url;
  image.alt = `Sample, ${item.at}: ${prompt}`;
  node.append(image, make("span", "", item.at));
  return node;
}
function strip(row) {
  const node = make("div", "hp-sample-row");
  node.dataset.testid = "sample-row";
  const heading = make("h4", "", row.prompt);
  const tiles = make("div", "hp-sample-strip");
  node.append(heading, tiles);
  return { node, heading, tiles };
}
function draw() {
  const next = props.value || { run: "", rows: [] };
  if (next.run !== value.run || next.rows.length < strips.length) {
    strips = [];
    list.replaceChildren();
  }
  value = next;
  value.rows.forEach((row, index) => {
    if (!strips[index]) list.append((strips[index] = strip(row)).node);
    const { heading, tiles } = strips[index];
    if (heading.textContent !== row.prompt) heading.textContent = row.prompt;
    const shown = [...tiles.children].map((one) => one.dataset.sample);
    const atEnd = tiles.scrollLeft + tiles.clientWidth >= tiles.scrollWidth - 8;
    if (shown.some((url, n) => row.items[n]?.url !== url)) tiles.replaceChildren();
    tiles.append(...row.items.slice(tiles.children.length).map((item) => tile(item, row.prompt)));
    if (atEnd) tiles.scrollLeft = tiles.scrollWidth;
  });
  section.hidden = !value.rows.length;
}

function show(row, item) {
  place = [row, item];
  const { prompt, items } = value.rows[row];
  picture.src = items[item].url;
  picture.alt = `Sample, ${items[item].at}: ${prompt}`;
  caption.textContent = `${items[item].at} · ${prompt}`;
  before.disabled = item === 0;
  after.disabled = item === items.length - 1;
  if (!dialog.open) dialog.showModal();
}
// Left and right: the same prompt at another step. Up and down: another prompt at the same step, where it has one.
function move(rows, items) {
  if (!place) return;
  const [row, item] = [place[0] + rows, place[1] + items];
  const target = value.rows[row];
  if (!target || item < 0) return;
  const at = value.rows[place[0]].items[place[1]].at;
  const same = rows ? target.items.findIndex((one) => one.at === at) : item;
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
  const last = place && strips[place[0]] && strips[place[0]].tiles.children[place[1]];
  const target = opener && opener.isConnected && (opener.closest("#run-loras") || !last) ? opener : last;
  place = null;
  if (target) target.focus();
});
const opened = (event) => {
  if (!element.isConnected) return document.removeEventListener("click", opened);
  const from = event.target.closest("[data-sample]");
  if (!from) return;
  value.rows.forEach((row, index) => {
    const item = row.items.findIndex((one) => one.url === from.dataset.sample);
    if (item >= 0) {
      opener = from;
      show(index, item);
    }
  });
};
document.addEventListener("click", opened);

element.replaceChildren(section, dialog);
watch("value", draw);
draw();
