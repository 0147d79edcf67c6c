#!/usr/bin/env bash
# Builds the image and answers one long request through it, beside two embedded engines on this machine.
#
# It needs no container engine, only root and Debian's buildah: the base is made here with debootstrap (kept in
# ${XDG_CACHE_HOME:-~/.cache}/splitproxy), everything else lives in temporary folders. PYTHON names an interpreter that
# has splitproxy's extras `dev` and `local`; default: .venv of this work tree, else python3. SUITE names the Debian release.
set -euo pipefail
export LC_ALL=C STORAGE_DRIVER=vfs

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
suite=${SUITE:-bookworm}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/splitproxy
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=$root/.venv/bin/python
  [[ -x $PYTHON ]] || PYTHON=python3
fi

work='' sessions=''
running=()
step_name='' step_start=0

# --- the frame: steps with their times, and a clean machine afterwards

now_ms() { local t=$EPOCHREALTIME; echo $((${t/./} / 1000)); }

finish_step() {
  [[ -z $step_name ]] && return
  local ms=$(($(now_ms) - step_start))
  printf '%4d.%d s  %s%s\n' $((ms / 1000)) $((ms % 1000 / 100)) "$step_name" "${1:-}"
  step_name=''
}

step() {
  finish_step
  step_name=$1 step_start=$(now_ms)
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

stop() { # PID: asks, waits five seconds, insists
  local pid=$1
  kill -TERM "$pid" 2>/dev/null || return 0
  for _ in {1..50}; do
    kill -0 "$pid" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
}

clean_up() {
  local status=$?
  trap - EXIT
  set +e
  if [[ $status -eq 0 ]]; then step "clean up"; else finish_step " (failed)"; fi
  if [[ $status -ne 0 && -n $work ]]; then
    rm -f "$work/waiting.log"
    for log in "$work"/*.log; do
      [[ -s $log ]] && printf -- '--- the end of %s\n%s\n' "${log##*/}" "$(tail -n 25 "$log")" >&2
    done
  fi
  for pid in "${running[@]}"; do stop "$pid"; done
  [[ -n $sessions ]] && rm -rf --one-file-system "$sessions"
  [[ -n $work ]] && rm -rf --one-file-system "$work"
  finish_step
  [[ $status -ne 0 ]] || echo "the image works"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- what this machine has

need_tools() {
  local missing=()
  command -v buildah >/dev/null || missing+=(buildah)
  command -v debootstrap >/dev/null || missing+=(debootstrap debian-archive-keyring)
  command -v setpriv >/dev/null || missing+=(util-linux)
  [[ $EUID -eq 0 ]] || fail "this test must run as root, for debootstrap and chroot${missing[*]:+; missing, too: ${missing[*]}}"
  if ((${#missing[@]})); then
    command -v apt-get >/dev/null || fail "missing, and there is no apt-get to install them: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
  "$PYTHON" -c 'import gguf, pytest, xllamacpp, yaml' ||
    fail "$PYTHON lacks the extras: pip install -e '.[dev,local]', or name another interpreter in PYTHON"
}

# The CA bundle that pip on this machine is told to use, if it is.
ca_bundle() {
  local bundle=${PIP_CERT:-$("$PYTHON" -m pip config get global.cert 2>/dev/null || true)}
  [[ -n $bundle && -f $bundle ]] && echo "$bundle"
  return 0
}

free_ports() {
  "$PYTHON" - "$1" <<'PY'
import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in held))
PY
}

# --- the pieces

make_base_tar() { # FILE
  mkdir -p "${1%/*}"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$work/rootfs" \
    >"$work/debootstrap.log" 2>&1
  # Packed under another name first: a half-written file must never pass for a base. The device nodes are the runtime's.
  # What nobody reads in an image is left out, as slim bases do.
  tar -C "$work/rootfs" --exclude='./dev/*' --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
    --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/info/*' \
    --exclude='./usr/share/locale/*' -cf "$1.$$" .
  mv "$1.$$" "$1"
  rm -rf --one-file-system "$work/rootfs" "$work/debootstrap.log"
}

import_base() { # FILE
  local container mount bundle
  container=$("${buildah[@]}" from scratch)
  mount=$("${buildah[@]}" mount "$container")
  tar -C "$mount" -xf "$1"
  bundle=$(ca_bundle)
  if [[ -n $bundle ]]; then
    cp -L "$bundle" "$mount/etc/ssl/certs/build-ca.pem"
    build_args+=(--build-arg PIP_CERT=/etc/ssl/certs/build-ca.pem)
  fi
  [[ -z ${PIP_INDEX_URL:-} ]] || build_args+=(--build-arg "PIP_INDEX_URL=$PIP_INDEX_URL")
  "${buildah[@]}" umount "$container" >/dev/null
  "${buildah[@]}" commit --quiet --rm "$container" localhost/splitproxy-base >/dev/null
}

image_field() { # PYTHON EXPRESSION over the image's `config`: one line for each item of a list
  "${buildah[@]}" inspect --type image localhost/splitproxy | "$PYTHON" -c '
import json, sys
config = json.load(sys.stdin)["Docker"]["config"]
found = eval(sys.argv[1])
print(*(found if isinstance(found, list) else [found]), sep="\n")' "$1"
}

in_image() { # COMMAND...: a second process in the running container
  "${buildah[@]}" run --isolation chroot --network host --env "SPLITPROXY_LISTEN=127.0.0.1:$proxy_port" \
    "$container" -- "$@"
}

start_engine() { # SERVICE PORT
  local flags
  mapfile -t flags < <("$PYTHON" -c '
import pathlib, sys
from tests.test_configs import engine_command
model, sessions = map(pathlib.Path, sys.argv[2:4])
print(*engine_command(sys.argv[1], model=model, sessions=sessions, port=int(sys.argv[4])), sep="\n")' \
    "$1" "$model" "$sessions" "$2")
  ((${#flags[@]})) || fail "compose.yaml names no flags for $1"
  # As the image's user: only then may the proxy read and remove what the engines write, as in compose.yaml. The one
  # capability is for interpreters and models that lie in a folder of root's.
  setpriv --reuid "$uid" --regid "$gid" --clear-groups --inh-caps=-all,+dac_read_search \
    --ambient-caps=-all,+dac_read_search "$PYTHON" -m splitproxy.engines.embedded "${flags[@]}" --threads 1 >"$work/$1.log" 2>&1 &
  running+=($!)
}

wait_until() { # SECONDS PID COMMAND...: the command succeeds; the process must live that long
  local end=$(($(now_ms) + $1 * 1000)) pid=$2 code=0
  shift 2
  until "$@" >/dev/null 2>"$work/waiting.log"; do
    if ! kill -0 "$pid" 2>/dev/null; then
      wait "$pid" 2>/dev/null || code=$?
      fail "the process ended with exit code $code while it was waited for: $*"
    fi
    (($(now_ms) < end)) || fail "waited in vain: $*: $(tail -n 1 "$work/waiting.log")"
    sleep 0.2
  done
}

healthy() { # PORT
  "$PYTHON" - "http://127.0.0.1:$1/health" <<'PY'
import sys, urllib.request
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=5).read()
PY
}

# Until the self-test has passed, the proxy hands nothing over.
pair_proven() {
  "$PYTHON" - "http://127.0.0.1:$proxy_port/splitproxy/status" "$key" <<'PY'
import json, sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as reply:
    (pair,) = json.load(reply)["pairs"]
sys.exit(0 if pair["state"] == "proven" else f"the pair is {pair['state']}: {pair['fault']}")
PY
}

# The process of the image as this machine sees it: the descendant of buildah that has no children, run by the image's
# user and nobody else. (buildah's own helper above it waits as the same user.)
proxy_process() { # PID
  "$PYTHON" - "$1" "$uid" <<'PY'
import pathlib, sys
parent, users = {}, {}
for file in pathlib.Path("/proc").glob("[0-9]*/status"):
    try:
        status = dict(line.split(":\t", 1) for line in file.read_text().splitlines() if ":\t" in line)
    except OSError:
        continue
    parent[file.parent.name], users[file.parent.name] = status["PPid"], set(status["Uid"].split())
family = {sys.argv[1]}
while more := {pid for pid in parent if parent[pid] in family} - family:
    family |= more
leaves = family - {parent.get(pid) for pid in family}
if len(leaves) != 1:
    sys.exit(f"{len(leaves)} processes in the container instead of one")
(pid,) = leaves
if users[pid] != {sys.argv[2]}:
    sys.exit(f"the image's process runs as {users[pid]} instead of {sys.argv[2]}")
print(pid)
PY
}

ask() { # one long request; prints what came of it, fails on anything but a handover with an answer
  "$PYTHON" - "http://127.0.0.1:$proxy_port/v1/chat/completions" "$key" <<'PY'
import json, sys, urllib.request
url, key = sys.argv[1:]
text = " ".join(f"Line {n} of the ledger says that parcel {n * 7919 % 10007} went out." for n in range(140))
body = {"messages": [{"role": "user", "content": text}], "max_tokens": 32, "temperature": 0}
request = urllib.request.Request(url, json.dumps(body).encode(), {
    "Content-Type": "application/json", "Authorization": f"Bearer {key}"})
with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as reply:
    route, answer = reply.headers.get("X-Splitproxy-Route"), json.load(reply)
    reason, status = reply.headers.get("X-Splitproxy-Reason"), reply.status
content, read = answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
print(f"route {route} ({reason}), {read} tokens read, {answer['usage']['completion_tokens']} written")
faults = [fault for fault, so in {
    f"status {status}": status != 200, f"route {route} ({reason})": route != "handover",
    "an empty answer": not content, f"a prompt of {read} tokens": not 3500 <= read <= 6000}.items() if so]
sys.exit("; ".join(faults) or 0)
PY
}

# But for the lock, which tells the next proxy whose folder it is.
session_folder_is_empty() { [[ -z $(find "$sessions" -mindepth 1 ! -name .splitproxy.lock -print -quit) ]]; }

# --- the test

cd "$root"
step "tools"
need_tools
work=$(mktemp -d "${TMPDIR:-/tmp}/splitproxy-image-XXXXXX")
buildah=(buildah --root "$work/storage" --runroot "$work/run")
build_args=()

base=$cache/$suite-$(dpkg --print-architecture).tar
if [[ ! -f $base ]]; then
  step "base: debootstrap $suite"
  make_base_tar "$base"
fi
step "base: into the store"
import_base "$base"

step "build"
"${buildah[@]}" build --isolation chroot --format docker --pull-never --build-arg BASE=localhost/splitproxy-base \
  "${build_args[@]}" --tag localhost/splitproxy . >"$work/build.log" 2>&1
rm "$work/build.log"

step "image: settings"
user=$(image_field 'config["User"]')
uid=${user%:*} gid=${user#*:}
[[ $uid =~ ^[0-9]+$ && $gid =~ ^[0-9]+$ && $uid -ne 0 ]] || fail "USER is '$user', not a number other than 0"
mapfile -t command < <(image_field 'config["Entrypoint"] + config["Cmd"]')
mapfile -t health < <(image_field 'config["Healthcheck"]["Test"]')
[[ ${command[*]} == "splitproxy serve -c /etc/splitproxy/splitproxy.toml" ]] || fail "it would run: ${command[*]}"
[[ ${health[0]} == CMD ]] || fail "the health check is not in exec form: ${health[0]}"
[[ $(image_field 'config["StopSignal"]') == SIGTERM ]] || fail "STOPSIGNAL is not SIGTERM"
[[ $(image_field 'list(config["Volumes"])') == /sessions ]] || fail "/sessions is no volume"
[[ $(image_field 'list(config["ExposedPorts"])') == 8080/tcp ]] || fail "8080 is not exposed"

step "image: content"
read -r reader_port writer_port proxy_port <<<"$(free_ports 3)"
container=$("${buildah[@]}" from --pull-never localhost/splitproxy)
[[ $(in_image stat -c '%a %u %g' /sessions) == "700 $uid $gid" ]] || fail "/sessions is not private to the image's user"
[[ $(in_image id -u) == "$uid" ]] || fail "the image does not run as $uid"
if in_image python3 -c 'import pip' 2>/dev/null; then fail "pip is left in the image's venv"; fi
[[ $(in_image sh -c 'find /src /opt/pip /root/.cache -mindepth 1 2>/dev/null | head -n 1') == "" ]] ||
  fail "something of the build stage is left in the image"
if in_image "${health[@]:1}" 2>/dev/null; then fail "the health check passes although nothing runs"; fi

step "engines"
sessions=$(mktemp -d "$([[ -d /dev/shm ]] && echo /dev/shm || echo "$work")/splitproxy-image-XXXXXX")
chown "$uid:$gid" "$sessions" # mktemp made it 0700
model=$("$PYTHON" -c 'from tests.models import tiny_model; print(tiny_model("dense"))')
start_engine reader "$reader_port"
start_engine writer "$writer_port"
wait_until 60 "${running[0]}" healthy "$reader_port"
wait_until 60 "${running[1]}" healthy "$writer_port"

step "proxy: start"
# compose.toml as it is shipped, but for the engines' addresses.
mkdir "$work/etc"
sed -e "s|http://reader:8081|http://127.0.0.1:$reader_port|" -e "s|http://writer:8082|http://127.0.0.1:$writer_port|" \
  configs/compose.toml >"$work/etc/splitproxy.toml"
key=image-test-key
"${buildah[@]}" run --isolation chroot --network host --volume "$work/etc:/etc/splitproxy:ro" \
  --volume "$sessions:/sessions" --env "SPLITPROXY_LISTEN=127.0.0.1:$proxy_port" --env "SPLITPROXY_API_KEYS=$key" \
  "$container" -- "${command[@]}" >"$work/proxy.log" 2>&1 &
buildah_pid=$!
running=("$buildah_pid" "${running[@]}")
wait_until 60 "$buildah_pid" in_image "${health[@]:1}"
process=$(proxy_process "$buildah_pid")
running=("$process" "${running[@]}")
wait_until 60 "$buildah_pid" pair_proven

step "request"
result=$(ask)
finish_step ": $result"

step "session folder"
wait_until 5 "$buildah_pid" session_folder_is_empty

step "stop"
kill -TERM "$process"
code=0
wait "$buildah_pid" || code=$?
[[ $code -eq 0 ]] || fail "SIGTERM ended it with exit code $code"
running=("${running[@]:2}")
session_folder_is_empty || fail "left in the session folder: $(ls -A "$sessions")"
