// The edited script (ui/new/script_editor.py): kept in the browser while it is typed, sent, and forgotten once the server has stored
// exactly it. Part of the images' script; like the fields (fields.js), because Gradio stops all events while the server is away.
const TYPE_MS = 500;
let scriptTimer = null;
let sendingScript = null;

/** The editor has another text, typed by a person. */
hangproof.typedScript = (text) => {
  if (typeof text !== "string") return;
  hangproof.keep("script", "text", text);
  clearTimeout(scriptTimer);
  scriptTimer = setTimeout(hangproof.flushScript, TYPE_MS);
};
/** Send what was typed. Resolves to whether the server has everything. */
hangproof.flushScript = () => {
  clearTimeout(scriptTimer);
  sendingScript ||= sendScript().finally(() => (sendingScript = null));
  return sendingScript;
};
async function sendScript() {
  await hangproof.sync(); // the script is compared with the one that the stored settings give
  for (let text; (text = hangproof.unsavedText("script", "text")) !== undefined; ) {
    const answer = await server.save_script({ draft: hangproof.draft(), text }).catch(() => null);
    if (typeof answer?.ok !== "boolean") hangproof.lost();
    else if (!answer.ok) hangproof.refuse(answer.error);
    if (!answer?.ok) return false;
    hangproof.confirmed("script", "text", text);
    trigger("review");
    trigger("script");
    hangproof.tellOthers();
  }
  return true;
}
hangproof.onBack(hangproof.flushScript);
