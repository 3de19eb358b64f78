rem Secrets ({{ names|join(", ") }}): their values are in a file that only its owner can read, and not here.
set "env_file={{ path|path }}"
if exist "%env_file%" for /f "usebackq tokens=1,* delims==" %%A in ("%env_file%") do set "%%A=%%B"
{% for name in names %}
if not defined {{ name }} echo train.bat: {{ name }} has no value: set it, or write it to %env_file% 1>&2
{% endfor %}
