@echo off
rem Trains @SLUG@, supervised: a hang or a crash is noticed and the training restarted; Ctrl-C stops it with a checkpoint.
rem It needs Python 3.11 to 3.14 with the packages of requirements.txt: in .venv beside this file, in PYTHON, or on the PATH.
setlocal
cd /d "%~dp0" || exit /b 1
set "HANGPROOF_DATA=%CD%"
set "PYTHONUTF8=1"
set "PYTHONPATH="
set "chosen="
if exist ".venv\Scripts\python.exe" set "chosen=%CD%\.venv\Scripts\python.exe"
if not defined chosen if defined PYTHON set "chosen=%PYTHON%"
if not defined chosen for %%P in (python.exe) do set "chosen=%%~$PATH:P"
if not defined chosen (echo train.bat: no Python found; install Python 3.11 to 3.14 from python.org 1>&2 & exit /b 1)
"%chosen%" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14)); " || (echo train.bat: Python 3.11 to 3.14 is needed 1>&2 & exit /b 1)
"%chosen%" -c "import @MODULES@" 2>nul || (echo train.bat: packages are missing; run: "%chosen%" -m venv .venv, then .venv\Scripts\python -m pip install -r requirements.txt 1>&2 & exit /b 1)
for %%D in ("%chosen%") do if not defined ACCELERATE if exist "%%~dpDaccelerate.exe" set "ACCELERATE=%%~dpDaccelerate.exe"
"%chosen%" -m launch train @SLUG@
exit /b %ERRORLEVEL%
