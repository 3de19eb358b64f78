// The edited script (ui/new/script_editor.py): kept in the browser while it is typed, sent, and forgotten once the server has stored
// exactly it. Part of the images' script; like the fields (fields.js), because Gradio stops all events while the server is away.
hangproof.kinds.script = {
  async call(_, text) {
    await hangproof.sync(); // the script is compared with the one that the stored settings give
    return server.save_script({ draft: hangproof.draft(), text }).catch(() => null);
  },
  stored() {
    trigger("review");
    trigger("script");
  },
};
