// Dropped and chosen files: finds them with their folders and uploads them in batches. Where the server does not take a batch, the
// rest is not sent, and the page says so: the files are still where they were dropped from. Part of the images' script.
const SKIPPED = /^(\.|thumbs\.db$|desktop\.ini$|__MACOSX$)/i;
const [MOST_FILES, MOST_BYTES] = [64, 32e6]; // of a batch
const waiting = []; // { file, path, drop }: not yet taken by the server
hangproof.kept = () => waiting.length;

// What was dropped --------------------------------------------------------------------------------------------------
/** The files of an entry. What the browser cannot read has an `error` in place of a file. */
async function filesOf(entry) {
  const path = entry.fullPath.replace(/^\//, "");
  const found = [];
  try {
    if (entry.isFile) return [{ file: await new Promise((done, failed) => entry.file(done, failed)), path }];
    const reader = entry.createReader();
    for (let part = [null]; part.length; ) {
      part = await new Promise((done, failed) => reader.readEntries(done, failed));
      for (const one of part) found.push(...(await filesOf(one)));
    }
  } catch (error) {
    found.push({ path, error });
  }
  return found;
}
async function dropped(transfer) {
  const loose = [...transfer.files].map((file) => ({ file, path: file.name })); // both are empty after the event
  const entries = [...transfer.items].filter((one) => one.kind === "file").map((one) => one.webkitGetAsEntry?.());
  upload(entries.length && entries.every(Boolean) ? (await Promise.all(entries.map(filesOf))).flat() : loose);
}
function chosen() {
  upload([...picker.files].map((file) => ({ file, path: file.webkitRelativePath || file.name })));
  [picker.value, picker.webkitdirectory] = ["", false];
}

// Upload ------------------------------------------------------------------------------------------------------------
let uploading = false;
let request = null; // of the batch that is being uploaded
let cancelled = false;
const messages = []; // of this upload
const cancelUpload = button("Cancel the upload", "hp-quiet", () => {
  cancelled = true;
  request.abort();
});
cancelUpload.hidden = true;

function upload(list) {
  const drop = hangproof.random(); // the server pairs images and captions within one drop
  const shown = list
    .filter(({ path }) => !path.split("/").some((part) => SKIPPED.test(part)))
    .sort((a, b) => a.path.localeCompare(b.path, undefined, { numeric: true }));
  const files = shown.filter(({ file }) => file);
  for (const { path, error } of shown) if (error) messages.push(`${path}: the browser cannot read it (${error.message})`);
  waiting.push(...files.map((one) => ({ ...one, drop })));
  if (uploading) return;
  if (files.length) uploadAll();
  else showNotes(messages.length ? messages.splice(0) : ["There are no files to add."], "bad");
}
function nextBatch() {
  let bytes = 0;
  const end = waiting.findIndex(({ file, drop }, n) => {
    bytes += file.size;
    return n > 0 && (n >= MOST_FILES || bytes > MOST_BYTES || drop !== waiting[0].drop);
  });
  return waiting.slice(0, end < 0 ? waiting.length : end);
}
/** Upload what waits, one batch after the other; files that arrive meanwhile join in. */
async function uploadAll() {
  [uploading, cancelled, cancelUpload.hidden] = [true, false, false];
  let [added, done] = [0, 0];
  while (waiting.length && !cancelled) {
    const batch = nextBatch();
    const total = done + waiting.length;
    const answer = await uploadBatch(batch, (part) =>
      showProgress(`Uploading ${done + 1} of ${total} files…`, (done + batch.length * part) / total)
    ).catch(() => null);
    if (cancelled && !answer) break;
    if (answer?.ok !== true) {
      const why = answer ? answer.error : await noAnswer();
      messages.unshift(`${why.replace(/\.?$/, ".")} ${waiting.splice(0).length} of ${total} files were not uploaded. Drop them again.`);
      break;
    }
    waiting.splice(0, batch.length);
    done += batch.length;
    added += answer.added;
    messages.push(...answer.messages.filter((one) => !messages.includes(one)));
    show(answer);
    hangproof.tellOthers();
  }
  const left = waiting.splice(0).length;
  if (left) messages.unshift(`Upload cancelled. ${many(left, "file")} not uploaded; Undo removes the others.`);
  [uploading, cancelUpload.hidden] = [false, true];
  showProgress(DROP_HINT, null);
  const count = `${many(added, "image")} added.`;
  if (messages.length) showNotes([...(added ? [`${count} Messages:`] : []), ...messages.splice(0)], "bad");
  else showNotes([added ? count : state().importing ? "The images are being imported." : "Captions read."], "good", true);
}
/** The server's answer to one batch; null when there is none. */
async function uploadBatch(batch, onProgress) {
  const form = new FormData();
  for (const { file } of batch) form.append("files", file, file.name);
  request = new XMLHttpRequest(); // `fetch` says nothing of its progress
  request.open("POST", "gradio_api/upload");
  request.upload.onprogress = ({ loaded, total }) => onProgress(loaded / total);
  onProgress(0);
  await new Promise((done) => {
    request.onloadend = done;
    request.send(form);
  });
  const { status, responseText } = request;
  if (status === 413) return { ok: false, error: responseText };
  if ([0, 401, 403, 502, 503, 504].includes(status)) return null;
  const bytes = batch.reduce((sum, { file }) => sum + file.size, 0);
  if (status !== 200) return ask("explain_failed_upload", { names: batch.map((one) => one.path), bytes });
  const uploads = JSON.parse(responseText).map((path, n) => ({ path, name: batch[n].path }));
  const { drop } = batch[0];
  return ask("add_images", { uploads, drop, more: waiting[batch.length]?.drop === drop });
}
