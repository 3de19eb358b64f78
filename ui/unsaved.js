// Nothing that was typed is lost: it is kept in this browser until the server has stored it, and sent again after the
// server was away. Runs once, before the parts of the page (ui/scripts.py); they and Gradio's events use `hangproof`.
//
// A text goes to localStorage before it is sent and leaves it only when the server has confirmed exactly this text. So
// a dead server, an ended login, a reload and a closed tab lose nothing. The other tabs of this browser see the same
// entries: a tab sends its own and those whose tab has been silent for ORPHAN_MS.
const ORPHAN_MS = 10_000;
const TYPE_MS = 500;
const LOOK_MS = 2000; // between two looks at the server
const LOOK_MAX_MS = 20_000; // where it responds and does not store
const PATIENCE_MS = 5000; // for a server that accepts the request and does not answer it
const PREFIX = "hangproof-unsaved/";
const BACK = "Your changes are kept in this browser and are saved";
const TROUBLE = {
  offline: ["Not connected", `Hangproof does not answer. A run that was started continues without it. ${BACK} when Hangproof answers; if you closed it, start it again.`],
  login: ["Your login has ended", `${BACK} after you log in again.`],
};
const random = () => [...crypto.getRandomValues(new Uint8Array(12))].map((n) => n.toString(16).padStart(2, "0")).join("");
const tab = (sessionStorage["hangproof-tab"] ||= random());
const mine = new Map(); // storage key → { value, tab, at, onlyHere? }
const kinds = {}; // kind → how its texts are sent one by one: { call, begun?, stored, refused? }; not fields (fields.js)
const sending = new Map(); // storage key → whether it is stored by now, as a promise
const listeners = {};
const on = (event, act) => (listeners[event] ||= []).push(act);
const emit = (event, ...values) => (listeners[event] || []).map((act) => act(...values));
const others = "BroadcastChannel" in window ? new BroadcastChannel("hangproof") : null;
let draft = "";
let trouble = ""; // "", "offline", "login"
let refusal = ""; // why a server that responds did not store something
let missed = false; // an answer did not arrive, so the page may not show what is stored
let pause = null;

// Texts -------------------------------------------------------------------------------------------------------------
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const keyOf = (kind, id) => `${PREFIX}${draft}/${kind}/${id}`;
const kindAndId = (key) => key.slice(`${PREFIX}${draft}/`.length).split("/");
function stored(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // not written by this script
  }
}
function keep(kind, id, value) {
  const entry = { value, tab, at: Date.now() };
  mine.set(keyOf(kind, id), entry);
  try {
    localStorage.setItem(keyOf(kind, id), JSON.stringify(entry));
  } catch {
    entry.onlyHere = true;
    refuse("this browser's storage is full, so keep this page open");
  }
}
/** Forget a text that the server has stored. A text typed since then stays. */
function confirmed(kind, id, value) {
  const key = keyOf(kind, id);
  if (same(mine.get(key)?.value, value)) mine.delete(key);
  if (same(stored(key)?.value, value)) localStorage.removeItem(key);
  if (!unsaved().length && !trouble) refusal = "";
  drawBanner();
}
/** Forget a text whatever it is: the user removed its image. */
function forget(kind, id) {
  mine.delete(keyOf(kind, id));
  localStorage.removeItem(keyOf(kind, id));
  drawBanner();
}
/** Take over the texts of this tab before its reload, and those of tabs that are gone. */
function adopt() {
  for (const key of Object.keys(localStorage)) {
    if (!draft || !key.startsWith(`${PREFIX}${draft}/`) || mine.has(key)) continue;
    const entry = stored(key);
    if (!entry || (entry.tab !== tab && Date.now() - entry.at < ORPHAN_MS)) continue;
    const own = { ...entry, tab, at: Date.now() };
    localStorage.setItem(key, JSON.stringify(own));
    mine.set(key, own);
  }
}
/** [[id, value], …] of one kind, or all entries. Of two tabs, the text typed last wins. */
function unsaved(kind) {
  for (const [key, entry] of mine) {
    const now = stored(key);
    if (entry.onlyHere || (now && now.tab === tab) || (now && now.at < entry.at)) continue;
    mine.delete(key); // another tab has replaced or stored it
    emit("replaced", ...kindAndId(key), entry.value);
  }
  const start = kind ? keyOf(kind, "") : `${PREFIX}${draft}/`;
  return [...mine].filter(([key]) => key.startsWith(start)).map(([key, entry]) => [key.slice(start.length), entry.value]);
}
const unsavedText = (kind, id) => mine.get(keyOf(kind, id))?.value;

// Sending -----------------------------------------------------------------------------------------------------------
/** Keep a text, and send it when the typing pauses. */
function typed(kind, id, value) {
  keep(kind, id, value);
  clearTimeout(pause);
  pause = setTimeout(send, TYPE_MS);
}
async function sendOne(kind, id) {
  const { call, begun, stored: isStored, refused = (_, __, answer) => answer && refuse(answer.error) } = kinds[kind];
  for (let value; (value = unsavedText(kind, id)) !== undefined; ) {
    begun?.(id);
    const answer = await call(id, value);
    if (answer?.ok !== true) {
      refused(id, value, answer);
      if (!answer) lost();
      return false;
    }
    confirmed(kind, id, value);
    isStored(id, value, answer);
    tellOthers();
  }
  return true;
}
/** Send every text of `kinds` until what was typed last is stored. Resolves to whether all of it is. */
async function send() {
  clearTimeout(pause);
  const kept = Object.keys(kinds).flatMap((kind) => unsaved(kind).map(([id]) => [keyOf(kind, id), kind, id]));
  for (const [key, kind, id] of kept) if (!sending.has(key)) sending.set(key, sendOne(kind, id).finally(() => sending.delete(key)));
  return (await Promise.all(kept.map(([key]) => sending.get(key)))).every(Boolean);
}
const isSending = (kind, id) => sending.has(keyOf(kind, id));
/** Ask the other tabs of this browser to show what was stored here. */
const tellOthers = () => others?.postMessage(draft);
if (others) others.addEventListener("message", ({ data }) => data === draft && emit("others"));

// Connection --------------------------------------------------------------------------------------------------------
async function look() {
  try {
    const url = new URL("gradio_api/app_id", document.baseURI);
    const answer = await fetch(url, { cache: "no-store", redirect: "manual", signal: AbortSignal.timeout(PATIENCE_MS) });
    trouble = answer.ok ? "" : answer.type === "opaqueredirect" || [401, 403].includes(answer.status) ? "login" : "offline";
    // A server that was started again does not know what is in the open folds.
    if (answer.ok && (await answer.json()).app_id !== window.gradio_config.app_id) location.reload();
  } catch {
    trouble = "offline";
  }
  drawBanner();
}
/** The server did not answer: find out why. */
async function lost() {
  missed = true;
  await look();
  if (!trouble) refuse(refusal || "Hangproof reported an error; its terminal shows the cause");
}
function refuse(reason) {
  refusal = reason;
  drawBanner();
}
let attempts = 0; // a server that responds and does not store is asked less and less often
let again = null;
/** Look at the server on every tab; when it responds, send again what is not stored and ask for what it has. */
async function watchServer() {
  const waits = () => trouble || missed || unsaved().length > 0;
  const waited = waits();
  if (waited || !document.hidden) await look();
  if (!trouble) adopt();
  if (!trouble && (waited || waits())) {
    attempts += 1;
    if (!again) {
      missed = false;
      again = Promise.all(emit("back")).finally(() => (again = null));
    }
  }
  if (!waits() && !again) attempts = 0;
  setTimeout(watchServer, Math.min(LOOK_MS * (1 + attempts), LOOK_MAX_MS));
}
setTimeout(watchServer, LOOK_MS);

// Banner ------------------------------------------------------------------------------------------------------------
const banner = live("div", "hp-banner", "alert");
banner.dataset.testid = "unsaved-banner";
function drawBanner() {
  const [title, text] = TROUBLE[trouble] || (refusal && unsaved().length ? ["Not saved", `${refusal}. ${BACK} as soon as possible.`] : []);
  document.body.classList.toggle("hp-offline", Boolean(trouble));
  // The pill and the age of the last progress are replaced in place: they would claim something that nobody knows.
  for (const part of document.querySelectorAll("#run-head [data-testid=state], #run-head .hp-ago")) {
    if (trouble) {
      part.dataset.known ??= part.textContent;
      part.textContent = part.matches(".hp-ago") ? "unknown" : "Not connected";
    } else if (part.dataset.known !== undefined) {
      part.textContent = part.dataset.known;
      delete part.dataset.known;
    }
  }
  if (!title) return banner.remove();
  if (banner.isConnected && banner.lastChild.previousSibling?.textContent === text) return;
  const logIn = button("Log in again", "", () => location.reload());
  logIn.hidden = trouble !== "login";
  banner.replaceChildren(make("strong", "", title), make("span", "", text), logIn);
  document.body.append(banner);
}

// Drafts ------------------------------------------------------------------------------------------------------------
/** The value of a key for all tabs of this browser: the first tab's `proposal`. IndexedDB makes one change after the other;
 * localStorage can show two tabs different values for a moment. */
function agree(key, proposal) {
  return new Promise((done, failed) => {
    const request = indexedDB.open("hangproof", 2);
    request.onupgradeneeded = () => {
      if (!request.result.objectStoreNames.contains("shared")) request.result.createObjectStore("shared");
    };
    request.onerror = () => failed(request.error);
    request.onsuccess = () => {
      const { result: db } = request;
      const change = db.transaction("shared", "readwrite");
      const store = change.objectStore("shared");
      const found = store.get(key);
      found.onsuccess = () => found.result === undefined && store.put(proposal, key);
      change.oncomplete = () => (db.close(), done(found.result ?? proposal));
      change.onabort = () => (db.close(), failed(change.error));
    };
  });
}
/** The draft's id. Both tabs of a new browser get the same one, because it is created here and not by the server. */
async function draftId(known) {
  const own = known || random();
  return (localStorage["hangproof-draft-id"] ||= await agree("draft-id", own).catch(() => own)); // none in a private window
}
function setDraft(id) {
  if (!id || id === draft) return;
  draft = id;
  localStorage["hangproof-draft-id"] = id;
  adopt();
}
function openDraft(id) {
  localStorage["hangproof-draft-id"] = id;
  location.reload();
}

const hangproof = { keep, confirmed, forget, unsaved, unsavedText, kinds, typed, send, isSending, on, tellOthers, lost, refuse, same, random };
Object.assign(hangproof, { draftId, setDraft, openDraft, draft: () => draft, trouble: () => trouble });
window.hangproof = hangproof;
