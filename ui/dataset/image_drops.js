// Dropped and chosen files: finds them with their folders and uploads them in batches. Where the server does not take a batch, the
// rest is not sent, and the page says so: the files are still where they were dropped from. Part of the images' script.
const SKIPPED = /^(\.|thumbs\.db$|desktop\.ini$|__MACOSX$)/i;
const [CANCELLED, FAILED] = [{}, {}]; // instead of an answer
const waiting = []; // { file, path, drop }: not yet taken by the server
hangproof.kept = () => waiting.length;
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
  if (files.length) pump();
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
      if (answer?.ok !== true) {
        const why = answer ? answer.error : await noAnswer();
        const left = waiting.splice(0).length;
        const lost = `${left} of ${total} files were not uploaded. Drop them again.`;
        tally.messages.push(...(answer ? [why, lost] : [`${why} ${lost}`]));
        break;
      }
      waiting.splice(0, batch.length);
      tally.done += batch.length;
      tally.messages.push(...answer.messages);
      tally.added += answer.added;
      show(answer);
      hangproof.tellOthers();
    }
    if (cancelled) {
      const left = waiting.splice(0).length;
      if (left) tally.messages.push(`Upload cancelled. ${many(left, "file")} not uploaded; Undo removes the others.`);
    }
    report();
  } finally {
    pumping = false;
    cancelUpload.hidden = true;
    showProgress(DROP_HINT, null);
  }
}
/** The server's answer to one batch; null when there is none. */
async function send(batch, bytes, onProgress) {
  const paths = await post(batch, onProgress);
  if (paths === FAILED) return ask("explain_failed_upload", { names: batch.map((one) => one.path), bytes });
  if (!Array.isArray(paths)) return paths;
  const uploads = paths.map((path, n) => ({ path, name: batch[n].path }));
  const { drop } = batch[0];
  return ask("add_images", { uploads, drop, more: waiting[batch.length]?.drop === drop });
}
function report() {
  const { added, messages } = tally;
  tally = null;
  const count = added === 1 ? "1 image added" : `${added} images added`;
  if (messages.length) showNotes([...(added ? [`${count}. Messages:`] : []), ...messages], "bad");
  else if (added) showNotes([`${count}.`], "good", true);
  else showNotes(["Captions read."], "good", true);
}
