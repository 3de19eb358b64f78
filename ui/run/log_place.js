// The log (ui/run/log_view.py) is drawn from its end; a line that was asked for is brought into view, and who scrolls up stays there.
const showPlace = () => element.querySelector(".hp-log-here")?.scrollIntoView({ block: "center" });
new MutationObserver(showPlace).observe(element, { childList: true, subtree: true });
element.addEventListener("scroll", ({ target }) => target.scrollTop < -12 && trigger("scroll_up"), true);
