import assert from "node:assert/strict";
import { test } from "node:test";
import { load, some, storage } from "./page.mjs";

/** The loads and the states of a page whose server answers like this, one look after the other, and how often the page asked
 * again for what the server has. lost: before the first look, an answer to something else did not arrive. */
async function looks(answers, lost = false) {
  let reloads = 0;
  let again = 0;
  let look;
  const states = [];
  const { hangproof } = load(["dom", "unsaved"], ["hangproof"], {
    document: some({ hidden: false, baseURI: "http://127.0.0.1:7860/", querySelectorAll: () => [] }),
    window: { gradio_config: { app_id: "a" } },
    localStorage: storage(),
    sessionStorage: storage(),
    location: { reload: () => (reloads += 1) },
    setTimeout: (act) => (look = act),
    fetch: async () => {
      const next = answers.shift();
      if (next === null) throw new TypeError("Failed to fetch");
      return typeof next === "number" ? new Response("", { status: next }) : new Response(JSON.stringify({ app_id: next }));
    },
  });
  hangproof.on("back", async () => (again += 1));
  if (lost) await hangproof.lost();
  while (answers.length) {
    await look();
    states.push(hangproof.trouble());
  }
  return [reloads, states, again];
}

test("a page that is open while its server is started again loads itself again", async () => {
  assert.deepEqual(await looks(["a", null, "b"]), [1, ["", "offline", ""], 1]);
  assert.deepEqual(await looks([null, "b"]), [1, ["offline", ""], 1]); // before the first look
});

test("the server's answer decides whether it is away or the login has ended", async () => {
  const answers = ["a", null, "a", 401, 403, 500, "a", 503, "a"];
  assert.deepEqual(await looks([...answers]), [0, ["", "offline", "", "login", "login", "offline", "", "offline", ""], 3]);
});

test("what one answer would have shown is asked for again, although the server responds", async () => {
  assert.deepEqual(await looks(["a", "a", "a"], true), [0, ["", ""], 1]);
});
