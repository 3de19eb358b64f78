// "Write captions" in step 2: the form, and how far the job is (ui/dataset/captioning.py). Part of the images' script, after
// images.js. The job runs on the server's machine and stores each caption there. Every text is set with textContent.
{
  const ENGINES = [
    ["florence", "Florence-2", "Sentences. Runs on this machine."],
    ["tagger", "Tagger", "Danbooru tags, for anime and illustrations. Runs on this machine."],
    ["endpoint", "Server", "Any server with OpenAI's API: Ollama, LM Studio, vLLM, or a provider."],
  ];
  const TASKS = [["short", "One short sentence"], ["detailed", "A few sentences"], ["long", "A paragraph"]];
  const WHICH = [
    ["empty", "Images without a caption"],
    ["model", "Also captions that a model wrote"],
    ["all", "All images"],
  ];
  const ENDED = {
    done: "Finished.",
    failed: "Stopped.",
    cancelled: "Cancelled.",
    lost: "Interrupted, for example because the machine restarted.",
  };
  const IDLE_S = 5; // between two questions while no job is known
  const { panel, head, title, summary, meter, problem, close, opener, succeeded } = toolPanel({
    id: "caption-writer",
    cls: "hp-captions",
    title: "Write captions",
    label: "Write captions",
    testid: "write-captions",
    meter: "Captions written",
    toggle,
  });
  head.append(title, close);
  const form = make("form", "hp-captions-form");
  form.noValidate = true;
  const line = make("p", "hp-hint");
  const failures = make("details", "hp-fold");
  const cancel = button("Cancel", "hp-quiet", () => call("captions_cancel", {}));
  const resume = button("Continue", "", () => call("captions_resume", {}));
  const job = make("div", "hp-captions-job");
  const row = make("div", "hp-actions-row");
  row.append(resume, cancel);
  job.append(summary, meter, line, row, failures);
  panel.append(head, job, form, problem);

  let known = null; // what the form needs
  let status = null;
  let only = null; // ids that another part chose
  let shown = ""; // the job and its progress that the cards show, or are about to
  let due = false; // captions are stored that the cards do not show
  let draft = "";
  let met = false; // whether the server has said something of this draft
  let idle = 0; // seconds since it was asked
  const number = (n) => n.toLocaleString("en");
  const running = () => status?.state === "running";

  async function toggle(show, ids) {
    panel.hidden = !show;
    opener.setAttribute("aria-expanded", String(show));
    if (!show) return opener.focus();
    only = ids || null;
    await flush();
    const answer = await ask("captions_form", {});
    if (succeeded(answer)) {
      known = answer;
      drawForm();
      take(answer.status);
    }
    title.focus();
  }
  hangproof.writeCaptions = (ids) => toggle(true, ids);
  async function call(name, data) {
    const answer = await ask(name, data);
    if (succeeded(answer)) take(answer.status);
    return answer?.ok === true;
  }

  // The job ---------------------------------------------------------------------------------------------------------------
  /** Show a status; the cards show the captions that are new. */
  function take(found) {
    const ended = status?.state === "running" && found.state !== "running";
    status = found;
    // The first time too: a job can end between the moment when the cards were drawn and this one.
    const now = `${found.job} ${found.done} ${found.state}`;
    due ||= now !== shown && found.done > 0;
    shown = now;
    drawJob();
    if (due) showCaptions();
    if (ended) hangproof.sync();
  }
  /** A reload that fails is tried again with the next status. */
  async function showCaptions() {
    due = false;
    due = !(await reload()) || due;
  }
  function left() {
    const each = status.done > 0 ? status.seconds / status.done : 0;
    const seconds = Math.round(each * (status.total - status.done));
    if (!each || seconds < 5) return "";
    return seconds < 90 ? `, about ${seconds} s left` : `, about ${Math.round(seconds / 60)} min left`;
  }
  function drawJob() {
    const { state: now, done: count, total, line: text, failures: failed, error } = status;
    const busy = running();
    job.hidden = !now;
    form.hidden = busy;
    opener.textContent = busy ? `Writing captions: ${number(count)} of ${number(total)}` : "Write captions";
    if (!now) return;
    const counted = `${number(count)} of ${number(total)} captions written`;
    summary.textContent = busy ? `${counted}${left()}.` : `${ENDED[now] || now} ${counted}.`;
    summary.dataset.state = now;
    meter.hidden = !busy;
    meter.max = Math.max(1, total);
    meter.value = count;
    line.textContent = busy ? text : "";
    line.hidden = !line.textContent;
    cancel.hidden = !busy;
    resume.hidden = busy || count >= total;
    row.hidden = cancel.hidden && resume.hidden;
    if (error && !busy) {
      problem.textContent = error;
      problem.hidden = false;
    } else if (busy) problem.hidden = true;
    failures.hidden = !failed.length;
    const heading = make("summary");
    heading.append(make("strong", "", failed.length === 1 ? "1 image has no caption" : `${failed.length} images have no caption`));
    const items = make("ul");
    items.append(...failed.map((one) => make("li", "", one)));
    failures.replaceChildren(heading, items);
  }

  // The form --------------------------------------------------------------------------------------------------------------
  const fields = {};
  function labelled(text, input, hint) {
    const label = make("label", "hp-captions-field");
    label.append(make("span", "", text), input);
    if (hint) {
      const small = make("small", "", hint);
      small.id = `captions-hint-${input.name}`;
      input.setAttribute("aria-describedby", small.id);
      label.append(small);
    }
    return label;
  }
  function input(name, value, kind = "text", extra = {}) {
    const node = make(kind === "area" ? "textarea" : "input", "hp-text");
    node.name = name;
    if (kind !== "area") node.type = kind;
    Object.assign(node, extra);
    if (kind === "checkbox") node.checked = Boolean(value);
    else node.value = value;
    fields[name] = node;
    return node;
  }
  function select(name, options, value) {
    const node = make("select", "hp-select");
    node.name = name;
    for (const [key, text] of options) node.append(new Option(text, key));
    if (options.some(([key]) => key === value)) node.value = value;
    fields[name] = node;
    return node;
  }
  function check(name, text, value) {
    const label = make("label", "hp-captions-check");
    label.append(input(name, value, "checkbox"), make("span", "", text));
    return label;
  }
  function radios(name, legend, options, value) {
    const set = make("fieldset", "hp-captions-choice");
    set.append(make("legend", "", legend));
    for (const [key, text, hint] of options) {
      const label = make("label");
      const one = make("input");
      one.type = "radio";
      one.name = name;
      one.value = key;
      one.checked = key === value;
      label.append(one, make("span", "", text));
      if (hint) label.append(make("small", "", hint));
      set.append(label);
    }
    return set;
  }
  const chosen = (name) => form.querySelector(`input[name=${name}]:checked`)?.value || "";

  function drawForm() {
    const last = known.options;
    for (const name of Object.keys(fields)) delete fields[name];
    const engine = radios("engine", "Written by", ENGINES, last.engine || "florence");
    const parts = Object.fromEntries(ENGINES.map(([key]) => [key, make("div", "hp-captions-grid")]));
    for (const key of ["florence", "tagger"]) {
      const models = known.models.filter((one) => one.engine === key);
      const own = last.engine === key && last.model && !models.some((one) => one.key === last.model) ? last.model : "";
      const node = select(`${key}_model`, [...models.map((one) => [one.key, one.name]), ["", "A folder of mine"]], own ? "" : last.model);
      const field = labelled("Model", node);
      const note = make("small");
      note.id = `captions-note-${key}`;
      node.setAttribute("aria-describedby", note.id);
      const folder = labelled("Folder of the model", input(`${key}_folder`, own, "text", { placeholder: "/path/to/model" }));
      const show = () => {
        const model = models.find((one) => one.key === node.value);
        note.textContent = model ? `${model.note} ${model.licence}; ${model.size}.` : "";
        folder.hidden = Boolean(model);
      };
      node.addEventListener("change", show);
      field.append(note);
      show();
      parts[key].append(field, folder);
    }
    parts.florence.append(labelled("Length", select("task", TASKS, last.task || "detailed")));
    const share = { min: 0.01, max: 1, step: 0.01 };
    parts.tagger.append(
      labelled("Threshold", input("general", last.general ?? 0.35, "number", share), "Tags at least this probable are written"),
      labelled("Threshold of characters", input("character", last.character ?? 0.85, "number", share)),
      labelled("Leave out", input("without", last.without || "", "text", { placeholder: "simple background, solo" }), "Tags, separated by commas"),
      check("underscores", "Keep underscores in tags", last.underscores)
    );
    parts.endpoint.append(
      labelled("Address", input("url", last.url || "", "url", { placeholder: known.url }), "Each image is sent there, scaled down to 1,024 pixels"),
      labelled("Model", input("endpoint_model", last.engine === "endpoint" ? last.model : "", "text", { placeholder: "qwen2.5vl:7b" })),
      labelled(
        "Variable with the API key",
        input("key_variable", last.key_variable || "", "text", { placeholder: "OPENAI_API_KEY", autocomplete: "off" }),
        "The name of an environment variable that Hangproof was started with. Empty: no key"
      ),
      labelled("Instruction", input("prompt", last.prompt || known.prompt, "area", { rows: 3 }))
    );
    fields.prompt.parentElement.classList.add("hp-captions-wide");
    const frame = make("div", "hp-captions-grid");
    frame.append(
      labelled("Text before each caption", input("prefix", last.prefix || "")),
      labelled("Text after each caption", input("suffix", last.suffix || ""))
    );
    const first = check("first", known.trigger ? `Put the trigger word “${known.trigger}” first` : "Put the trigger word first", known.trigger);
    fields.first.disabled = !known.trigger;

    const { empty, model, all, person } = known.counts;
    const which = radios("which", "For", WHICH.map(([key, text]) => [key, `${text} (${number({ empty, model, all }[key])})`]), only ? "all" : "empty");
    const ids = only || [...selected];
    const some = check("some", ids.length === 1 ? "Only the selected image" : `Only the ${number(ids.length)} selected images`, ids.length);
    some.hidden = !ids.length;
    fields.some.checked = Boolean(ids.length);
    const over = check("overwrite", `Replace captions that I wrote or that came from files (${number(person)})`, false);
    const go = button("Write captions", "hp-primary", () => {});
    go.type = "submit";
    const update = () => {
      for (const [key] of ENGINES) parts[key].hidden = chosen("engine") !== key;
      over.hidden = chosen("which") !== "all" || !person;
    };
    form.replaceChildren(engine, ...Object.values(parts), frame, first, which, some, over, go);
    form.onchange = update;
    form.onsubmit = async (event) => {
      event.preventDefault();
      go.disabled = true;
      await flush();
      await start(ids);
      go.disabled = false;
    };
    update();
  }
  async function start(ids) {
    const engine = chosen("engine");
    const value = (name) => fields[name].value.trim();
    const options = { engine, prefix: fields.prefix.value, suffix: fields.suffix.value };
    options.trigger = fields.first.checked ? known.trigger : "";
    if (engine === "endpoint") {
      Object.assign(options, { url: value("url"), model: value("endpoint_model"), key_variable: value("key_variable"), prompt: value("prompt") });
    } else options.model = fields[`${engine}_model`].value || value(`${engine}_folder`);
    if (engine === "florence") options.task = fields.task.value;
    if (engine === "tagger") {
      const general = Number(fields.general.value);
      Object.assign(options, { general, character: Number(fields.character.value), without: value("without"), underscores: fields.underscores.checked });
    }
    const data = { options, which: chosen("which"), overwrite: fields.overwrite.checked };
    if (ids.length && fields.some.checked) data.ids = ids;
    if (await call("captions_start", data)) title.focus();
  }
  // A job of an earlier page is shown as soon as its draft is, and one of another browser soon after its start.
  async function look() {
    idle = 0;
    const answer = await ask("captions_status", {});
    if (answer?.ok !== true) return hangproof.lost();
    take(answer.status);
    if (!met && running() && panel.hidden) toggle(true);
    met = true;
  }
  async function follow() {
    if (state().draft !== draft) {
      draft = state().draft;
      status = null;
      shown = "";
      met = false;
    }
    const wanted = !met || running() || due || ++idle >= IDLE_S;
    if (draft && wanted && !document.hidden && element.checkVisibility()) await look();
    setTimeout(follow, 1000);
  }
  follow();
}
