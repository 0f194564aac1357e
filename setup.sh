#!/bin/sh
# Makes .venv and installs into it: `setup.sh core PYTHON` what a testbed needs, `setup.sh compose PYTHON` that and what one in
# containers needs, `setup.sh fast PYTHON` core's and mypyc, `setup.sh test PYTHON` everything (torch included).
# Idempotent; says what is missing on this machine and how to get it.
set -eu
cd "$(dirname "$0")"
what=$1 python=$2

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

[ "$(uname -s)" = Linux ] || fail "this is $(uname -s): the testbed needs Linux (network namespaces, tc); use a Linux machine or virtual machine"
command -v "$python" >/dev/null || fail "$python: not found; install it (Debian: apt-get install python3), or name another: make PYTHON=/path/to/python3 ..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is $("$python" -V 2>&1): 3.11 or later is needed; name another: make PYTHON=/path/to/python3 ..."
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module; install it (Debian: apt-get install python3-venv)"
for program in unshare nsenter; do
    command -v "$program" >/dev/null || fail "$program: not found; install it (Debian: apt-get install util-linux)"
done

[ -x .venv/bin/python ] || { echo "making .venv with $("$python" -V 2>&1)" >&2; "$python" -m venv .venv; }
case $what in
    core) target=. ;;
    compose) target='.[compose]' ;;
    fast) target='.[fast]' ;;
    test) target='.[test]' ;;
    *) fail "$what: not one of core, compose, fast, test" ;;
esac
echo "installing $target into .venv (a minute or two the first time)" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable "$target" 2>.venv/pip.log || {
    tail -n 15 .venv/pip.log >&2
    fail "pip could not install $target (above, and in .venv/pip.log)"
}
touch .venv/.core
[ "$what" = core ] || touch ".venv/.$what"
[ "$what" != test ] || touch .venv/.compose .venv/.fast
