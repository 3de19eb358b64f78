// The grid: a row for each prompt, a column for each step that has samples. Columns are added without drawing the others again.
let columns = []; // keys of the drawn columns
let prompts = []; // numbers of the drawn rows
const cells = new Map(); // "row column" -> button
const grid = region("hp-ev-grid", "Samples by prompt and step");
const gridTable = make("table");
const gridHead = make("tr");
const gridBody = make("tbody");
const gridTop = make("thead");
gridTop.append(gridHead);
gridTable.append(gridTop, gridBody);
grid.append(gridTable);

const tileOf = (row, item) => cells.get(`${rows[row]?.number} ${rows[row]?.items[item]?.key}`);
const corner = () => {
  const node = make("th", "hp-ev-corner", "Prompt");
  node.scope = "col";
  return node;
};
function headOf(snapshot) {
  const node = make("th");
  node.scope = "col";
  node.dataset.key = keyOf(snapshot);
  fillHead(node, snapshot);
  return node;
}
function fillHead(node, snapshot) {
  const text = JSON.stringify([snapshot.at, figures(snapshot), snapshot.picked, snapshot.best, snapshot.lora]);
  if (node.dataset.shown === text) return;
  node.dataset.shown = text;
  const title = make("strong", "", upper(snapshot.at));
  const list = figures(snapshot).map(([label, value]) => make("span", "", `${label} ${short(value)}`));
  node.replaceChildren(title, ...marksOf(snapshot), ...list, ...(snapshot.lora ? [loraLink(snapshot, "LoRA ↓")] : []));
}
function fillCell(cell, row, snapshot) {
  const sample = snapshot.samples.find((one) => one.number === row.number);
  const key = `${row.number} ${keyOf(snapshot)}`;
  let tile = cells.get(key);
  if (!sample) {
    if (tile) tile.remove();
    cells.delete(key);
    return;
  }
  if (tile && tile.dataset.sample === sample.url) return;
  if (!tile) {
    tile = make("button", "hp-sample");
    tile.type = "button";
    const image = make("img");
    image.loading = "lazy";
    image.decoding = "async";
    tile.append(image);
    cells.set(key, tile);
    cell.append(tile);
  }
  tile.dataset.sample = sample.url;
  tile.dataset.at = snapshot.at;
  tile.firstChild.src = base(thumbOf(data.run, sample.url));
  tile.firstChild.alt = `Sample, ${snapshot.at}: ${row.prompt}`;
}
function rowHead(row) {
  const node = make("th");
  node.scope = "row";
  node.append(make("h4", "", row.prompt));
  if (row.seed !== null) node.append(make("span", "", `Seed ${row.seed}`));
  return node;
}
// Images whose names say no step: a script of the user's own drew them.
const othersBox = make("div", "hp-ev-others");
function drawOthers() {
  const found = data.others || [];
  const shown = found.map((one) => one.url).join("\n");
  if (othersBox.dataset.shown === shown) return;
  othersBox.dataset.shown = shown;
  const strip = make("div", "hp-ev-others-strip");
  strip.append(
    ...found.map((one) => {
      const link = make("a");
      link.href = one.url;
      link.target = "_blank";
      const image = make("img");
      image.loading = "lazy";
      image.src = base(thumbOf(data.run, one.url));
      image.alt = one.name;
      link.append(image);
      return link;
    }),
  );
  othersBox.replaceChildren(...(found.length ? [make("h4", "", "Other images"), strip] : []));
}
function drawGrid(otherRun) {
  const drawn = data.snapshots.filter((one) => one.samples.length);
  const keys = drawn.map(keyOf);
  const numbers = rows.map((row) => row.number);
  const grows = !otherRun && columns.every((key, n) => keys[n] === key) && prompts.join() === numbers.join();
  const sameTexts = [...gridBody.querySelectorAll("h4")].every((node, n) => node.textContent === rows[n]?.prompt);
  const atEnd = !columns.length || otherRun || grid.scrollLeft + grid.clientWidth >= grid.scrollWidth - 8;
  if (!grows || !sameTexts) {
    cells.clear();
    columns = [];
    prompts = numbers;
    gridHead.replaceChildren(corner());
    gridBody.replaceChildren(
      ...rows.map((row) => {
        const node = make("tr", "hp-sample-row");
        node.dataset.testid = "sample-row";
        node.append(rowHead(row));
        return node;
      }),
    );
  }
  const lines = [...gridBody.children];
  drawn.forEach((snapshot, n) => {
    if (n < columns.length) fillHead(gridHead.children[n + 1], snapshot);
    else gridHead.append(headOf(snapshot));
    rows.forEach((row, r) => {
      const cell = lines[r].children[n + 1] || lines[r].appendChild(make("td"));
      fillCell(cell, row, snapshot);
    });
  });
  columns = keys;
  if (atEnd) grid.scrollLeft = grid.scrollWidth;
}
