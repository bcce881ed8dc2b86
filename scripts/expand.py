"""Writes one kernel template as the compiler sees it at one level: preprocessed, one instance after the other, and formatted.

    make expand LEVEL=avx2 FILE=panel/attend                      # csrc/kernels/panel/attend_tmpl.inc
    python scripts/expand.py avx2 panel/attend clang-format       # the same, with this clang-format

The result, in build/expand/<level>/<file>.c, has only the lines of this template. Templates that it includes are expanded by their own
names. A template that is included several times, for two panel widths or for several dtypes, has several instances. CC names the compiler;
a level of another architecture needs a compiler for that architecture.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent


def main(level, name, clang_format):
    os.chdir(ROOT)
    template = Path("csrc/kernels") / f"{name.removesuffix('.inc').removesuffix('_tmpl')}_tmpl.inc"
    if not template.exists():
        known = sorted(p.relative_to("csrc/kernels").as_posix().removesuffix("_tmpl.inc") for p in Path("csrc/kernels").rglob("*_tmpl.inc"))
        sys.exit(f"FILE: expected one of {', '.join(known)}; got {name}")
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path("setup.py")
    isa_flags, more_flags = setup["ISA_FLAGS"], setup["MORE_FLAGS"]
    sources = sorted(p for p in Path("csrc/kernels/levels").glob("*.c") if level_of(p.stem, [*isa_flags, "portable"]) == level)
    if not sources:
        sys.exit(f"LEVEL: expected one of {', '.join(['portable', *isa_flags])}; got {level}")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    macro, flags = isa_flags.get(level, ("__STDC__", ""))
    if f"#define {macro} " not in preprocessed(compiler, ["-dM", "-x", "c", os.devnull]):
        sys.exit(f"LEVEL: {compiler} does not compile for the architecture of {level}; name one that does, as by CC=aarch64-linux-gnu-gcc")
    instances = []
    for source in sources:
        instances += instances_in(source, template, compiler, f"{flags} {more_flags.get(source.stem, '')}")
    if not instances:
        sys.exit(f"{template} is not part of {level}")
    target = Path("build/expand") / level / f"{template.relative_to('csrc/kernels').as_posix().removesuffix('_tmpl.inc')}.c"
    target.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"/* instance {i + 1} of {len(instances)} */\n{text}" for i, text in enumerate(instances)]
    target.write_text("\n".join(texts), encoding="utf-8")
    subprocess.run([clang_format, "-i", target], check=True)
    print(target)


def level_of(stem, levels):
    """The level of a file of csrc/kernels/levels. The file's name begins with the name of the level; of several such levels, the longest
    name counts."""
    return max((name for name in levels if f"{stem}_".startswith(f"{name}_")), key=len, default=None)


def preprocessed(compiler, arguments):
    return subprocess.run([compiler, "-E", *arguments], capture_output=True, text=True, check=True).stdout


def instances_in(source, template, compiler, flags):
    """The preprocessed text of the template, once for each time that the source includes it."""
    text = preprocessed(compiler, ["-std=c11", "-O3", "-DNDEBUG", "-Icsrc", *shlex.split(flags), str(source)])
    instances, inside = [], False
    for line in text.splitlines():
        marker = re.match(r'# \d+ "(.*?)"((?: \d)*)$', line)
        if marker:
            inside = Path(marker[1]) == template
            if inside and " 1" in marker[2]:  # the template is entered here, not returned to
                instances.append("")
        elif inside and line.strip():
            instances[-1] += line + "\n"
    return instances


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: expand.py LEVEL FILE CLANG_FORMAT (make expand LEVEL=avx2 FILE=panel/attend)")
    main(*sys.argv[1:])
