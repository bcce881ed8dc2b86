#!/bin/sh
# Prints the path of a Python that can build, test and measure this checkout. Where there is none, makes one.
#
#   scripts/setup-env.sh              with the packages for the build, the tests and the figures
#   scripts/setup-env.sh ruff mypy    with these packages, too
#
# Where PYTHON is set, only the Python that it names is tried. Otherwise these are tried in this order: a Python >= 3.11 of this machine that has
# headers, a C compiler and the packages; a Python in .venv, into which pip installs the packages; Debian's packages, where apt-get may be used. Only
# the path goes to stdout; everything else goes to stderr.
set -eu
cd "$(dirname "$0")/.."

packages="setuptools>=66 numpy>=1.24 pytest>=7.2 matplotlib>=3.6${*:+ $*}"
welcome="ml_dtypes>=0.3" # installed where pip can; without it, tests that use it are skipped
debian="python3-dev python3-venv python3-setuptools python3-numpy python3-pytest python3-matplotlib gcc libc6-dev"

say() { echo "set-up: $*" >&2; }

answer() {
    case "$1" in
        /*) echo "$1" ;;
        *) echo "$PWD/$1" ;;
    esac
}

# Prints a line of everything that the Python $1 lacks, packages last; prints nothing where nothing is missing.
lacks() {
    # shellcheck disable=SC2086
    "$1" - $packages 2>/dev/null <<'PYTHON' || echo "a working interpreter"
import sys
if sys.version_info < (3, 11):
    print("Python >= 3.11")
    sys.exit()
import os, re, shlex, shutil, sysconfig
from importlib import metadata

def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)[:3]]

missing = []
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    missing.append("the headers of Python (Python.h)")
compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
if not shutil.which(compiler):
    missing.append(f"a C compiler ({compiler})")
for wanted in sys.argv[1:]:
    name, relation, version = re.fullmatch(r"([\w.-]+?)(?:(>=|==)(.+))?", wanted).groups()
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        missing.append("package " + wanted)
        continue
    public = found if "+" in (version or "") else found.partition("+")[0]  # 2.13.0+cpu is a 2.13.0
    if (relation == ">=" and numbers(found) < numbers(version)) or (relation == "==" and public != version):
        missing.append(f"package {wanted} (has {found})")
print(", ".join(missing))
PYTHON
}

lacks_only_packages() {
    case "$(lacks "$1")" in
        "package "* | "") return 0 ;;
        *) return 1 ;;
    esac
}

pythons() {
    for name in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} .venv/bin/python python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        command -v "$name" || true
    done
}

use_one_as_it_is() {
    for python in $(pythons); do
        if [ -z "$(lacks "$python")" ]; then
            answer "$python"
            return 0
        fi
    done
    return 1
}

pip_install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" >&2; }

make_venv() {
    if ! [ -x .venv/bin/python ]; then
        for python in $(pythons); do
            lacks_only_packages "$python" || continue
            say "making .venv with $python"
            "$python" -m venv .venv >&2 && break
            rm -rf .venv
        done
    fi
    [ -x .venv/bin/python ] && lacks_only_packages .venv/bin/python || return 1
    say "installing into .venv: $packages"
    # shellcheck disable=SC2086
    pip_install $packages $welcome || pip_install $packages || return 1
    [ -z "$(lacks .venv/bin/python)" ] && answer .venv/bin/python
}

install_debian_packages() {
    command -v apt-get >/dev/null || return 1
    root=
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || return 1
        root=sudo
        [ -t 0 ] || root="sudo -n"
    fi
    say "installing Debian's packages: $debian"
    # shellcheck disable=SC2086
    { $root apt-get -qq update && $root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $debian; } >/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    missing=$(lacks "$PYTHON")
    if [ -n "$missing" ]; then
        say "PYTHON=$PYTHON lacks $missing."
        exit 1
    fi
    answer "$(command -v "$PYTHON")"
    exit
fi

use_one_as_it_is || make_venv || { install_debian_packages && { use_one_as_it_is || make_venv; }; } || {
    for python in $(pythons); do say "$python lacks $(lacks "$python")"; done
    say "no Python can be used: install Python >= 3.11 with headers, a C compiler and the packages $packages, or name one with PYTHON=..."
    exit 1
}
