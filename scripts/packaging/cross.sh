# Building for another processor architecture, and running what was built: read by scripts/package and scripts/test-aarch64.
# shellcheck shell=bash

# The Rust target of an architecture.
triple_of() { echo "$1-unknown-linux-gnu"; }

# Debian's name of an architecture.
debian_of() { case $1 in x86_64) echo amd64 ;; aarch64) echo arm64 ;; *) return 1 ;; esac }

# Prints what is missing on this machine to build for an architecture, with the command that adds it.
missing_to_build() {
  local architecture=$1 triple debian
  triple=$(triple_of "$architecture") debian=$(debian_of "$architecture")
  [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ] || { echo "Rust has no target $triple: rustup target add $triple"; return; }
  [ "$architecture" = "$(uname -m)" ] && return
  command -v "$architecture-linux-gnu-gcc" >/dev/null && command -v "$architecture-linux-gnu-g++" >/dev/null ||
    echo "there is no C++ compiler for $architecture: apt-get install g++-${architecture//_/-}-linux-gnu libc6-dev-$debian-cross"
}

# Lets cargo link for an architecture; the crates that compile C find its compiler by themselves.
link_for() {
  [ "$1" = "$(uname -m)" ] || export "CARGO_TARGET_$(triple_of "${1^^}" | tr 'a-z-' 'A-Z_')_LINKER=$1-linux-gnu-gcc"
}

# Prints the command that runs a program of an architecture here; nothing if it needs none. Fails if there is no such command.
runner_of() {
  local debian
  [ "$1" != "$(uname -m)" ] || return 0
  debian=$(debian_of "$1")
  command -v "qemu-$1" >/dev/null || { echo "there is no qemu-$1: apt-get install qemu-user" >&2; return 1; }
  [ -e "/usr/$1-linux-gnu/lib/libstdc++.so.6" ] ||
    { echo "/usr/$1-linux-gnu has no C++ library: apt-get install libstdc++6-$debian-cross" >&2; return 1; }
  echo "qemu-$1 -L /usr/$1-linux-gnu"
}

# Starts a daemon of a program, asks it by this machine's own program, and stops it. The command that runs it comes last.
daemon_answers() {
  local asks=$1 folder status=1 at daemon
  shift
  folder=$(mktemp -d)
  "$@" serve --socket "$folder/socket" --model MODEL --block-size 16 >"$folder/log" 2>&1 &
  daemon=$!
  for at in $(seq 60); do
    if "$asks" query --socket "$folder/socket" --model MODEL --tokens 1,2,3 >"$folder/answer" 2>&1 &&
      "$asks" status --socket "$folder/socket" >>"$folder/answer" 2>&1; then
      status=0
      break
    fi
    [ "$at" = 60 ] || ! kill -0 "$daemon" 2>/dev/null || sleep 1
  done
  kill -TERM "$daemon" 2>/dev/null || true
  wait "$daemon" || { echo "the daemon did not end with 0" >&2; status=1; }
  [ "$status" = 0 ] || cat "$folder/log" "$folder/answer" >&2
  rm -rf "$folder"
  return "$status"
}
