// What the page says when a call of the server goes wrong.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

test("a call of the server that fails, or answers nonsense, is a sentence", async () => {
  const { reply } = load(["dom"], ["reply"]);
  assert.deepEqual(await reply(Promise.resolve({ ok: true, n: 1 })), { ok: true, n: 1 });
  for (const call of [Promise.reject(new Error("x")), Promise.resolve(null), Promise.resolve({ ok: "yes" })]) {
    const { ok, error } = await reply(call);
    assert.equal(ok, false);
    assert.match(error, /does not answer/);
  }
});
