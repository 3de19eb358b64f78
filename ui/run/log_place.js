// The log (ui/run/log_view.py) is drawn from its end; who scrolls up stays there.
element.addEventListener("scroll", ({ target }) => target.scrollTop < -12 && trigger("scroll_up"), true);
