// Dropped and chosen files: finds them with their folders, uploads them in batches, and keeps those that the server did not
// take. Kept files are in IndexedDB, because the page reloads itself once the server is back. Part of the images' script.
const SKIPPED = /^(\.|thumbs\.db$|desktop\.ini$|__MACOSX$)/i;
const KEEP_MS = 30_000; // after this, another tab may upload a file that its own tab keeps
const AT_ONCE_BYTES = 100e6; // up to this size a drop is kept before it is uploaded; a larger one when the server is away
const [CANCELLED, FAILED] = [{}, {}]; // instead of an answer
const NO_ANSWER = "Hangproof does not respond";
const waiting = []; // { file, path, drop, key? }: not yet taken by the server; key: its place in IndexedDB
let pumping = false;
let tally = null;

// What was dropped --------------------------------------------------------------------------------------------------
async function filesOf(entry) {
  if (entry.isFile) {
    const file = await new Promise((done, failed) => entry.file(done, failed));
    return [{ file, path: entry.fullPath.replace(/^\//, "") }];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const part = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!part.length) return found;
    for (const one of part) found.push(...(await filesOf(one)));
  }
}
async function dropped(transfer) {
  const loose = [...transfer.files].map((file) => ({ file, path: file.name })); // both are empty after the event
  const entries = [...transfer.items].filter((one) => one.kind === "file").map((one) => one.webkitGetAsEntry?.());
  upload(entries.length && entries.every(Boolean) ? (await Promise.all(entries.map(filesOf))).flat() : loose);
}
const chosen = (files) => upload([...files].map((file) => ({ file, path: file.webkitRelativePath || file.name })));

// Kept in the browser -----------------------------------------------------------------------------------------------
let keeping = Promise.resolve(); // one after the other, so that a file's key is known before it is deleted
function keepFiles() {
  return (keeping = keeping.catch(() => {}).then(async () => {
    const list = waiting.filter((one) => one.key === undefined);
    const keys = [];
    await inStore("drops", (store) => {
      list.forEach(({ file, path, drop }, n) => {
        const entry = { draft: state().draft, tab: hangproof.tab, at: Date.now(), path, drop, file };
        store.add(entry).onsuccess = (event) => (keys[n] = event.target.result);
      });
    });
    list.forEach((one, n) => (one.key = keys[n]));
  }));
}
async function forgetFiles(list) {
  await keeping.catch(() => {});
  const keys = list.map((one) => one.key).filter((key) => key !== undefined);
  if (keys.length) await inStore("drops", (store) => keys.forEach((key) => store.delete(key)));
}
async function adoptFiles() {
  if (!state().draft) return;
  const known = new Set(waiting.map((one) => one.key));
  await inStore("drops", (store) => {
    store.openCursor().onsuccess = (event) => {
      const cursor = event.target.result;
      if (!cursor) return;
      const { draft, tab, at, path, drop, file } = cursor.value;
      const ours = tab === hangproof.tab || Date.now() - at > KEEP_MS;
      if (draft === state().draft && ours && !known.has(cursor.key)) {
        waiting.push({ file, path, drop, key: cursor.key });
        cursor.update({ ...cursor.value, tab: hangproof.tab, at: Date.now() });
      }
      cursor.continue();
    };
  });
  if (waiting.length) pump();
}
hangproof.kept = () => waiting.length;
window.addEventListener("beforeunload", (event) => {
  if (hangproof.trouble() && waiting.some((one) => one.key === undefined)) event.preventDefault();
});

// Upload ------------------------------------------------------------------------------------------------------------
let sending = null; // the request of the batch that is being uploaded
let cancelled = false;
const cancelUpload = button("Cancel the upload", "hp-quiet", () => {
  cancelled = true;
  sending?.abort();
});
cancelUpload.hidden = true;

/** Upload files. Returns their paths on the server; FAILED, CANCELLED, null for no answer, or {ok: false, error}. */
function post(files, onProgress) {
  const form = new FormData();
  for (const { file } of files) form.append("files", file, file.name);
  return new Promise((done) => {
    const request = new XMLHttpRequest();
    request.open("POST", "gradio_api/upload");
    request.upload.onprogress = (event) => onProgress(event.loaded);
    request.onload = () => {
      if (request.status === 413) done({ ok: false, error: request.responseText });
      else if ([401, 403, 502, 503, 504].includes(request.status)) done(null);
      else done(request.status === 200 ? JSON.parse(request.responseText) : FAILED);
    };
    request.onerror = () => done(null);
    request.onabort = () => done(CANCELLED);
    sending = request;
    request.send(form);
  });
}
function upload(list) {
  const files = list
    .filter(({ path }) => !path.split("/").some((part) => SKIPPED.test(part)))
    .sort((a, b) => a.path.localeCompare(b.path, undefined, { numeric: true }));
  const drop = hangproof.random(); // the server pairs images and captions within one drop
  waiting.push(...files.map((one) => ({ ...one, drop })));
  if (!files.length) return;
  if (files.reduce((sum, one) => sum + one.file.size, 0) < AT_ONCE_BYTES) keepFiles().catch(() => {});
  pump();
}
function nextBatch() {
  const batch = [];
  let bytes = 0;
  for (const one of waiting) {
    const full = batch.length >= 16 || bytes + one.file.size > 32e6 || one.drop !== batch[0]?.drop;
    if (batch.length && full) break;
    batch.push(one);
    bytes += one.file.size;
  }
  return [batch, bytes];
}
/** Upload what waits, one batch after the other; files that arrive meanwhile join in. */
async function pump() {
  if (pumping) return;
  pumping = true;
  tally ||= { added: 0, done: 0, messages: [] };
  cancelled = false;
  cancelUpload.hidden = false;
  try {
    while (waiting.length && !cancelled) {
      const [batch, bytes] = nextBatch();
      const total = tally.done + waiting.length;
      showProgress(`Uploading ${tally.done + 1} of ${total} files…`, tally.done / total);
      const step = (loaded) => showProgress(null, (tally.done + (batch.length * loaded) / (bytes || 1)) / total);
      const answer = await send(batch, bytes, step);
      sending = null;
      if (answer === CANCELLED) break;
      if (!answer) {
        showNotes([`${NO_ANSWER}. ${await describeKept()}`], "warn");
        hangproof.lost();
        return;
      }
      waiting.splice(0, batch.length);
      tally.done += batch.length;
      forgetFiles(batch).catch(() => {}); // a file that stays is added once more, which changes nothing
      if (answer.ok !== true) {
        const left = waiting.splice(0);
        forgetFiles(left).catch(() => {});
        const none = batch.length + left.length;
        tally.messages.push(answer.error, `${none} of ${total} files were not uploaded. Drop them again.`);
        break;
      }
      tally.messages.push(...answer.messages);
      tally.added += answer.added;
      show(answer);
      hangproof.tellOthers();
    }
    if (cancelled) {
      const left = waiting.splice(0);
      forgetFiles(left).catch(() => {});
      if (left.length) tally.messages.push(`Upload cancelled. ${many(left.length, "file")} not uploaded; Undo removes the others.`);
    }
    report();
  } finally {
    pumping = false;
    cancelUpload.hidden = true;
    showProgress(DROP_HINT, null);
    hangproof.drawBanner();
  }
}
/** The server's answer to one batch; null when there is none, so that the files are still to be sent. */
async function send(batch, bytes, onProgress) {
  const paths = await post(batch, onProgress);
  if (paths === FAILED) return ask("explain_failed_upload", { names: batch.map((one) => one.path), bytes });
  if (!Array.isArray(paths)) return paths;
  const uploads = paths.map((path, n) => ({ path, name: batch[n].path }));
  const { drop } = batch[0];
  return ask("add_images", { uploads, drop, more: waiting[batch.length]?.drop === drop });
}
async function describeKept() {
  const files = waiting.length === 1 ? "1 file is" : `${waiting.length} files are`;
  const then = "and uploaded when the connection is back";
  try {
    await keepFiles();
    return `${files} kept in this browser ${then}.`;
  } catch {
    return `${files} kept in this page ${then}. Keep this page open.`;
  }
}
function report() {
  const { added, messages } = tally;
  tally = null;
  const count = added === 1 ? "1 image added" : `${added} images added`;
  if (messages.length) showNotes([...(added ? [`${count}. Messages:`] : []), ...messages], "bad");
  else if (added) showNotes([`${count}.`], "good", true);
  else showNotes(["Captions read."], "good", true);
}
