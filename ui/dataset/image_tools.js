// Filters, search and selection of images. Part of the images' script.
//
// The selection is a set of ids that outlives pages and filters; the server names the images that are not on this page.
const FILTERS = {
  "": "All images",
  no_caption: "Without caption",
  warned: "With a warning",
  model: "Captions by a model",
  edited: "Cropped, masked or weighted",
};
const many = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
const query = () => state().query || { kind: "", text: "", folder: null };
const isFiltered = () => Boolean(query().kind || query().text || query().folder !== null);
function chooseFrom(label, options, act) {
  const select = make("select", "hp-select", { ariaLabel: label, onchange: () => act(select.value) });
  setOptions(select, Object.entries(options));
  return select;
}
/** An open list closes when its options are made again, so this is done only for others. */
function setOptions(select, entries) {
  if (select.dataset.options === JSON.stringify(entries)) return;
  select.dataset.options = JSON.stringify(entries);
  select.replaceChildren(...entries.map(([value, text]) => new Option(text, value)));
}
const filter = chooseFrom("Show", FILTERS, (value) => search({ kind: value }));
const subsetFilter = chooseFrom("Subset", { null: "All subsets" }, (value) => search({ folder: JSON.parse(value) }));
const searchText = make("input", "hp-text", { type: "search", ariaLabel: "Search captions", placeholder: "Search captions" });
let searching = null;
searchText.addEventListener("input", () => {
  clearTimeout(searching);
  searching = setTimeout(() => search({ text: searchText.value }), 250);
});
/** Show the images that fit. */
const search = (wanted) => go({ query: { ...query(), ...wanted }, page: 0 });
function drawFilters() {
  const { subsets = [] } = state();
  filter.value = query().kind;
  const named = ({ name, folder, images }) => `${name || folder || "No subset"} (${images.toLocaleString("en")})`;
  setOptions(subsetFilter, [["null", "All subsets"], ...subsets.map((one) => [JSON.stringify(one.folder), named(one)])]);
  subsetFilter.value = JSON.stringify(query().folder);
  subsetFilter.hidden = subsets.length < 2 && query().folder === null;
  if (document.activeElement !== searchText) searchText.value = query().text;
}

// Selection ---------------------------------------------------------------------------------------------------------
let anchor = ""; // the image that was selected last: with Shift, the images from there on are selected
async function pickImage(id, on, range) {
  let ids = [id];
  if (range && anchor && anchor !== id) {
    const answer = await look("ids", { between: [anchor, id] });
    if (answer) ids = answer.ids;
  }
  anchor = id;
  select(ids, on);
}
function select(ids, on = true) {
  for (const id of ids) on ? selected.add(id) : selected.delete(id);
  for (const [id, one] of cards) one.pick.checked = selected.has(id);
  drawSelection();
}
function selectOnly(ids) {
  selected.clear();
  select(ids);
}
/** Images that were removed, here or elsewhere, are no longer selected. */
async function dropRemoved() {
  const answer = await ask("ids", { query: {} });
  const there = new Set(answer?.ids ?? selected);
  select([...selected].filter((id) => !there.has(id)), false);
}
async function selectFound(invert) {
  const answer = await look("ids", {});
  if (!answer) return;
  if (invert) selectOnly(answer.ids.filter((id) => !selected.has(id)));
  else select(answer.ids);
}
const selectAll = button("Select all", "hp-quiet", () => selectFound(false));
const invertSelection = button("Invert selection", "hp-quiet", () => selectFound(true));
const chosenCount = live("span", "", "status");
const selection = make("span", "hp-selection", [
  chosenCount,
  button("Remove selected", "hp-quiet", async () => (await removeImages([...selected])) && focusCard(0)),
  button("Clear selection", "hp-quiet", () => {
    selectOnly([]);
    selectAll.focus();
  }),
]);
function drawSelection() {
  selection.hidden = !selected.size;
  chosenCount.textContent = `${selected.size.toLocaleString("en")} selected`;
  selectAll.textContent = `Select all ${state().found.toLocaleString("en")}`;
  // The fold of edits counts again what they change.
  const { draft, done, total } = state();
  const now = JSON.stringify([draft, done, total, [...selected]]);
  if (now !== counted) trigger("changed");
  counted = now;
}
let counted = "";
