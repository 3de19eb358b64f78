import assert from "node:assert/strict";
import { test } from "node:test";
import { load, nothing } from "./page.mjs";

const page = { make: nothing, live: nothing, button: nothing, matchMedia: nothing };
const { shortNumber, stepText, smoothed, valueRange } = load(["run/charts"], ["shortNumber", "stepText", "smoothed", "valueRange"], page);

test("a number is short at any size", () => {
  const expected = [[0.123456, "0.1235"], [1e-4, "1e-4"], [0.00012345, "1.23e-4"], [1234567, "1.23e6"], [-2e9, "-2e9"], [0, "0"], [42, "42"]];
  for (const [value, text] of expected) assert.equal(shortNumber(value), text);
  for (const value of [null, undefined, NaN, Infinity]) assert.equal(shortNumber(value), "–");
});

test("a place on the axis is said as a step", () => assert.equal(stepText(1900.4), "step 1,900"));

test("the smoothed line starts at the first value and follows the mean", () => {
  assert.deepEqual(smoothed([2, 2, 2], 0.9), [2, 2, 2]);
  const line = smoothed([0, 1, 1, 1, 1], 0.5);
  assert.equal(line[0], 0);
  assert.deepEqual(line, [...line].sort((a, b) => a - b));
  assert.ok(line.at(-1) > 0.9 && line.at(-1) < 1);
  assert.deepEqual(smoothed([3, 5], 0), [3, 5]);
});

test("a single spike does not flatten the line", () => {
  const means = [...Array(400).fill(1), 1e6];
  assert.deepEqual(valueRange(means, means), [1, 1]);
  assert.deepEqual(valueRange([1, 7], [3, 7]), [1, 7]);
  assert.deepEqual(valueRange([], []), [Infinity, undefined]);
});
