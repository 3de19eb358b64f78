// Scrolls the log to the line that was asked for (ui/run/log_view.py).
new MutationObserver(() => element.querySelector(".hp-log-here")?.scrollIntoView({ block: "center" })).observe(element, { childList: true, subtree: true });
