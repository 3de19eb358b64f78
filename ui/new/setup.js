// The fold "Templates and import" of step 1 (ui/new/importing.py). Texts from files are set with textContent.
const OUTCOMES = {
  field: "Taken over",
  flag: "Extra option",
  changed: "Changed",
  dropped: "Left out: can hang",
  unsupported: "Not taken over",
  same: "Set already",
  run: "Set by Hangproof",
};
const ORDER = ["dropped", "unsupported", "changed", "flag", "field", "same", "run"]; // what needs a look comes first
const QUIET = ["same", "run"];
let templates = [];

const labelled = (text, node) => {
  const label = make("label", "hp-setup-field");
  label.append(make("span", "", text), node);
  return label;
};
const fold = make("details", "hp-fold hp-setup");
const head = make("summary", "", "Templates and import");
head.append(make("span", "", "Settings that you saved, or those of FluxGym, kohya_ss, sd-scripts, musubi-tuner and ai-toolkit"));
const note = live("p", "hp-job-note", "alert");
const preview = make("section", "hp-setup-preview");
preview.setAttribute("aria-label", "What changes");
preview.tabIndex = -1;

// Templates ---------------------------------------------------------------------------------------------------------
const list = make("ul", "hp-setup-list");
const nameBox = make("input", "hp-text");
nameBox.maxLength = 80;
nameBox.placeholder = "My portraits";
const saveRow = make("form", "hp-setup-row");
const saveButton = make("button", "hp-button", "Save these settings");
saveButton.type = "submit";
saveRow.append(labelled("Name of a new template", nameBox), saveButton);
saveRow.addEventListener("submit", (event) => {
  event.preventDefault();
  save(nameBox.value);
});
const saved = make("section", "hp-setup-part");
saved.append(
  make("h3", "", "Templates"),
  make("p", "hp-hint", "A template holds all settings of this form except the name, the trigger word and the images."),
  list,
  saveRow,
);

// Import ------------------------------------------------------------------------------------------------------------
const box = make("textarea", "hp-text hp-setup-text");
box.rows = 5;
box.spellcheck = false;
box.placeholder = "accelerate launch flux_train_network.py --network_dim 16 …";
const files = make("input");
files.type = "file";
files.multiple = true;
files.dataset.testid = "import-files";
const readButton = button("Show what it sets", "", () => readText());
readButton.dataset.testid = "import-read";
const row = make("div", "hp-setup-row");
row.append(labelled("Or choose files (train.sh with its dataset.toml, .json, .toml, .yaml)", files), readButton);
const imported = make("section", "hp-setup-part");
imported.append(
  make("h3", "", "Import"),
  make("p", "hp-hint", "Nothing of a file is run, and nothing changes before you use it."),
  labelled("Paste a script, a command or a configuration", box),
  row,
);
fold.append(head, saved, imported, note, preview);
element.replaceChildren(fold);

// Server ------------------------------------------------------------------------------------------------------------
const say = (text, good) => {
  note.textContent = text;
  note.hidden = !text;
  note.classList.toggle("hp-good", !!good);
};
say("");
async function ask(what, data) {
  const id = window.hangproof?.draft?.();
  if (!id) return null;
  await hangproof.flush(); // the server compares with the fields as they are stored
  const got = await reply(server.setup({ draft: id, do: what, ...data }));
  if (got.ok) return got;
  say(got.error);
  return null;
}
async function refresh() {
  const got = await ask("list");
  if (got) draw(got.templates);
}
const keyed = (node, id) => {
  node.dataset.testid = id;
  return node;
};
function draw(found) {
  templates = found;
  list.replaceChildren(...found.map(rowOf));
}
function rowOf(one) {
  const item = make("li");
  const text = make("div");
  text.append(make("strong", "", one.name), make("span", "hp-hint", one.about + (one.own ? "" : " · built in")));
  const acts = make("div", "hp-setup-acts");
  const named = (label, kind, act) => {
    const node = button(label, kind, act);
    node.setAttribute("aria-label", `${label}: ${one.name}`);
    return node;
  };
  if (!one.damaged) acts.append(keyed(named("Use…", "", () => open(one)), `template-${one.key}`));
  if (one.own && !one.damaged) acts.append(named("Save over…", "hp-quiet", () => confirmSave(one)), named("Rename", "hp-quiet", () => rename(item, one)));
  if (one.own) acts.append(named("Delete", "hp-quiet", () => remove(one)));
  item.append(text, acts);
  return item;
}
async function save(name, replace) {
  say("");
  const got = await ask("save", { name, ...(replace === undefined ? {} : { replace }) });
  if (!got) return;
  nameBox.value = "";
  preview.replaceChildren();
  say(`Saved as “${got.name}”.`, true);
  refresh();
}
function confirmSave(one) {
  const yes = button("Save over it", "hp-primary", () => save(one.name, one.version));
  show(`Replace the settings of “${one.name}” by those of the form?`, [], yes);
}
function rename(item, one) {
  const input = make("input", "hp-text");
  input.value = one.name;
  input.maxLength = 80;
  input.setAttribute("aria-label", `New name of ${one.name}`);
  const form = make("form", "hp-setup-row");
  const ok = make("button", "hp-button", "Rename");
  ok.type = "submit";
  form.append(input, ok, button("Cancel", "hp-quiet", refresh));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    say("");
    if (await ask("rename", { key: one.key, name: input.value })) refresh();
  });
  item.replaceChildren(form);
  input.select();
}
async function remove(one) {
  say("");
  const got = await ask("delete", { key: one.key });
  if (!got) return;
  await refresh();
  say(`“${one.name}” is deleted. `, true);
  if (got.template.values) {
    const back = async () => {
      say("");
      if (await ask("restore", { template: got.template })) refresh();
    };
    note.append(button("Undo", "hp-quiet", back));
  }
}

// What changes ------------------------------------------------------------------------------------------------------
function show(title, parts, ...actions) {
  const acts = make("div", "hp-setup-row");
  acts.append(...actions, button("Cancel", "hp-quiet", () => preview.replaceChildren()));
  preview.replaceChildren(make("h3", "", title), ...parts, acts);
  preview.focus({ preventScroll: true });
  preview.scrollIntoView({ block: "nearest" });
}
function table(heads, rows) {
  const node = make("table");
  const top = make("tr");
  for (const text of heads) top.append(make("th", "", text));
  const body = make("tbody");
  for (const cells of rows) {
    const line = make("tr");
    for (const cell of cells) line.append(cell.nodeType ? cell : make("td", "", cell));
    body.append(line);
  }
  const holder = make("thead");
  holder.append(top);
  node.append(holder, body);
  const around = make("div", "hp-setup-table");
  around.tabIndex = 0;
  around.setAttribute("role", "group");
  around.append(node);
  return around;
}
const changed = (changes) =>
  changes.length
    ? [make("h4", "", "What changes in the form"), table(["Field", "Now", "Then"], changes.map((one) => [one.label, one.before || "–", one.after || "–"]))]
    : [make("p", "hp-hint", "The form has these settings already.")];
function useButton(values, changes) {
  const node = button("Use these settings", "hp-primary", () => use(values, changes));
  node.dataset.testid = "use-settings";
  return node;
}
async function open(one) {
  say("");
  const got = await ask("preview", { key: one.key });
  if (got) show(`Template “${one.name}”`, changed(got.changes), useButton(got.values, got.changes));
}
async function readText() {
  say("");
  const given = await Promise.all([...files.files].slice(0, 20).map(async (file) => ({ name: file.name, text: file.size > 1e6 ? "x".repeat(1e6 + 1) : await file.text() })));
  if (box.value.trim()) given.push({ name: "", text: box.value });
  const got = await ask("read", { files: given });
  if (!got) return preview.replaceChildren();
  const rows = [...got.rows].sort((a, b) => ORDER.indexOf(a.outcome) - ORDER.indexOf(b.outcome));
  const cells = (one) => {
    const mark = make("td");
    mark.append(make("span", `hp-outcome hp-outcome-${one.outcome}`, OUTCOMES[one.outcome] || one.outcome));
    const name = make("td");
    name.append(make("code", "", one.name));
    return [name, one.value, mark, one.text];
  };
  const heads = ["Setting", "Value", "", "Where it goes, or why not"];
  const loud = rows.filter((one) => !QUIET.includes(one.outcome));
  const quiet = rows.filter((one) => QUIET.includes(one.outcome));
  const parts = [...got.notes.map((text) => make("p", "hp-note", text)), ...changed(got.changes)];
  parts.push(make("h4", "", "What becomes of each setting"), table(heads, loud.map(cells)));
  if (quiet.length || got.added.length) {
    const more = make("details");
    more.append(make("summary", "", `${quiet.length} more that Hangproof sets the same way`));
    if (quiet.length) more.append(table(heads, quiet.map(cells)));
    if (got.added.length) more.append(make("p", "hp-hint", `Hangproof adds: ${got.added.join(" ")}`));
    parts.push(more);
  }
  for (const one of got.folders) parts.push(folderRow(one));
  show(`${got.kind[0].toUpperCase()}${got.kind.slice(1)}`, parts, useButton(got.values, got.changes));
}
function folderRow(one) {
  const line = make("div", "hp-setup-row");
  const text = one.problem || `${one.images} image${one.images === 1 ? "" : "s"} with their captions`;
  line.append(make("code", "", one.path), make("span", "hp-hint", text));
  if (!one.problem) {
    const take = button("Add these images", "", () => {
      take.disabled = true;
      hangproof.importFolder(one.path);
      say("The images are being added in step 2.", true);
    });
    take.dataset.testid = "import-images";
    line.append(take);
  }
  return line;
}

// Use ---------------------------------------------------------------------------------------------------------------
function use(values, changes) {
  const keys = new Set(changes.map((one) => one.key));
  hangproof.use(Object.fromEntries(Object.entries(values).filter(([key]) => keys.has(key))));
  preview.replaceChildren();
  box.value = files.value = "";
  say(`${keys.size} field${keys.size === 1 ? " was" : "s were"} changed.`, true);
}
fold.addEventListener("toggle", () => fold.open && refresh());
