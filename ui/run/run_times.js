// Shows the UTC times of this part in the browser's own time zone and language. Files and the server keep UTC.
const brief = { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" }; // one line; the title has the rest
const form = new Intl.DateTimeFormat(
  undefined,
  element.closest("#run-head") ? brief : { dateStyle: "medium", timeStyle: "medium" }
);
const localize = () => {
  for (const time of element.querySelectorAll("time[datetime]:not([data-utc])")) {
    const when = new Date(time.dateTime);
    if (Number.isNaN(when.getTime())) continue;
    time.dataset.utc = time.textContent;
    time.title = `${time.textContent.replace(" UTC", "").replace("Z", "")} UTC`;
    time.textContent = form.format(when);
  }
};
new MutationObserver(localize).observe(element, { childList: true, characterData: true, subtree: true });
localize();
