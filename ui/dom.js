// What all scripts of the page use (ui/scripts.py). Elements are built with textContent, never from markup.
// more: its text, properties of the node (its events, too), or a list of what is in it.
const make = (tag, cls, more) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (Array.isArray(more)) node.append(...more);
  else if (typeof more === "object") Object.assign(node, more);
  else if (more !== undefined) node.textContent = more;
  return node;
};
const button = (text, cls, act) => make("button", "hp-button " + cls, { textContent: text, type: "button", onclick: act });
// Text that changes: a screen reader says each change. role: "status", or "alert" for what went wrong.
const live = (tag, cls, role) => make(tag, cls, { role });
/** A field with its label above it. */
const labelled = (text, field) => {
  field.id ||= `hp-field-${random()}`;
  return make("div", "hp-labelled", [make("label", "", { textContent: text, htmlFor: field.id }), field]);
};
