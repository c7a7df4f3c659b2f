"""The parts of scripts/check-security that no tool has."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "scripts/security/advisories.tsv"
# Licences that NOTICE names once for all crates; a crate that may be taken under one of them need not be named.
PLAIN = {"MIT", "Apache-2.0"}
# Each binary: its manifest.
BINARIES = {"kvrouted": "Cargo.toml", "kvrouted-gateway": "gateway/Cargo.toml"}


def run(*arguments, cwd=ROOT):
    return subprocess.run(arguments, cwd=cwd, check=True, capture_output=True, text=True).stdout


# What cargo-deny takes the database for, and the name that it gives to the folder of its clone: the address's last part
# and a hash. It never connects to it.
ADDRESS, CLONE = "https://advisories.invalid/listed", "listed-5cb7536ec88e7d2f"


def database(folder, clone):
    """Makes the database's clone in the folder, and prints cargo-deny's configuration of advisories."""
    configuration = (ROOT / "scripts/security/deny.toml").read_text()
    if clone:
        run("git", "clone", "--quiet", str(Path(clone).resolve()), str(folder / CLONE))
        date = run("git", "log", "-1", "--format=%cs", cwd=folder / CLONE).strip()
        print(f"advisories: those of {clone}, of {date}", file=sys.stderr)
    else:
        count = listed(folder / CLONE)
        date = re.search(r"looked up on (\S+)\.", LIST.read_text())[1]
        print(f"advisories: the {count} of scripts/security/advisories.tsv, looked up on {date}", file=sys.stderr)
        print("skipped: other advisories: KVROUTED_ADVISORY_DB names no clone of the database", file=sys.stderr)
    table = lambda name: re.search(rf"^\[{name}\]\n.*?(?=^\[|\Z)", configuration, re.M | re.S)[0]
    graph, rules = table("graph"), table("advisories")
    print(f'{graph}\n{rules}\ndb-path = "{folder}"\ndb-urls = ["{ADDRESS}"]')


def listed(source):
    """Makes a database of the listed advisories."""
    lines = [line.split("\t") for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    for ident, crate, date, kind, patched, unaffected in lines:
        requirements = lambda text: [] if text == "-" else text.split("; ")
        informational = "" if kind == "vulnerability" else f'informational = "{kind}"\n'
        text = (
            f'```toml\n[advisory]\nid = "{ident}"\npackage = "{crate}"\ndate = "{date}"\n{informational}\n[versions]\n'
            f"patched = {requirements(patched)}\nunaffected = {requirements(unaffected)}\n```\n\n# {ident}\n\n{kind}\n"
        ).replace("'", '"')
        path = source / "crates" / crate / f"{ident}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run("git", "init", "--quiet", cwd=source)
    run("git", "add", ".", cwd=source)
    identity = ("-c", "user.name=audit", "-c", "user.email=audit@localhost")
    run("git", *identity, "commit", "--quiet", "-m", "listed", cwd=source)
    return len(lines)


def notice():
    """NOTICE names the crates that must be named."""
    text = (ROOT / "NOTICE").read_text()
    missing = set()
    for binary, manifest in BINARIES.items():
        tree = run("cargo", "tree", "--locked", "--offline", "--manifest-path", manifest, "-e", "normal,no-proc-macro",
                   "--target", "x86_64-unknown-linux-gnu", "--prefix", "none", "--format", "{l}|{p}")
        crates = {tuple(line.replace(" (*)", "").split("|")) for line in tree.splitlines() if line}
        print(f"{binary}: {len(crates)} crates")
        for licence, package in crates:
            name = package.split()[0]
            is_plain = " AND " not in licence and PLAIN & set(re.split(r" OR |\s*/\s*", licence))
            if not is_plain and not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
                missing.add(f"NOTICE does not name {name} ({licence})")
    return sorted(missing)


def unsafe():
    """Counts unsafe code by file, and compares with the list of tests/tidy."""
    rules = (ROOT / "tests/tidy/rules.rs").read_text()
    allowed = re.findall(r'"([^"]+)"', re.search(r"UNSAFE_ALLOWED: &\[&str\] =\s*&\[([^\]]*)\]", rules)[1])
    problems, total = [], 0
    for path in sorted([*ROOT.glob("src/**/*.rs"), *ROOT.glob("gateway/src/**/*.rs")]):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("src/schema_generated/"):
            continue
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("//")]
        count = sum(bool(re.search(r"\bunsafe\s*(\{|fn|impl|extern)", line)) for line in lines)
        if count:
            total += count
            print(f"{count:4} {name}")
            if not any(name.startswith(place) for place in allowed):
                problems.append(f"{name}: unsafe code outside of {', '.join(allowed)}")
    print(f"{total:4} in all")
    return problems


def binaries(folders):
    """How the binaries are linked."""
    problems = []
    for binary in BINARIES:
        path = next((Path(folder) / binary for folder in folders if (Path(folder) / binary).is_file()), None)
        if path is None:
            print(f"skipped: the binary {binary}: it is not built (cargo build --release)")
            continue
        header, segments, dynamic = (run("readelf", flag, "-W", str(path)) for flag in ("-h", "-l", "-d"))
        symbols = run("readelf", "--dyn-syms", "-W", str(path))
        stack = re.search(r"GNU_STACK.*?(R[W ]*E?)\s", segments)
        facts = {
            "position-independent (PIE)": "DYN" in header,
            "read-only after relocation (RELRO)": "GNU_RELRO" in segments,
            "all symbols bound at the start (NOW)": bool(re.search(r"BIND_NOW|FLAGS_1.*NOW", dynamic)),
            "stack not executable": bool(stack) and "E" not in stack[1],
            "no search path (RPATH, RUNPATH)": not re.search(r"\((RPATH|RUNPATH)\)", dynamic),
            "not set-user-id or set-group-id": path.stat().st_mode & 0o6000 == 0,
        }
        for fact, holds in facts.items():
            print(f"{binary}: {'yes' if holds else 'NO '} {fact}")
            if not holds:
                problems.append(f"{binary}: not {fact}")
        # For information: Rust's own code has no such check, and its C libraries are built with the compiler's defaults.
        print(f"{binary}: {'yes' if '__stack_chk_fail' in symbols else 'no '} stack protector in its C code")
    return problems


def main(arguments):
    match arguments:
        case ["database", folder, clone]:
            problems = database(Path(folder).resolve(), clone)
        case ["notice"]:
            problems = notice()
        case ["unsafe"]:
            problems = unsafe()
        case ["binaries", *folders]:
            problems = binaries(folders)
        case _:
            sys.exit("audit.py: see scripts/check-security --help")
    for problem in problems or []:
        print(f"problem: {problem}", file=sys.stderr)
    sys.exit(bool(problems))


main(sys.argv[1:])
