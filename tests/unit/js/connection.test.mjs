import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

/** The loads and the banner's state of a page whose server answers like this, one look after the other. */
async function looks(answers) {
  let reloads = 0;
  let look;
  const states = [];
  load(["connection"], [], {
    element: { isConnected: true, after: () => {} },
    document: {
      hidden: false,
      baseURI: "http://127.0.0.1:7860/",
      body: { classList: { toggle: (_, on) => states.push(on ? "offline" : "online") } },
      createElement: () => ({ setAttribute() {}, append() {}, remove() {} }),
      querySelectorAll: () => [],
    },
    window: { dispatchEvent() {}, gradio_config: { app_id: "a" } },
    location: { reload: () => (reloads += 1) },
    setTimeout: (act) => (look = act),
    fetch: async () => {
      const next = answers.shift();
      if (next === null) throw new TypeError("Failed to fetch");
      return typeof next === "number" ? new Response("", { status: next }) : new Response(JSON.stringify({ app_id: next }));
    },
  });
  while (answers.length) await look();
  return [reloads, states];
}

test("a page that is open while its server is started again loads itself again", async () => {
  assert.deepEqual(await looks(["a", null, "b"]), [1, ["offline", "online"]]);
  assert.deepEqual(await looks([null, "b"]), [1, ["offline", "online"]]); // before the first look
});

test("a server that was away or asks for a login is the same one", async () => {
  assert.deepEqual(await looks(["a", null, 401, "a", 503, "a"]), [0, ["offline", "online"]]);
});
