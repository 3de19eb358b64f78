// Loads scripts of ui/ as the page does: pasted in one function (ui/scripts.py), with stand-ins for the browser.
import { readFileSync } from "node:fs";

const read = (name) => readFileSync(new URL(`../../../ui/${name}.js`, import.meta.url), "utf8");

// Has every property and can be called: what a script does with elements while it loads has no effect.
export const nothing = new Proxy(function () {}, {
  get: (_, key) => (key === Symbol.toPrimitive ? () => "" : nothing),
  set: () => true,
  apply: () => nothing,
  construct: () => nothing,
});
// An object with some properties; it has every other one too.
export const some = (own) => new Proxy(own, { get: (target, key) => (key in target ? target[key] : nothing) });

// As a browser's: strings by key, which Object.keys lists.
export const storage = () => {
  const methods = {
    getItem: (store, key) => store[key] ?? null,
    setItem: (store, key, value) => void (store[key] = `${value}`),
    removeItem: (store, key) => void delete store[key],
  };
  const get = (store, key) => (key in methods ? (...values) => methods[key](store, ...values) : store[key]);
  return new Proxy({}, { get });
};

/** The values that the scripts `files` give the names `names`. `globals`: stand-ins of a test, by name. */
export function load(files, names, globals = {}) {
  const all = {
    ...Object.fromEntries(["element", "document", "window", "localStorage", "sessionStorage"].map((name) => [name, nothing])),
    ...Object.fromEntries(["Mutation", "Intersection", "Resize"].map((name) => [`${name}Observer`, nothing])),
    ...{ props: {}, server: nothing, trigger: nothing, watch: nothing, setTimeout: () => 1, setInterval: () => 1 },
    ...globals,
  };
  const source = `"use strict";\n${files.map(read).join("\n")}\nreturn { ${names.join(", ")} };`;
  return new Function(...Object.keys(all), source)(...Object.values(all));
}
