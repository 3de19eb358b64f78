// Imports that the server does by itself: a folder that it has, and large ZIPs. Part of the images' script.
//
// They are a process on the server, so this part only asks how far it is: a page that is opened later shows the same.
const POLL_MS = 1000;
const PHASES = { starting: "Starting", reading: "Reading the folder", unpacking: "Unpacking", adding: "Adding images" };
const importForm = make("form", "hp-bulk-row hp-import", { hidden: true });
const ownPath = { placeholder: "/home/me/photos", autocomplete: "off", spellcheck: false };
const importPath = make("input", "hp-text", ownPath);
const importStart = make("button", "hp-button", { textContent: "Import", type: "submit" });
importForm.append(
  labelled("Folder on the server", importPath),
  importStart,
  make("p", "hp-bulk-hint", "Images in the folder and its subfolders are added with their captions. The folder is only read.")
);
importForm.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!importPath.value.trim()) return importPath.focus();
  importStart.disabled = true;
  const answer = await change("import_folder", { path: importPath.value });
  importStart.disabled = false;
  if (!answer) return;
  importPath.value = "";
  toggleImport(false);
  drawImports(answer.imports);
});
/** Import a folder that another part of the page names (ui/new/importing.py). */
hangproof.importFolder = (path) => {
  importPath.value = path;
  importForm.requestSubmit();
};
const openImport = button("Name a folder on the server", "hp-quiet", () => toggleImport(importForm.hidden));
openImport.setAttribute("aria-expanded", "false");
function toggleImport(open) {
  importForm.hidden = !open;
  openImport.setAttribute("aria-expanded", String(open));
  (open ? importPath : openImport).focus();
}
const importBox = make("div", "hp-importing", { hidden: true });
importBox.dataset.testid = "importing";
const importText = live("p", "", "status");
const importBar = make("progress", "", { ariaLabel: "Import" });
const importCancel = button("Cancel the import", "hp-quiet", async () => {
  importCancel.disabled = true;
  const answer = await change("cancel_imports", {});
  importCancel.disabled = false;
  if (answer) drawImports(answer.imports);
});
importBox.append(importText, importBar, importCancel);
let polling = null;
let addedBefore = "";
function followImports() {
  if (state().importing) polling ??= setTimeout(pollImports, POLL_MS);
}
async function pollImports() {
  const answer = await ask("imports", {});
  if (answer?.ok === true) await drawImports(answer.imports);
  polling = null;
  followImports();
}
async function drawImports({ waiting: left, now, finished }) {
  importBox.hidden = !left;
  if (now) {
    const { name, phase, done, total, added } = now;
    const far = phase === "adding" ? ` ${done.toLocaleString("en")} of ${many(total, "file")}` : total ? ` ${many(total, "file")}` : "";
    const queued = left > 1 ? ` · ${many(left - 1, "import")} after it` : "";
    importText.textContent = `${PHASES[phase] || "Importing"}:${far} · ${name}${queued}`;
    if (phase === "adding" && total) importBar.value = done / total;
    else importBar.removeAttribute("value");
    const seen = `${name} ${added}`;
    if (seen !== addedBefore) await reload(); // the new images
    addedBefore = seen;
  }
  if (finished.length) {
    showNotes(finished.flatMap(resultOf), finished.some((one) => one.state === "failed" || one.messages.length) ? "warn" : "good");
    await look("dismiss_imports", { ids: finished.map((one) => one.id) });
    await reload();
    hangproof.tellOthers();
  }
}
function resultOf({ name, state: how, added, messages }) {
  const images = `${many(added, "image")} added`;
  const first = { done: `${images} from ${name}.`, cancelled: `Import of ${name} cancelled; ${images}. Undo removes them.` };
  return [first[how] || `${name}: not imported completely; ${images}.`, ...messages];
}
