// Loads the page again when a file of it does not arrive: the network changed, or the server stopped. It is in the
// page's head, because each other script can be the file that is missing. Before the page is open, nothing has been
// typed that could be lost.
(() => {
  const KEY = "hangproof-again"; // how often this tab tried
  const MOST = 20;
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const answers = () => fetch("gradio_api/app_id", { cache: "no-store" }).then(() => true, () => false);
  let begun = false;
  const again = async () => {
    if (begun || document.body?.classList.contains("hp-open")) return;
    begun = true;
    const tries = Number(sessionStorage[KEY]) || 0;
    sessionStorage[KEY] = (tries + 1) % (MOST + 1);
    if (tries === MOST) {
      document.body.prepend("A file of this page does not arrive. Reload the page; if that does not help, start Hangproof again.");
      return;
    }
    await pause(Math.min(250 * 2 ** tries, 10_000));
    while (!(await answers())) await pause(2000);
    location.reload();
  };
  addEventListener("vite:preloadError", again); // a part of Gradio's code, or of ours (ui/scripts.py)
  addEventListener(
    "error",
    ({ target }) => target instanceof Element && target.matches("script, link[rel=stylesheet], link[rel=modulepreload]") && again(),
    true,
  );
  addEventListener("hangproof-open", () => sessionStorage.removeItem(KEY));
})();
