// "Check images" in step 2: the findings with their fixes, and the buckets (ui/dataset/doctor.py). Part of the images' script,
// after images.js. A check runs on the server's machine; this only shows how far it is. Every text is set with textContent.
{
  const { panel, head, title, summary, meter, problem, close, opener, succeeded } = toolPanel({
    id: "image-check",
    cls: "hp-check",
    title: "Check images",
    label: "Check of the images",
    testid: "check-images",
    meter: "Images checked",
    toggle,
  });
  const again = button("Check again", "hp-quiet", () => run());
  const cancel = button("Cancel", "hp-quiet", () => ask("doctor_cancel", {}).then(() => refresh()));
  const takeBack = button("Undo", "hp-link", () => step("undo").then(() => refresh()));
  const list = make("div", "hp-check-list");
  const buckets = make("details", "hp-fold hp-buckets");
  buckets.dataset.testid = "buckets";
  head.append(title, again, cancel, close);
  panel.append(head, summary, meter, problem, list, buckets);

  const open = new Set(); // kinds whose images are shown
  let report = null;
  let drawn = "";
  let message = "";
  let timer = null;
  let seen = "";
  const plural = (n, one, many) => (n === 1 ? `1 ${one}` : `${n.toLocaleString("en")} ${many || one + "s"}`);
  const busy = () => report?.job?.state === "running";

  async function toggle(show) {
    panel.hidden = !show;
    opener.setAttribute("aria-expanded", String(show));
    clearTimeout(timer);
    if (!show) return opener.focus();
    title.focus();
    await flush();
    await refresh();
    if (report && report.unmeasured && !busy()) run();
  }
  async function run() {
    message = "";
    await flush();
    const answer = await ask("doctor_start", {});
    succeeded(answer);
    await refresh();
  }
  async function refresh() {
    clearTimeout(timer);
    if (panel.hidden) return;
    seen = changesSeen();
    const answer = await ask("doctor_report", {});
    if (answer?.ok === true) {
      const ended = busy() && answer.job?.state !== "running";
      report = answer;
      draw();
      if (ended) await reload();
    } else if (answer) succeeded(answer);
    timer = setTimeout(poll, busy() ? 700 : 1500);
  }
  // An edit of the cards changes the findings; a job, how far it is.
  const changesSeen = () => [state().draft, state().total, undo.textContent, redo.textContent].join("\n");
  async function poll() {
    if (!busy()) {
      if (changesSeen() !== seen) return refresh();
      timer = setTimeout(poll, 1500);
      return;
    }
    const answer = await ask("doctor_report", { light: true }); // all findings anew would slow the check down
    if (answer?.ok !== true || answer.job?.state !== "running" || panel.hidden) return refresh();
    report.job = answer.job;
    draw();
    timer = setTimeout(poll, 700);
  }
  async function fix(kind, ids) {
    problem.hidden = true;
    await flush();
    const answer = await ask("doctor_fix", { kind, ids });
    if (succeeded(answer)) {
      message = answer.message;
      hangproof.tellOthers();
      await reload();
      hangproof.sync();
    }
    await refresh();
    title.focus();
  }

  function draw() {
    const job = report.job;
    meter.hidden = !busy();
    cancel.hidden = !busy();
    again.hidden = busy();
    if (busy()) {
      meter.max = Math.max(1, job.total);
      meter.value = job.done;
      summary.textContent = job.total ? `${job.done.toLocaleString("en")} of ${plural(job.total, "image")} looked at…` : "Starting…";
    } else {
      const number = report.kinds.length;
      const left = report.unmeasured;
      const parts = [message];
      if (job?.state === "failed") parts.push(`The check failed: ${job.error || "try again"}.`);
      if (left) parts.push(`${plural(left, "image")} not looked at yet; press “Check again”.`);
      else if (!report.total) parts.push("There are no images.");
      else parts.push(number ? `Found in ${plural(report.total, "image")}:` : `Nothing found in ${plural(report.total, "image")}.`);
      summary.replaceChildren(parts.filter(Boolean).join(" "), ...(message ? [" ", takeBack] : []));
    }
    const now = JSON.stringify([report.kinds, report.buckets, report.plan_error, report.history, report.unmeasured]);
    if (now === drawn) return;
    drawn = now;
    const kinds = new Set(report.kinds.map((one) => one.kind));
    for (const kind of open) if (!kinds.has(kind)) open.delete(kind);
    list.replaceChildren(...report.kinds.map(finding));
    drawBuckets();
  }
  function finding(one) {
    const node = make("details", "hp-fold hp-kind");
    node.dataset.kind = one.kind;
    node.open = open.has(one.kind);
    const heading = make("summary");
    heading.append(make("strong", "", one.title));
    const body = make("div", "hp-fold-body");
    const row = make("div", "hp-actions-row");
    if (one.fix_all) row.append(button(one.fix_all, "", () => fix(one.kind, null)));
    if (one.write) row.append(button("Write captions…", "", () => write(one.kind)));
    const pictures = make("div", "hp-found");
    body.append(make("p", "hp-hint", one.about), row, pictures);
    node.append(heading, body);
    const fill = () => more(pictures, { kind: one.kind }, (image) => card(image, one));
    node.addEventListener("toggle", () => {
      node.open ? open.add(one.kind) : open.delete(one.kind);
      if (node.open && !pictures.childElementCount) fill();
    });
    if (node.open) fill();
    return node;
  }
  /** Add the next images of a finding or a bucket, and a button for those after them. */
  async function more(pictures, of, make_card) {
    const next = pictures.querySelector(".hp-more");
    const first = pictures.querySelectorAll("figure").length;
    if (next) next.disabled = true;
    const answer = await ask("doctor_images", { ...of, first });
    if (answer?.ok !== true) return succeeded(answer);
    next?.remove();
    pictures.append(...answer.images.map(make_card));
    const left = answer.count - first - answer.images.length;
    if (left > 0) pictures.append(button(`Show more (${left.toLocaleString("en")})`, "hp-quiet hp-more", () => more(pictures, of, make_card)));
    if (next) pictures.querySelectorAll("figure")[first]?.querySelector("button")?.focus();
  }
  /** A thumbnail; what the trainer cuts off is darkened. */
  function picture(image, cut) {
    const box = make("div", "hp-whole");
    if (image.thumb) {
      const shown = make("img");
      shown.loading = "lazy";
      shown.src = image.thumb;
      shown.alt = image.file;
      box.append(shown);
    } else box.append(make("span", "hp-no-picture", "no picture"));
    if (cut && image.thumb && image.kept < 0.9995) {
      const part = make("div", "hp-part");
      const [left, top, right, bottom] = image.part.map((one) => one * 100);
      Object.assign(part.style, { left: `${left}%`, top: `${top}%`, width: `${right - left}%`, height: `${bottom - top}%` });
      box.append(part);
    }
    return box;
  }
  function card(image, one) {
    const figure = make("figure");
    figure.dataset.file = image.file;
    const pair = make("div", "hp-pair");
    pair.append(picture(image, ["cropped", "lonely"].includes(one.kind)));
    if (image.other_thumb) {
      const other = picture({ thumb: image.other_thumb, file: image.other, kept: 1 }, false);
      other.classList.add("hp-kept");
      other.title = `Kept: ${image.other}`;
      pair.append(other);
    }
    const text = make("figcaption");
    text.append(make("span", "hp-name", image.file));
    if (image.detail) text.append(make("span", "", image.detail));
    if (image.other) text.append(make("span", "", `Kept instead: ${image.other}`));
    figure.append(pair, text);
    const label = one.fix_one || one.fix_all;
    if (label) {
      const act = button(label, "hp-link", () => fix(one.kind, [image.id]));
      act.setAttribute("aria-label", `${label}: ${image.file}`);
      figure.append(act);
    }
    return figure;
  }
  async function write(kind) {
    const answer = await ask("doctor_images", { kind, all: true });
    if (!succeeded(answer)) return;
    selected.clear();
    select(answer.ids);
    openWriter();
    document.querySelector("#caption-writer").scrollIntoView();
  }

  function drawBuckets() {
    const few = report.buckets.filter((one) => one.few).length;
    const heading = make("summary");
    const text = report.plan_error
      ? "not known while step 1 has an error"
      : `${plural(report.buckets.length, "bucket")} at ${report.resolution} pixels` + (few ? `, ${few} smaller than a batch` : "");
    heading.append(make("strong", "", "Buckets"), make("span", "", report.total ? text : ""));
    const body = make("div", "hp-fold-body");
    if (report.plan_error) body.append(make("p", "hp-hint hp-missing", report.plan_error));
    else {
      body.append(
        make("p", "hp-hint", "An image is scaled to cover its bucket and cropped at the centre. The dark parts are cut off. A batch holds images of one bucket.")
      );
      for (const one of report.buckets) body.append(bucketRow(one));
    }
    buckets.replaceChildren(heading, body);
    buckets.hidden = !report.total;
  }
  function bucketRow(one) {
    const node = make("details", "hp-bucket");
    const heading = make("summary");
    const size = `${one.size[0]} × ${one.size[1]}` + (one.folder ? ` · ${one.folder}` : "");
    const counts = plural(one.images, "image") + (one.shown === one.images ? "" : `, ${one.shown.toLocaleString("en")} an epoch`);
    heading.append(make("strong", "", size), make("span", "", counts));
    if (one.few) heading.append(make("span", "hp-few", "smaller than a batch"));
    const pictures = make("div", "hp-found");
    node.append(heading, pictures);
    node.addEventListener("toggle", () => {
      if (!node.open || pictures.childElementCount) return;
      more(pictures, { bucket: one.number }, (image) => {
        const figure = make("figure");
        const text = make("figcaption");
        const cut = image.kept < 0.9995 ? `${Math.round(image.kept * 100)} % kept` : "all of it is trained";
        text.append(make("span", "hp-name", image.file), make("span", "", cut));
        figure.append(picture(image, true), text);
        return figure;
      });
    });
    return node;
  }
}
