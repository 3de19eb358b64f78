@echo off
rem start.bat [--port N] [--no-browser] [--listen --auth USER:PASSWORD]   serves the page on 127.0.0.1:7860
rem start.bat demo [--json]    trains a tiny LoRA without a browser, with an injected hang and its recovery
rem start.bat doctor [--quick] says whether this machine and its trainers are ready, and what to do
rem start.bat sd-scripts       installs kohya's sd-scripts at the tested commit, in its own environment
rem start.bat musubi           installs kohya's musubi-tuner in the same way
rem start.bat COMMAND ...      any other command (hangproof.py lists them), such as start.bat status cat
setlocal
set "from=%CD%"
set "home=%~dp0"
cd /d "%home%"
set PYTHONUTF8=1
call :installed && goto run
rem One start installs and the others wait, because two would remove each other's files: cmd opens a file for writing once
rem at a time. In a folder that cannot be written there is no such file, and the installation says so.
:lock
set "mine="
8>&2 2>nul ( 9>.venv.lock ( call :set_up 2>&8 ) )
if not defined mine if exist .venv.lock (
    echo Hangproof: another start installs; waiting until it ends ... 1>&2
    ping -n 9 127.0.0.1 >nul
    goto lock
)
if not defined mine call :set_up
if errorlevel 1 goto failed
:run
set "first=%~1"
set "program=hangproof.py"
if "%first%"=="" set "program=app.py"
if "%first:~0,2%"=="--" set "program=app.py"
cd /d "%from%"
"%home%.venv\Scripts\python" "%home%%program%" %*
set "code=%errorlevel%"
goto end
:failed
set "code=1"
:end
rem A double click gives no words, and its window closes at the end: an error stays to be read.
if not "%code%"=="0" if "%~1"=="" pause
exit /b %code%

:installed
.venv\Scripts\python -V >nul 2>&1 && fc /b requirements.txt .venv\.installed-requirements.txt >nul 2>&1
exit /b %errorlevel%

:set_up
set "mine=1"
call :installed && exit /b 0
rem A .venv whose Python was removed, or whose creation was interrupted, is made again.
.venv\Scripts\python -m pip --version >nul 2>&1 && goto install
where py >nul 2>&1 && (py -3 -m venv --clear .venv) || (python -m venv --clear .venv)
if errorlevel 1 (
    echo Hangproof: Python 3.11 to 3.14 was not found; install it from python.org, then run start.bat again 1>&2
    exit /b 1
)
:install
.venv\Scripts\python -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))"
if errorlevel 1 (
    rmdir /s /q .venv
    echo Hangproof: this Python version is not supported; install Python 3.11 to 3.14 from python.org, then run start.bat again 1>&2
    exit /b 1
)
rem Of a package whose installation was interrupted, the programs can be missing, and pip would take it for installed.
for /d %%d in (.venv\Lib\site-packages\*.dist-info) do if not exist "%%d\INSTALLER" rmdir /s /q "%%d"
echo Hangproof: installing requirements.txt, first start only; PyTorch is a large download ... 1>&2
rem On Windows, PyPI's PyTorch is the build for the processor alone. Pip prefers the CUDA build where it finds both.
set "cuda="
where nvidia-smi >nul 2>&1 && set "cuda=--extra-index-url https://download.pytorch.org/whl/cu130"
.venv\Scripts\python -m pip install --quiet --disable-pip-version-check %cuda% -r requirements.txt 1>&2
if errorlevel 1 (
    echo Hangproof: the installation failed, see above; fix the error, then run start.bat again 1>&2
    exit /b 1
)
copy /y requirements.txt .venv\.installed-requirements.txt >nul
exit /b 0
