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
