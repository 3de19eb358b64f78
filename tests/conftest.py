"""What every test run says at its end: why tests did not run, one line a reason."""

from collections import Counter


def pytest_terminal_summary(terminalreporter):
    """One line for each reason to skip, however many tests share it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} {'test' if count == 1 else 'tests'} did not run: {reason}")
