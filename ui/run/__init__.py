"""The tabs that show runs: the list, the selected run, and runs on other machines."""
