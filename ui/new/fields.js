// The form's fields: each is kept in the browser when it changes, sent, and forgotten once the server has stored it.
// The page then shows what is stored, except what was typed meanwhile. Part of the images' script.
//
// The fields are read from the page itself, because Gradio stops all events while the server is away.
const SEND_MS = 100;
const CHOSEN = ["model", "tier", "backend"];
let names = [];
const base = {}; // field → the value that is stored, as this page shows it
const known = {}; // field → the value that the server answered last
let toShow = {};
let said = []; // what the server's last answer says of the settings

/** Whether a field shows both values alike: some numbers are shown as texts. */
const alike = (a, b) => hangproof.same(a, b) || String(a ?? "") === String(b ?? "");
/** At the start: the values to show in place of those that the server has: those that this browser kept. */
hangproof.restore = (keys, id, marks, values) => {
  names = keys;
  markFields(marks || {});
  keys.forEach((key, n) => (base[key] = known[key] = values[n]));
  hangproof.setDraft(id);
  hangproof.sync();
  return keys.map((key) => hangproof.unsavedText("field", key));
};
/** The values for the fields that `sync` found out of date; the others stay. */
hangproof.shown = () => {
  const found = names.map((key) => (hangproof.unsavedText("field", key) === undefined ? toShow[key] : undefined));
  toShow = {};
  return found;
};
/** What the plan, the model's notes and their buttons show. */
hangproof.said = () => said;

// Typing ------------------------------------------------------------------------------------------------------------
function inputOf(key) {
  const field = document.getElementById(key);
  return field?.querySelector("input[type=radio]:checked") || field?.querySelector("input:not([type=radio]), textarea");
}
function shownValue(key) {
  const input = inputOf(key);
  if (!input || input.type === "radio") return input?.value;
  const choices = window.gradio_config?.components.find((one) => one.props.elem_id === key)?.props.choices;
  if (choices) return choices.find(([label]) => label === input.value)?.[1];
  if (input.type !== "number") return input.value;
  return input.value === "" ? null : Number(input.value);
}
let typing = null;
const unread = new Set(); // fields that were typed in and are not read yet: they have a newer value than any answer
function note(key, value = shownValue(key)) {
  unread.delete(key);
  const kept = hangproof.unsavedText("field", key);
  if (value === undefined || alike(value, kept === undefined ? base[key] : kept)) return;
  hangproof.keep("field", key, value);
  hideRefusal();
  clearTimeout(typing);
  typing = setTimeout(hangproof.sync, SEND_MS);
}
// A text box and a radio button are read in their own event: a moment later, an answer that is just being shown may
// have replaced what was typed. A radio button gives its own value, because the one before it is still checked too. A
// dropdown has no event for a choice: it is read after each of its events, and when its text box is left.
for (const name of ["input", "change", "click", "keyup", "focusout"]) {
  document.addEventListener(name, ({ target }) => {
    const key = names.find((one) => target.closest?.(`#${one}`));
    if (!key || !document.body.classList.contains("hp-open")) return;
    if (target.role === "combobox") {
      unread.add(key);
      setTimeout(() => note(key));
    } else if (name === "input") note(key, target.type === "radio" ? target.value : undefined);
  });
}

// Server ------------------------------------------------------------------------------------------------------------
let syncing = null;
let more = false;
let starting = false; // Start was pressed: what is only missing is marked too from then on, until it is entered
/** Send what is kept and show what is stored, in turn. Resolves to whether the server has everything. */
hangproof.sync = () => {
  if (!names.length) return Promise.resolve(true); // the page is not open yet
  more = true;
  syncing ||= (async () => {
    await new Promise((done) => setTimeout(done)); // a field that was just typed in is read by then
    let ok = true;
    while (ok && more) {
      more = false;
      ok = await exchange();
    }
    syncing = null;
    return ok;
  })();
  return syncing;
};
let pressed = false;
/** Store what Start needs. Pressed again meanwhile, it does nothing: Gradio knows of the first press only afterwards. */
hangproof.starting = async () => {
  if (pressed) await new Promise(() => {});
  starting = pressed = true;
  try {
    await hangproof.flush();
  } finally {
    pressed = false;
  }
};
/** Settings or images have changed: why the last start was refused is out of date. */
const hideRefusal = () => document.querySelector("#problem .hp-bad")?.setAttribute("hidden", "");
async function exchange() {
  const sent = Object.fromEntries(hangproof.unsaved("field"));
  const id = hangproof.draft();
  const answer = await ask("save_settings", { draft: id, changes: sent, starting });
  if (!answer) hangproof.lost();
  else if (!answer.ok) hangproof.refuse(answer.error);
  if (!answer?.ok || id !== hangproof.draft()) return false;
  markFields(answer.marks);
  said = answer.said;
  const changes = new Set(Object.keys(sent));
  for (const [key, theirs] of Object.entries(answer.values)) {
    if (unread.has(key)) {
      more = true; // what the server has is shown by the next answer, unless the field was really typed in
      continue;
    }
    const changed = !alike(theirs, known[key]);
    if (changed) changes.add(key);
    known[key] = theirs;
    if (key in sent) hangproof.confirmed("field", key, sent[key]);
    if (hangproof.unsavedText("field", key) !== undefined) continue; // typed since the request
    if (key in sent) base[key] = sent[key];
    else if (changed) base[key] = theirs;
    const now = shownValue(key);
    if (now === undefined ? changed : !alike(now, base[key])) toShow[key] = base[key];
  }
  if (Object.keys(toShow).length) trigger("show");
  trigger("review");
  // events of their own: a listener of a fold that was opened replaces those that the page began with
  if (CHOSEN.some((key) => changes.has(key))) trigger("chosen");
  if (changes.size) ["script", "checked"].forEach((one) => trigger(one));
  if (Object.keys(sent).length) hangproof.tellOthers();
  return true;
}
hangproof.on("replaced", (kind, key, value) => {
  if (kind === "field") base[key] = value; // another tab has a newer one, which `sync` shows
});

// Errors and warnings beside their fields -----------------------------------------------------------------------------
// They come with the answer that stores the fields. Gradio's own validation (gr.validate) has errors only, and it would
// keep an invalid value from being stored.
/** found: {key of the field: [["bad" or "warn", text], …]}, in place of what was shown before. */
function markFields(found) {
  for (const note of document.querySelectorAll("[id^=note-]")) note.remove();
  for (const input of document.querySelectorAll("[aria-describedby^=note-]")) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
  for (const [key, marks] of Object.entries(found)) {
    const field = document.getElementById(key);
    const input = field && (field.querySelector("[type=radio]:checked") || field.querySelector("input, textarea, [role=button]"));
    if (!input) continue;
    const notes = marks.map(([kind, text], at) => make("p", `hp-field-${kind === "bad" ? "error" : "warning"}`, { textContent: text, id: `note-${key}-${at}` }));
    field.append(...notes);
    if (marks.some(([kind]) => kind === "bad")) input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", notes.map((note) => note.id).join(" "));
  }
}

// The edited script (script_editor.py) --------------------------------------------------------------------------------
hangproof.kinds.script = {
  async call(_, typed) {
    const { text, base } = typed;
    await hangproof.sync(); // the script is compared with the one that the stored settings give
    return ask("save_script", { draft: hangproof.draft(), text, base });
  },
  stored() {
    trigger("script");
    hangproof.sync(); // what is said of its settings
  },
};
