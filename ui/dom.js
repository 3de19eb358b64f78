// What all scripts of the page use (ui/scripts.py). Elements are built with textContent, never from markup.
// more: its text, properties of the node, or a list of what is in it.
const make = (tag, cls, more) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (Array.isArray(more)) node.append(...more);
  else if (typeof more === "object") Object.assign(node, more);
  else if (more !== undefined) node.textContent = more;
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
/** A field with its label above it. */
const labelled = (text, field) => {
  const label = make("label", "", text);
  field.id ||= `hp-field-${random()}`;
  label.htmlFor = field.id;
  return make("div", "hp-labelled", [label, field]);
};
