// The form's fields: keeps what is not stored, and merges them with another tab's, field by field. Part of the images' script.
//
// Gradio's events pass all values through these functions. `base` holds each field as the server last confirmed it, so a
// field whose value differs was changed in this tab. Gradio stops all events while the server is away, so typed values
// are also read from the page itself.
let names = [];
let base = {};
const arriving = {}; // field → { from, to }: a value on its way to the page, where an event may still see the old one
const offered = {}; // field → { from, shown, to }: a value that a proposal set; what was typed in another tab wins over it
const others = "BroadcastChannel" in window ? new BroadcastChannel("hangproof") : null;

/** At the start: the values to show, from those that the server has and those that this browser kept. */
hangproof.restore = (keys, [id, ...values]) => {
  names = keys;
  hangproof.setDraft(id);
  base = Object.fromEntries(keys.map((key, n) => [key, values[n]]));
  return keys.map((key, n) => {
    const value = hangproof.unsavedText("field", key);
    if (value === undefined) return undefined;
    if (!same(value, values[n])) return bring(key, values[n], value);
    hangproof.confirmed("field", key, value);
    return undefined;
  });
};
/** What the server gets: the fields that were typed in this tab, each kept in the browser until the server confirms it, and
 * the proposed values, which the server stores only while the field has one of the values `from`. */
hangproof.changes = (values) => {
  names.forEach((key, n) => note(key, values[n]));
  const offers = Object.entries(offered).filter(([, offer]) => same(offer.shown, offer.to));
  return { changes: Object.fromEntries(hangproof.unsaved("field")), offers: Object.fromEntries(offers) };
};
/** Fill fields that show `shown` with proposed values; none of them while one has a typed value that is not stored. */
hangproof.offer = (keys, shown, values) => {
  if (keys.some((key) => hangproof.unsavedText("field", key) !== undefined)) return keys.map(() => undefined);
  keys.forEach((key, n) => {
    offered[key] = { from: [base[key], offered[key]?.to ?? base[key]], shown: shown[n], to: values[n] };
  });
  return values;
};
function bring(key, from, to) {
  arriving[key] = { from, to };
  return to;
}
const isOffered = (key, value) => key in offered && (same(value, offered[key].to) || same(value, offered[key].shown));
const isOnItsWay = (key, value) => key in arriving && same(value, arriving[key].from);
function note(key, value) {
  if (value === undefined || isOnItsWay(key, value)) return;
  delete arriving[key];
  if (isOffered(key, value)) {
    if (same(value, offered[key].to)) offered[key].shown = value; // it has arrived: another value is typed from now on
    return;
  }
  delete offered[key];
  const kept = hangproof.unsavedText("field", key);
  if (same(value, kept)) return;
  if (!same(value, base[key])) hangproof.keep("field", key, value);
  else if (kept !== undefined) hangproof.keep("field", key, value); // changed back; the server may have the other value
}
/** After an answer: the values that another tab has changed and this one has not. */
hangproof.merge = (answer, values) => {
  if (!answer || answer.ok !== true) {
    if (answer && answer.error) hangproof.refuse(answer.error);
    return names.map(() => undefined);
  }
  const found = names.map((key, n) => {
    if (!(key in answer.form)) return undefined;
    const [before, theirs] = [base[key], answer.form[key]];
    const offer = isOffered(key, values[n]) && offered[key];
    base[key] = theirs;
    if (key in answer.stored) {
      hangproof.confirmed("field", key, answer.stored[key]);
      if (same(values[n], answer.stored[key])) {
        delete offered[key];
        return void (base[key] = values[n]);
      }
    }
    if (offer && !same(theirs, offer.to) && offer.from.some((value) => same(value, theirs))) return undefined; // not sent yet
    if (offer) delete offered[key]; // stored, or another tab has changed the field
    if (same(values[n], theirs) || hangproof.unsavedText("field", key) !== undefined) return undefined;
    if (offer || same(values[n], before) || isOnItsWay(key, values[n])) return bring(key, values[n], theirs);
    hangproof.keep("field", key, values[n]); // typed since the request
    return undefined;
  });
  if (Object.keys(answer.stored).length) hangproof.tellOthers();
  return found;
};
/** Ask the other tabs of this browser to show what was stored here. */
hangproof.tellOthers = () => others && others.postMessage(hangproof.draft());
hangproof.onOthers = (act) => {
  if (others) others.addEventListener("message", (event) => event.data === hangproof.draft() && act());
};

hangproof.onReplaced((kind, key, value) => {
  if (kind === "field") base[key] = value; // so that the other tab's value is shown here
});
hangproof.onAdopted((kind, key, value) => {
  if (kind === "field") bring(key, base[key], value); // merge shows it: until then the field has its older value
});

function shownValue(key) {
  const field = document.getElementById(key);
  const config = window.gradio_config?.components.find((one) => one.props.elem_id === key);
  const choices = config?.props.choices;
  const input = field?.querySelector(choices ? "input:checked, input[role=listbox]" : "input, textarea");
  if (!input || !config) return undefined;
  const text = choices ? input.closest("label")?.innerText.trim() || input.value : input.value;
  if (choices) return choices.find(([label]) => label === text)?.[1];
  if (config.type !== "number") return text;
  return text === "" ? null : Number(text);
}
// Also when Gradio is silent: a field that was just typed in or chosen.
for (const name of ["input", "change", "click", "keyup"]) {
  document.addEventListener(name, (event) => {
    const key = names.find((one) => event.target.closest?.(`#${one}`));
    if (key && document.body.classList.contains("hp-open")) setTimeout(() => note(key, shownValue(key)));
  });
}

/** [[key, value], …] of all fields as they are shown: what was typed, else what the server has. */
hangproof.fieldValues = () => names.map((key) => [key, hangproof.unsavedText("field", key) ?? base[key]]);
/** The fields' new values for an event that sets some of them, as if they were typed; the others keep theirs. */
hangproof.use = (values) => {
  for (const [key, value] of Object.entries(values || {})) note(key, value);
  return names.map((key) => (values && key in values ? values[key] : undefined));
};
