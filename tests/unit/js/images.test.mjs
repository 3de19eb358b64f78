import assert from "node:assert/strict";
import { test } from "node:test";
import { load, nothing, storage } from "./page.mjs";

const NAMES = ["image_cards", "crop_tool", "mask_painter", "image_editor", "image_drops", "image_tools", "images"];
const listed = (caption) => ({
  ...{ draft: "d1", page: 0, query: { kind: "", text: "", folder: null }, size: 12, pages: 1 },
  ...{ total: 1, found: 1, waiting: [], texts: 0, history: ["", ""], subsets: [], items: [] },
  caption,
});

/** What the images' script gives these names. */
const images = (names, more) =>
  load(["dom", "unsaved", "new/fields", ...NAMES.map((name) => `dataset/${name}`)], names, {
    ...{ localStorage: storage(), sessionStorage: storage(), Option: nothing, Cropper: nothing },
    ...more,
  });

test("a list that is older than another answer, or of the page before, is asked for again and not shown", async () => {
  const asked = [];
  const props = { value: listed("") };
  const image_action = ({ action }) => new Promise((answer) => asked.push([action, answer]));
  const { ask, change } = images(["ask", "change"], { props, server: { image_action } });
  const changed = change("insert_trigger", {});
  const saved = ask("save_caption", {});
  asked[1][1]({ ok: true, history: ["caption of a.png", ""] });
  await saved;
  asked[0][1]({ ok: true, list: listed("from before the caption") });
  await new Promise(setImmediate);
  assert.equal(props.value.caption, "");
  assert.deepEqual(asked.map(([action]) => action), ["insert_trigger", "save_caption", "list_images"]);
  asked[2][1]({ ok: true, list: listed("typed") });
  await changed;
  assert.equal(props.value.caption, "typed");
  change("insert_trigger", {});
  props.value = { ...props.value, page: 1 };
  asked[3][1]({ ok: true, list: listed("of the page before") });
  await new Promise(setImmediate);
  assert.deepEqual([props.value.caption, asked.length, asked.at(-1)[0]], ["typed", 5, "list_images"]);
});

test("a file of a dropped folder that the browser cannot read costs only itself", async () => {
  const { filesOf } = images(["filesOf"]);
  const file = (name, act) => ({ isFile: true, fullPath: `/set/${name}`, file: act });
  const parts = [[file("a.png", (done) => done("A")), file("b.png", (_, failed) => failed(new Error("no permission")))], []];
  const readEntries = (done, failed) => (parts.length ? done(parts.shift()) : failed(new Error("gone")));
  const found = await filesOf({ fullPath: "/set", createReader: () => ({ readEntries }) });
  assert.deepEqual(found.map((one) => one.path), ["set/a.png", "set/b.png"]);
  assert.deepEqual([found[0].file, found[1].error.message], ["A", "no permission"]);
});
