@echo off
rem {{ title|plain }}
rem Written from run.toml. Run it without the monitor: train.bat
rem Run it with the monitor, which restarts it after a hang: python -m monitor run {{ job.slug }}
{% for text in comments %}
rem {{ text|plain }}
{% endfor %}
chcp 65001 >nul
setlocal DisableDelayedExpansion
cd /d "{{ root|path }}" || exit /b 1
if defined PYTHONPATH (set "PYTHONPATH={{ root|path }};%PYTHONPATH%") else (set "PYTHONPATH={{ root|path }}")
{% for name, value in job.environment.items() %}
set "{{ name }}={{ value|path }}"
{% endfor %}
{{ secrets }}
{%- if job.launch %}

set "launcher=%ACCELERATE%"
if not defined launcher if exist "{{ launcher|path }}" set "launcher={{ launcher|path }}"
if not defined launcher for %%P in (accelerate.exe) do set "launcher=%%~$PATH:P"
if not defined launcher (echo {{ no_launcher|word }} 1>&2 & exit /b 127)
{% endif %}
{% if not job.launch or before %}

set "python=%TRAINER_PYTHON%"
{% if not job.launch %}
if not defined python if defined ACCELERATE for %%L in ("%ACCELERATE%") do set "python=%%~dpLpython.exe"
{% else %}
if not defined python for %%L in ("%launcher%") do if exist "%%~dpLpython.exe" set "python=%%~dpLpython.exe"
{% endif %}
if not defined python if exist "{{ python|path }}" set "python={{ python|path }}"
if not defined python for %%P in (python.exe) do set "python=%%~$PATH:P"
if not defined python (echo {{ no_python|word }} 1>&2 & exit /b 127)
{% endif %}
{% for what, lines in before %}

rem {{ what }}
"%python%" {{ lines|command }}
if not "%ERRORLEVEL%"=="0" exit /b %ERRORLEVEL%
{% endfor %}
{% if before %}

rem Trains.
{% else %}

{% endif %}
{% set local, final = job.save_dir.replace("/", "\\"), job.places.run.replace("/", "\\") %}
{% if job.save_dir %}
if not exist "{{ local|path }}" mkdir "{{ local|path }}"
{% endif %}
"{{ "%launcher%" if job.launch else "%python%" }}" {{ lines|command }}
{% if not job.save_dir %}
exit /b %ERRORLEVEL%
{% else %}
{# cmd has no trap: the copy runs when the trainer has ended. xcopy replaces other folders (samples) file by file. #}
set "code=%ERRORLEVEL%"
set "failed="
for %%F in ("{{ local|path }}\*") do (copy /b /y "%%F" "{{ final|path }}\.%%~nxF.tmp" >nul && move /y "{{ final|path }}\.%%~nxF.tmp" "{{ final|path }}\%%~nxF" >nul) || set "failed=1"
for /d %%D in ("{{ local|path }}\*-state") do call :copy_state "%%~nxD" || set "failed=1"
for /d %%D in ("{{ local|path }}\*") do (echo %%~nxD| findstr /e /c:"-state" >nul || xcopy /e /i /y /q "%%D" "{{ final|path }}\%%~nxD" >nul) || set "failed=1"
if defined failed echo {{ not_copied|word }} 1>&2
if defined failed if "%code%"=="0" exit /b 1
exit /b %code%

:copy_state
if exist "{{ final|path }}\.%~1.tmp" rmdir /s /q "{{ final|path }}\.%~1.tmp"
xcopy /e /i /y /q "{{ local|path }}\%~1" "{{ final|path }}\.%~1.tmp" >nul || exit /b 1
if exist "{{ final|path }}\%~1" rmdir /s /q "{{ final|path }}\%~1"
move "{{ final|path }}\.%~1.tmp" "{{ final|path }}\%~1" >nul
exit /b %ERRORLEVEL%
{% endif %}
