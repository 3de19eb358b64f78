// What all scripts of the page use (ui/scripts.py). Elements are built with textContent, never from markup.
const make = (tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};
const button = (text, cls, act) => {
  const node = make("button", "hp-button " + cls, text);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
};
// Text that changes: a screen reader says each change. role: "status", or "alert" for what went wrong.
const live = (tag, cls, role) => {
  const node = make(tag, cls);
  node.setAttribute("role", role);
  return node;
};
// A box with scroll bars that the keyboard reaches.
const region = (cls, label) => {
  const node = make("div", cls);
  node.tabIndex = 0;
  node.setAttribute("role", "region");
  node.setAttribute("aria-label", label);
  return node;
};
// A fold with a title and what it is for; the caller fills `body`.
const folding = (title, about, testid, cls = "") => {
  const node = make("details", `hp-fold ${cls}`.trim());
  if (testid) node.dataset.testid = testid;
  const heading = make("summary");
  heading.append(make("strong", "", title), make("span", "", about));
  const body = make("div", "hp-fold-body");
  node.append(heading, body);
  return { node, body };
};
// What a call of the server returns: {ok: true, …} or {ok: false, error}, also where no answer comes.
const reply = async (call) => {
  const answer = await call.catch(() => null);
  return answer && typeof answer.ok === "boolean" ? answer : { ok: false, error: "The server does not answer. Try again." };
};
