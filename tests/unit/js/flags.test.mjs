import assert from "node:assert/strict";
import { test } from "node:test";
import { load, some } from "./page.mjs";

const area = { value: "", dispatchEvent: () => area.events++, events: 0 };
const names = ["typed", "write"];
const { typed, write } = load(["dom", "new/flags"], names, { document: some({ querySelector: () => area }) });

test("the options of the box are those with a value, and the last line wins", () => {
  area.value = "# a comment\nbetas=0.9 0.99\n--noise-offset = 0.1\nargs=a=b\nseed=1\nseed=2\nincomplete";
  assert.deepEqual([...typed()], [["betas", "0.9 0.99"], ["noise_offset", " 0.1"], ["args", "a=b"], ["seed", "2"]]);
});

test("the table changes the line of one option and leaves all other text as typed", () => {
  area.value = "# mine\nseed=1\n\nseed=2\nodd line";
  write("seed", "3");
  assert.equal(area.value, "# mine\nseed=1\n\nseed=3\nodd line");
  write("seed", null);
  assert.equal(area.value, "# mine\n\nodd line");
  write("betas", "0.9");
  assert.equal(area.value, "# mine\n\nodd line\nbetas=0.9");
  area.value = "";
  write("betas", "0.8");
  assert.equal(area.value, "betas=0.8");
  assert.equal(area.events, 4); // Gradio hears of each
});
