// A panel below the tools, with the button there that opens it: "Check images" and "Write captions". Part of the images' script,
// after images.js.
function toolPanel({ id, cls, title: text, label, testid, meter: measured, toggle }) {
  const panel = make("section", cls);
  panel.id = id;
  panel.hidden = true;
  panel.setAttribute("aria-label", label);
  const head = make("div", "hp-check-head");
  const title = make("h3", "", text);
  title.tabIndex = -1;
  const summary = live("p", "hp-check-status", "status");
  const meter = make("progress");
  meter.setAttribute("aria-label", measured);
  const problem = live("p", "hp-check-problem hp-bad", "alert");
  problem.hidden = true;
  const close = button("Close", "hp-quiet", () => toggle(false));
  tools.after(panel);
  const opener = button(text, "hp-quiet", () => toggle(panel.hidden));
  opener.setAttribute("aria-expanded", "false");
  opener.setAttribute("aria-controls", id);
  opener.dataset.testid = testid;
  tools.append(opener);
  /** Show why a call failed. Returns whether it did what it should. */
  const succeeded = (answer) => {
    problem.textContent = answer?.ok === true ? "" : answer?.error || "The server does not answer. Try again.";
    problem.hidden = !problem.textContent;
    return answer?.ok === true;
  };
  return { panel, head, title, summary, meter, problem, close, opener, succeeded };
}
