// Says "Not connected" on every tab while the server does not answer: what the page shows of a run is then old, and no button works.
// Any HTTP answer counts, so an ended login is not taken for a dead server. Other scripts may listen to the two events.
// A server that was started again does not know what is in the open folds, so the page loads itself again then. What was typed is kept.
const EVERY_MS = 2000;
const PATIENCE_MS = 5000; // for a server that accepts the request and does not answer it
const banner = document.createElement("div");
banner.className = "hp-offline-banner";
banner.setAttribute("role", "alert");
const headline = document.createElement("strong");
headline.textContent = "Not connected";
const advice = document.createElement("span");
advice.textContent =
  "Hangproof does not answer. A run that was started continues without it. This page shows the current state again as soon as Hangproof answers; if you closed it, start it again.";
banner.append(headline, advice);
let offline = false;

// The pill and the age of the last progress are replaced in place: they would claim something that nobody knows.
const mark = () => {
  for (const part of document.querySelectorAll("#run-head [data-testid=state], #run-head .hp-ago")) {
    if (offline && part.dataset.known === undefined) {
      part.dataset.known = part.textContent;
      part.textContent = part.matches(".hp-ago") ? "unknown" : "Not connected";
    } else if (!offline && part.dataset.known !== undefined) {
      part.textContent = part.dataset.known;
      delete part.dataset.known;
    }
  }
};
const show = (lost) => {
  if (lost === offline) return lost && mark(); // the tab was drawn meanwhile
  offline = lost;
  document.body.classList.toggle("hp-offline", lost);
  if (lost) element.after(banner);
  else banner.remove();
  mark();
  window.dispatchEvent(new CustomEvent(lost ? "hangproof-offline" : "hangproof-online"));
};
const ask = async () => {
  try {
    const url = new URL("gradio_api/app_id", document.baseURI);
    const answer = await fetch(url, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.ok) {
      const { app_id } = await answer.json();
      if (app_id !== window.gradio_config.app_id) location.reload(); // another server than the page came from
    }
    return true;
  } catch {
    return false;
  }
};
const watchServer = async () => {
  if (!element.isConnected) return; // the page drew this part again, with a watcher of its own
  if (!document.hidden) show(!(await ask()));
  setTimeout(watchServer, EVERY_MS);
};
setTimeout(watchServer, EVERY_MS);
