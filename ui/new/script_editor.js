// The tools below the script (ui/new/script_editor.py): edit, findings, what to do after the settings changed, export as ZIP.
//
// The text is that of Gradio's code editor. What is typed is kept in the browser until the server has stored exactly it
// (unsaved.js), so a dead server or a reload loses nothing. Texts are set with textContent.
const LEVELS = { error: "Start refuses this", fail: "Fails", hang: "Can hang", loss: "Can lose work", waste: "Wasteful" };
const TYPE_MS = 500;
const EXPORT_MS = 1000;
let version = null; // of the stored script that this tab shows; null while it shows the generated one
let text = ""; // what this tab shows of an edited script
let timer = null;
let sending = null;
let conflict = null;

const box = make("div", "hp-script-tools");
const row = make("div", "hp-setup-row");
const edit = button("Edit the script", "", () => begin());
edit.dataset.testid = "edit-script";
const back = button("Use the generated script", "hp-quiet", () => discard());
back.dataset.testid = "discard-script";
const zip = button("Export (ZIP)", "", () => exportZip("export"));
zip.dataset.testid = "export-zip";
row.append(edit, back, zip);
const state = live("p", "hp-hint", "status");
state.dataset.testid = "script-state";
const note = live("p", "hp-job-note", "alert");
const choice = make("section", "hp-script-stale");
choice.setAttribute("aria-label", "Choose a script");
const list = make("ul", "hp-script-findings");
list.dataset.testid = "script-findings";
const exported = live("p", "hp-hint", "status");
exported.dataset.testid = "export-state";
box.append(row, state, note, choice, list, exported);
element.replaceChildren(box);

const say = (problem) => {
  note.textContent = problem;
  note.hidden = !problem;
};
const isEdited = () => version !== null;
function draw() {
  const ready = isEdited() || (props.value && props.value.ready);
  edit.hidden = isEdited();
  edit.disabled = zip.disabled = !ready;
  back.hidden = !isEdited() || !choice.hidden; // the choice has this button, too
  if (!isEdited()) state.textContent = "";
}

// The editor --------------------------------------------------------------------------------------------------------
/** Show a text in the code editor. */
function show(value, interactive) {
  text = value;
  props.value = { ...props.value, show: { value, interactive } };
  trigger("show");
}
const shown = (value) => (value && value.show ? { __type__: "update", ...value.show } : undefined);
const typed = (value) => {
  if (!isEdited() || typeof value !== "string" || value === text) return;
  text = value;
  remember();
  clearTimeout(timer);
  timer = setTimeout(send, TYPE_MS);
};
const remember = () => hangproof.keep("script", "text", { text, version });
async function ask(what, data) {
  const id = hangproof.draft();
  const got = await server.script_tools({ draft: id, do: what, ...data }).catch(() => null);
  if (!got) {
    hangproof.lost();
    return null;
  }
  say(got.ok ? "" : got.error);
  return got.ok ? got : null;
}
/** Store what was typed. Resolves to whether the server has everything. */
async function send() {
  clearTimeout(timer);
  while (sending) await sending;
  const kept = hangproof.unsavedText("script", "text");
  if (!kept || conflict) return !kept;
  sending = ask("save", { text: kept.text, version: kept.version || "" });
  const got = await sending;
  sending = null;
  if (!got) return false;
  if (got.conflict) {
    conflict = got;
    drawChoice();
    return false;
  }
  version = got.version;
  hangproof.confirmed("script", "text", kept);
  const newer = hangproof.unsavedText("script", "text");
  if (newer) {
    remember(); // typed since: it is a change of the version that was just stored
    timer = setTimeout(send, TYPE_MS);
  }
  after(got);
  hangproof.tellOthers();
  return !newer;
}
const flush = async () => {
  for (let n = 0; n < 3; n++) if (await send()) return true;
  return false;
};
function after(got) {
  if (got.findings) drawFindings(got.findings);
  if (got.changed) stale = got.changed;
  state.textContent = "You edited this script. Start runs it exactly as it is here.";
  drawChoice();
  draw();
}
/** Open the accordion with the editor. */
function openFold() {
  const head = document.querySelector("#script-fold > button");
  if (head && !document.querySelector("#script")?.checkVisibility()) head.click();
}
async function begin() {
  const got = await ask("start");
  if (!got) return;
  version = got.version;
  show(got.script, true);
  after(got);
  openFold();
  for (let n = 0; n < 40 && !document.querySelector("#script .cm-content"); n++) await new Promise((done) => setTimeout(done, 50));
  document.querySelector("#script .cm-content")?.focus();
}
async function discard() {
  await send();
  const got = await ask("discard");
  if (!got) return;
  hangproof.forget("script", "text");
  version = conflict = null;
  stale = [];
  show(got.script, false);
  drawFindings([]);
  drawChoice();
  draw();
  if (got.before) {
    state.textContent = "The generated script is used. ";
    const undo = button("Undo", "hp-quiet", () => put(got.before, ""));
    undo.dataset.testid = "undo-discard";
    state.append(undo);
  }
  hangproof.tellOthers();
}
/** Show a text as if it were typed, as a change of `of`. */
function put(value, of) {
  version = of;
  conflict = null;
  show(value, true);
  remember();
  draw();
  return send();
}

// Findings ----------------------------------------------------------------------------------------------------------
function drawFindings(found) {
  list.replaceChildren(
    ...found.map((one) => {
      const item = make("li", `hp-level-${one.level === "error" || one.level === "fail" ? "error" : "warn"}`);
      item.append(make("b", "", `Line ${one.line} · ${LEVELS[one.level] || one.level}`), make("span", "", `${one.text.replace(/\.$/, "")}. ${one.advice}`));
      if (one.fix) {
        const fix = button("Fix", "", async () => {
          const got = await ask("fix", { text, fix: one.fix });
          if (got) put(got.script, version);
        });
        fix.setAttribute("aria-label", `Fix line ${one.line}: ${one.text}`);
        item.append(fix);
      }
      return item;
    }),
  );
}

// Two scripts: which one --------------------------------------------------------------------------------------------
let stale = [];
function drawChoice() {
  choice.hidden = !conflict && !stale.length;
  draw();
  if (choice.hidden) return choice.replaceChildren();
  const acts = make("div", "hp-setup-row");
  const lines = conflict ? conflict.changed : stale;
  if (conflict) {
    const theirs = conflict.conflict;
    acts.append(
      button("Keep mine", "", () => put(text, theirs.version)),
      button("Take the other", "", () => {
        hangproof.forget("script", "text");
        version = theirs.version;
        conflict = null;
        show(theirs.script, true);
        choice.replaceChildren();
        choice.hidden = true;
      }),
    );
  } else {
    const use = (what) => async () => {
      await send();
      const got = await ask(what);
      if (!got) return;
      version = got.version;
      stale = [];
      show(got.script, true);
      after(got);
      if (got.left && got.left.length) say(`Not applied, because you changed these places: ${got.left.join("; ")}.`);
    };
    acts.append(
      button("Keep mine", "", use("keep")),
      button("Apply the changes to mine", "", use("merge")),
      button("Use the generated script", "hp-quiet", () => discard()),
    );
  }
  const title = conflict ? "Another window saved a different script" : "The settings changed after you edited the script";
  const about = conflict ? "What yours changes in it:" : "What changed in the generated script:";
  const diff = make("div", "hp-script-diff");
  diff.tabIndex = 0;
  diff.setAttribute("role", "group");
  for (const line of lines) diff.append(make("div", line[0] === "+" ? "hp-plus" : line[0] === "-" ? "hp-minus" : "", line));
  choice.replaceChildren(make("h4", "", title), make("p", "hp-hint", about), diff, acts);
}

// Export ------------------------------------------------------------------------------------------------------------
let polling = null;
async function exportZip(what) {
  clearTimeout(polling);
  if (what === "export") {
    await hangproof.flush();
    if (!(await flush())) return;
  }
  const got = await ask(what);
  if (!got) return;
  zip.disabled = got.state === "running";
  exported.replaceChildren();
  if (got.state === "running") {
    exported.textContent = `Packing the ZIP for ${got.seconds} s…`;
    polling = setTimeout(() => exportZip("export_status"), EXPORT_MS);
  } else if (got.state === "done") {
    const link = make("a", "hp-link", `Download ${got.name}`);
    link.href = got.url;
    link.download = got.name;
    link.dataset.testid = "export-link";
    exported.append(link, ` (${got.size}). Unpack it and run train.sh or train.bat.`);
  } else if (got.error) exported.textContent = `Not exported: ${got.error}`;
  else if (got.state !== "none") exported.textContent = "The export ended without a result. Try again.";
}

// What the server shows after each change of the form ---------------------------------------------------------------
let opened = false;
function arrive() {
  const now = props.value;
  if (!now || now.show || !window.hangproof || !hangproof.draft()) return;
  if (!opened) {
    opened = true;
    const kept = hangproof.unsavedText("script", "text"); // typed before a reload that the server did not store
    if (kept) {
      put(kept.text, kept.version);
      return;
    }
    exportZip("export_status");
  }
  if (now.edited) {
    stale = now.changed;
    if (!hangproof.unsavedText("script", "text") && (version !== now.version || text !== now.script)) {
      const first = version !== now.version;
      version = now.version;
      show(now.script, true);
      if (first) ask("start").then((got) => got && after(got));
    }
    state.textContent = "You edited this script. Start runs it exactly as it is here.";
  } else if (isEdited() && !hangproof.unsavedText("script", "text")) {
    version = null; // nothing was changed yet, or another window uses the generated script
    stale = [];
    drawFindings([]);
  }
  drawChoice();
  draw();
}
watch("value", arrive);
(async () => {
  while (!window.hangproof) await new Promise((done) => setTimeout(done, 10)); // until the images' component is on the page
  Object.assign(hangproof, { script: shown, typed, flushScript: flush });
  hangproof.onBack(send);
  arrive();
})();
say("");
draw();
drawChoice();
