@echo off
rem start.bat [--port N] [--no-browser] [--listen --auth USER:PASSWORD]   the page, on 127.0.0.1:7860
rem start.bat demo [--json]    no browser: a tiny real LoRA run, a hang put in on purpose, recovery
rem start.bat sd-scripts       clones the pinned sd-scripts and makes its environment
setlocal
cd /d "%~dp0"
set PYTHONUTF8=1
fc /b requirements.txt .venv\.installed-requirements.txt >nul 2>&1
if not errorlevel 1 goto run
if exist .venv\Scripts\python.exe goto install
where py >nul 2>&1 && (py -3 -m venv .venv) || (python -m venv .venv)
if errorlevel 1 (
    echo Hangproof needs Python 3.11 to 3.14: install it from python.org, then run start.bat again 1>&2
    exit /b 1
)
:install
.venv\Scripts\python -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))"
if errorlevel 1 (
    rmdir /s /q .venv
    echo Hangproof needs Python 3.11 to 3.14 and found another: install one from python.org, then run start.bat again 1>&2
    exit /b 1
)
echo Hangproof: installing requirements.txt, once; PyTorch is large ... 1>&2
.venv\Scripts\python -m pip install --quiet --disable-pip-version-check -r requirements.txt 1>&2
if errorlevel 1 (
    echo Hangproof: the install failed, see above; run start.bat again once that is mended 1>&2
    exit /b 1
)
copy /y requirements.txt .venv\.installed-requirements.txt >nul
:run
if "%~1"=="demo" (
    .venv\Scripts\python demo.py %2 %3 %4 %5 %6 %7 %8 %9
    goto end
)
if "%~1"=="sd-scripts" (
    .venv\Scripts\python -m sd_scripts_patches.install %2 %3 %4 %5 %6 %7 %8 %9
    goto end
)
.venv\Scripts\python app.py %*
:end
exit /b %errorlevel%
