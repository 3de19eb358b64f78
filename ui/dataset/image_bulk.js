// The panels of step 2: edit captions in bulk, subsets, tags. One is open at a time. Part of the images' script.
const EDITS = {
  replace: "Find and replace",
  prefix: "Add text before",
  suffix: "Add text after",
  remove_tags: "Remove tags",
  shuffle: "Shuffle tags",
};
const panels = make("div", "hp-panels");
const panelOf = {}; // name → { panel, opener, onOpen }
function panelWith(name, label, onOpen) {
  const panel = make("section", "hp-bulk-panel");
  panel.hidden = true;
  panel.setAttribute("aria-label", label);
  const opener = button(label, "hp-quiet", () => openPanel(panel.hidden ? name : ""));
  opener.setAttribute("aria-expanded", "false");
  panelOf[name] = { panel, opener, onOpen };
  panels.append(panel);
  return [panel, opener];
}
function openPanel(name) {
  for (const [own, { panel, opener }] of Object.entries(panelOf)) {
    panel.hidden = own !== name;
    opener.setAttribute("aria-expanded", String(own === name));
  }
  panelOf[name]?.onOpen();
}
const isOpen = (name) => !panelOf[name].panel.hidden;
function labelled(text, input, cls = "") {
  const label = make("label", "hp-bulk-label " + cls);
  input.setAttribute("aria-label", text); // the text of the label includes a list's choices
  label.append(make("span", "", text), input);
  return label;
}
function checkField(text) {
  const label = make("label", "hp-bulk-check");
  const input = make("input");
  input.type = "checkbox";
  label.append(input, make("span", "", text));
  return [label, input];
}

// Edits of captions -------------------------------------------------------------------------------------------------
const [bulk, openBulk] = panelWith("bulk", "Edit captions in bulk", () => {
  scope.value = selected.size ? "selected" : "all";
  drawEdit();
  (FIELDS[kind.value][0] || kind).focus();
});
const kind = chooseFrom("Edit", EDITS, () => drawEdit());
const scope = chooseFrom("Images", { all: "All images" }, () => previewSoon());
const findText = textInput("Find in captions", "");
const withText = textInput("Replace with", "");
const [patternBox, pattern] = checkField("Regular expression");
const [anyCaseBox, anyCase] = checkField("Ignore case");
const addText = textInput("Text", "");
const tagText = textInput("Tags", "solo, simple background");
const keepTags = textInput("Tags to keep in place at the start", "");
keepTags.type = "number";
keepTags.min = 0;
keepTags.max = 1000;
keepTags.value = "1";
const FIELDS = {
  replace: [findText, withText],
  prefix: [addText],
  suffix: [addText],
  remove_tags: [tagText],
  shuffle: [keepTags],
};
const rows = {
  replace: [labelled("Find in captions", findText), labelled("Replace with", withText), patternBox, anyCaseBox],
  add: [labelled("Text", addText)],
  remove_tags: [labelled("Tags, separated by commas", tagText)],
  shuffle: [labelled("Tags to keep in place at the start", keepTags)],
};
let seed = 1;
const effect = live("div", "hp-effect", "status");
const apply = button("Change captions", "", applyEdit);
const editRow = make("div", "hp-bulk-row");
const first = make("div", "hp-bulk-row");
first.append(labelled("Edit", kind), labelled("Images", scope));
bulk.append(first, editRow, effect, apply);
for (const input of [findText, withText, addText, tagText, keepTags, pattern, anyCase]) {
  input.addEventListener("input", () => previewSoon());
  input.addEventListener("keydown", (event) => event.key === "Enter" && input.type !== "checkbox" && previewNow());
}
function drawEdit() {
  editRow.replaceChildren(...(rows[kind.value] || rows.add));
  addText.placeholder = kind.value === "prefix" ? "photo of " : ", film grain";
  previewSoon();
}
function drawScope() {
  const number = selected.size;
  setOptions(scope, [["all", "All images"], ...(number ? [["selected", `Selected images (${number.toLocaleString("en")})`]] : [])]);
  if (!number && scope.value !== "all") scope.value = "all";
  moveButton.disabled = !number;
  moveButton.textContent = number ? `Move ${many(number, "selected image")}` : "Select images to move";
}
function currentEdit() {
  const edit = {
    replace: { find: findText.value, with: withText.value, pattern: pattern.checked, any_case: anyCase.checked },
    prefix: { text: addText.value },
    suffix: { text: addText.value },
    remove_tags: { tags: tagText.value },
    shuffle: { keep: Math.round(Number(keepTags.value)), seed },
  }[kind.value];
  return { ids: scope.value === "selected" ? [...selected] : null, edit: { kind: kind.value, ...edit } };
}
let previewing = null;
let previewed = 0;
function previewSoon() {
  clearTimeout(previewing);
  previewing = setTimeout(previewNow, 300);
}
/** Show how many captions the edit changes, with examples. A later preview makes an earlier one void. */
async function previewNow() {
  clearTimeout(previewing);
  if (!isOpen("bulk")) return;
  const mine = ++previewed;
  const wanted = (FIELDS[kind.value] || [])[0];
  if (wanted !== keepTags && !wanted.value) return drawEffect("", [], "Change captions", true);
  if (!(await flush())) return;
  const answer = await ask("image_action", { action: "preview", ...currentEdit() });
  if (mine !== previewed) return;
  if (!answer) return hangproof.lost();
  if (answer.ok !== true) return drawEffect(answer.error, [], "Change captions", true);
  const text = `${answer.changed.toLocaleString("en")} of ${many(answer.of, "caption")} ${answer.changed === 1 ? "changes" : "change"}.`;
  drawEffect(text, answer.examples, answer.changed ? `Change ${many(answer.changed, "caption")}` : "Change captions", !answer.changed);
}
function drawEffect(text, examples, label, off) {
  const list = make("ul", "hp-examples");
  for (const { file, before, after } of examples) {
    const row = make("li");
    row.append(make("b", "", file), make("del", "", before || "(empty)"), make("ins", "", after || "(empty)"));
    list.append(row);
  }
  effect.replaceChildren(make("p", "", text), ...(examples.length ? [list] : []));
  apply.textContent = label;
  apply.disabled = off;
}
async function applyEdit() {
  if (!(await flush())) return;
  const answer = await changeMany("edit", currentEdit());
  if (!answer) return;
  seed += 1;
  showNotes([`${many(answer.changed, "caption")} changed.`], "good", true);
  previewNow();
}

// Subsets -----------------------------------------------------------------------------------------------------------
const [subsetPanel, openSubsets] = panelWith("subsets", "Subsets", () => {
  drawSubsets();
  moveName.focus();
});
const moveName = textInput("Move to the subset", "cat");
const moveRepeats = textInput("Repeats", "as in step 1");
const subsetList = make("datalist");
subsetList.id = "hp-subsets";
moveName.setAttribute("list", subsetList.id);
const repeatsField = (input) => {
  input.type = "number";
  input.min = 1;
  input.max = 9999;
  return input;
};
const repeatsIn = (input) => (input.value.trim() ? Number(input.value) : null);
const moveButton = button("Select images to move", "", async () => {
  const data = { ids: [...selected], name: moveName.value, repeats: repeatsIn(moveRepeats) };
  const answer = (await flush()) && (await changeMany("move", data));
  if (answer) showNotes([`${many(answer.changed, "image")} moved.`], "good", true);
});
const moveRow = make("div", "hp-bulk-row");
moveRow.append(
  labelled("Move to the subset", moveName),
  labelled("Repeats", repeatsField(moveRepeats), "hp-short"),
  moveButton,
  subsetList
);
const subsetTable = make("div", "hp-subsets");
subsetPanel.append(
  make("p", "hp-bulk-hint", "A subset is a folder of the data set. Its images are shown as often in each epoch as its repeats say."),
  subsetTable,
  moveRow
);
function drawSubsets() {
  const { subsets = [] } = state();
  subsetList.replaceChildren(...subsets.filter((one) => one.name).map((one) => new Option(one.name)));
  if (!isOpen("subsets") || subsetTable.contains(document.activeElement)) return;
  subsetTable.replaceChildren(...subsets.map(subsetRow));
}
function subsetRow(one) {
  const row = make("div", "hp-bulk-row");
  const title = subsetName(one);
  const name = textInput(`Name of the subset ${title}`, "No subset");
  const repeats = repeatsField(textInput(`Repeats of the subset ${title}`, "as in step 1"));
  name.value = one.name;
  repeats.value = one.repeats ?? "";
  repeats.classList.add("hp-short");
  const save = button("Save", "hp-quiet", async () => {
    save.blur();
    if (!(await flush())) return;
    const data = { folder: one.folder, name: name.value, repeats: repeatsIn(repeats) };
    if (await changeMany("subset", data)) showNotes([`The subset ${name.value || "without a name"} is saved.`], "good", true);
  });
  save.setAttribute("aria-label", `Save the subset ${title}`);
  for (const input of [name, repeats]) input.addEventListener("keydown", (event) => event.key === "Enter" && save.click());
  const show = button("Show its images", "hp-quiet", () => go({ query: { ...query(), folder: one.folder }, page: 0 }));
  show.setAttribute("aria-label", `Show the images of ${title}`);
  row.append(name, make("span", "", "×"), repeats, save, make("span", "hp-bulk-note", many(one.images, "image")), show);
  return row;
}

// Tags --------------------------------------------------------------------------------------------------------------
const [tagPanel, openTags] = panelWith("tags", "Tags", () => {
  drawTags();
  tagSearch.focus();
});
const tagSearch = textInput("Find a tag");
tagSearch.type = "search";
tagSearch.addEventListener("input", () => showTags());
const tagInfo = make("span", "hp-bulk-note");
const tagList = make("ul", "hp-tag-list");
const tagHead = make("div", "hp-bulk-row");
tagHead.append(tagSearch, tagInfo);
tagPanel.append(tagHead, tagList);
let counted = { tags: [], total: 0 };
async function drawTags() {
  const answer = await action("tags", {});
  if (!answer) return;
  counted = answer;
  showTags();
}
function showTags() {
  const wanted = tagSearch.value.trim().toLowerCase();
  const found = counted.tags.filter(([tag]) => tag.toLowerCase().includes(wanted));
  const more = counted.total > counted.tags.length ? `; the ${counted.tags.length} most frequent are listed` : "";
  tagInfo.textContent = `${many(counted.total, "tag")}${more}`;
  tagList.replaceChildren(...found.map(tagRow));
}
function tagRow([tag, number]) {
  const row = make("li", "");
  const show = button(`${tag} · ${number.toLocaleString("en")}`, "hp-quiet", () =>
    go({ query: { ...query(), how: "tag", text: tag }, page: 0 })
  );
  show.title = `Show the images with the tag ${tag}`;
  const remove = iconButton("×", `Remove the tag ${tag}`, "", () => {
    kind.value = "remove_tags";
    tagText.value = tag;
    openPanel("bulk");
  });
  row.append(show, remove);
  return row;
}
let tagsOf = "";
/** Bring the open panel up to date with the images; called after every change. */
function drawPanels() {
  const { draft, history, total, found } = state();
  drawSubsets();
  const now = JSON.stringify([draft, history, total, found, query()]);
  if (now === tagsOf) return;
  tagsOf = now;
  if (isOpen("tags")) drawTags();
  if (isOpen("bulk")) previewSoon();
}
