// Keeps what the server has not stored. Part of the images' script; Gradio's events use window.hangproof too (fields.js).
//
// A typed text goes to localStorage before it is sent and leaves it only when the server has confirmed exactly this text. So
// a dead server, an ended login, a reload and a closed tab lose nothing. The other tabs of this browser see the same
// entries: a tab sends its own and those whose tab has been silent for ORPHAN_MS.
const ORPHAN_MS = 10_000;
const PROBE_MS = 1500;
const PROBE_MAX_MS = 20_000;
const PREFIX = "hangproof-unsaved/";
const BACK = "Your changes are kept in this browser and are saved";
const TROUBLE = {
  offline: `Not connected to Hangproof. ${BACK} when the connection is back.`,
  login: `Your login has ended. ${BACK} after you log in again.`,
};
const random = () => [...crypto.getRandomValues(new Uint8Array(12))].map((n) => n.toString(16).padStart(2, "0")).join("");
const tab = (sessionStorage["hangproof-tab"] ||= random());
const mine = new Map(); // storage key → { value, tab, at, onlyHere? }
const listeners = { back: [], change: [], replaced: [], adopted: [] };
let draft = "";
let trouble = ""; // "", "offline", "login"
let refused = ""; // why a server that responds did not store something
let timer = null;
let attempts = 0;

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
    refused = "this browser's storage is full, so keep this page open";
  }
  watchOver();
}
/** Forget a text that the server has stored. A text typed since then stays. */
function confirmed(kind, id, value) {
  const key = keyOf(kind, id);
  if (mine.has(key) && same(mine.get(key).value, value)) mine.delete(key);
  const entry = stored(key);
  if (entry && same(entry.value, value)) localStorage.removeItem(key);
  if (!unsaved().length && !trouble) refused = "";
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
  let young = false;
  for (const key of Object.keys(localStorage)) {
    if (!draft || !key.startsWith(`${PREFIX}${draft}/`) || mine.has(key)) continue;
    const entry = stored(key);
    young ||= entry && entry.tab !== tab;
    if (!entry || (entry.tab !== tab && Date.now() - entry.at < ORPHAN_MS)) continue;
    const own = { ...entry, tab, at: Date.now() };
    localStorage.setItem(key, JSON.stringify(own));
    mine.set(key, own);
    for (const act of listeners.adopted) act(...kindAndId(key), own.value);
  }
  if (young) setTimeout(adopt, ORPHAN_MS); // its tab may have been closed a moment ago
  watchOver();
}
/** [[id, value], …] of one kind, or all entries. Of two tabs, the text typed last wins. */
function unsaved(kind) {
  for (const [key, entry] of mine) {
    const now = stored(key);
    if (entry.onlyHere || (now && now.tab === tab) || (now && now.at < entry.at)) continue;
    mine.delete(key); // another tab has replaced or stored it
    for (const act of listeners.replaced) act(...kindAndId(key), entry.value);
  }
  const start = kind ? keyOf(kind, "") : `${PREFIX}${draft}/`;
  return [...mine].filter(([key]) => key.startsWith(start)).map(([key, entry]) => [key.slice(start.length), entry.value]);
}
const unsavedText = (kind, id) => mine.get(keyOf(kind, id))?.value;

// Connection --------------------------------------------------------------------------------------------------------
async function probe() {
  try {
    const answer = await fetch("gradio_api/app_id", {
      cache: "no-store",
      redirect: "manual",
      signal: AbortSignal.timeout(8000),
    });
    if (answer.ok) return "";
    return answer.type === "opaqueredirect" || [401, 403].includes(answer.status) ? "login" : "offline";
  } catch {
    return "offline";
  }
}
/** The server did not answer, or not with `ok: true`: find out why, and send again when it responds. */
async function lost() {
  const found = await probe();
  if (!found) refused ||= "Hangproof reported an error; its terminal shows the cause";
  setTrouble(found);
  watchOver();
}
function setTrouble(found) {
  const before = trouble;
  trouble = found;
  drawBanner();
  if (before !== found) for (const act of listeners.change) act(found);
}
/** While something is unsaved, ask once in a while whether the server responds, and then send it again. */
function watchOver() {
  if (timer === null) timer = setTimeout(check, Math.min(PROBE_MS * (1 + attempts), PROBE_MAX_MS));
}
async function check() {
  const waits = () => trouble || unsaved().length;
  if (waits()) {
    const found = await probe();
    setTrouble(found);
    if (!found) {
      adopt();
      attempts += 1; // a server that responds and does not store is asked less and less often
      for (const act of listeners.back) await act();
    }
  }
  if (!waits()) attempts = 0;
  timer = null;
  if (waits()) watchOver();
  drawBanner();
}

// Banner ------------------------------------------------------------------------------------------------------------
let banner = null;
function drawBanner() {
  if (!document.body) return;
  const text = TROUBLE[trouble] || (refused && unsaved().length ? `Not saved: ${refused}. ${BACK} as soon as possible.` : "");
  if (!banner) {
    banner = live("div", "hp-banner", "status");
    banner.append(make("span"), button("Log in again", "", () => location.reload()));
    banner.dataset.testid = "unsaved-banner";
    document.body.append(banner);
  }
  banner.hidden = !text;
  if (banner.firstChild.textContent !== text) banner.firstChild.textContent = text;
  banner.lastChild.hidden = trouble !== "login";
}

/** The value of a key for all tabs of this browser: the first tab's `proposal`. IndexedDB makes one change after the other;
 * localStorage can show two tabs different values for a moment. */
function agree(key, proposal) {
  return new Promise((done, failed) => {
    const request = indexedDB.open("hangproof", 2);
    request.onupgradeneeded = () => {
      const { result: db } = request;
      if (!db.objectStoreNames.contains("shared")) db.createObjectStore("shared");
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

const hangproof = {
  tab,
  random,
  keep,
  confirmed,
  forget,
  adopt,
  unsaved,
  unsavedText,
  lost,
  same,
  draft: () => draft,
  trouble: () => trouble,
  onBack: (act) => listeners.back.push(act),
  onReplaced: (act) => listeners.replaced.push(act),
  onAdopted: (act) => listeners.adopted.push(act),
  onTrouble: (act) => listeners.change.push(act),
  refuse: (reason) => {
    refused = reason;
    drawBanner();
    watchOver();
  },
  /** The draft's id. Both tabs of a new browser get the same one, because it is created here and not by the server. */
  draftId: async (known) => {
    const own = known || random();
    return (localStorage["hangproof-draft-id"] ||= await agree("draft-id", own).catch(() => own)); // a private window has none
  },
  openDraft: (id) => {
    localStorage["hangproof-draft-id"] = id;
    location.reload();
  },
  setDraft: (id) => {
    if (!id || id === draft) return;
    draft = id;
    localStorage["hangproof-draft-id"] = id;
    adopt();
  },
};
window.hangproof = hangproof;
